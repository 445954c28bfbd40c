model = dict(
    type="LiftSplat",
    image_size=(64, 160),
    widths=(16, 32, 64),
    depth=1,
    channels=32,
    distances=(2.0, 26.0, 1.0),
    reach=20.0,
    cells=50,
    map_width=32,
)
