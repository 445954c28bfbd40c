_base_ = [
    "./_base_/models/lift_splat_small.py",
    "./_base_/datasets/scenes_64x160.py",
    "./_base_/schedules/schedule_200.py",
    "./_base_/default_runtime.py",
    "./_base_/vram_guard.py",
]
