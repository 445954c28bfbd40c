optim_wrapper = dict(
    type="OptimWrapper",
    optimizer=dict(type="AdamW", lr=2e-3, weight_decay=1e-4),
    clip_grad=dict(max_norm=5.0),
)
param_scheduler = [
    dict(type="LinearLR", start_factor=0.1, by_epoch=False, begin=0, end=20),
    dict(type="PolyLR", eta_min=1e-4, power=0.9, by_epoch=False, begin=20, end=200),
]
train_cfg = dict(type="IterBasedTrainLoop", max_iters=200, val_interval=100)
val_cfg = dict(type="ValLoop")
