train_dataloader = dict(
    batch_size=4,
    num_workers=0,
    sampler=dict(type="InfiniteSampler", shuffle=True),
    dataset=dict(type="RenderedScenes", scenes=96, cameras=4, image_size=(64, 160), reach=20.0, cells=50),
)
val_dataloader = dict(
    batch_size=4,
    num_workers=0,
    sampler=dict(type="DefaultSampler", shuffle=False),
    dataset=dict(type="RenderedScenes", scenes=16, first=1000, cameras=4, image_size=(64, 160), reach=20.0, cells=50),
)
val_evaluator = dict(type="VehicleIoU")
