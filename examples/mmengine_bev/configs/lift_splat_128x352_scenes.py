# The sizes of Lift, Splat, Shoot: six cameras of 128 x 352, 41 depths, 64 channels, a map of 200 x 200 cells.
_base_ = ["./lift_splat_small_scenes.py"]
scenes = dict(cameras=6, image_size=(128, 352), reach=50.0, cells=200)
model = dict(
    image_size=(128, 352),
    widths=(32, 64, 128, 256),
    depth=2,
    channels=64,
    distances=(4.0, 45.0, 1.0),
    reach=50.0,
    cells=200,
    map_width=128,
)
train_dataloader = dict(dataset=scenes)
val_dataloader = dict(dataset=scenes)
