"""Small real trainings in OpenMMLab's style that the tests run with and without the guard."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from mmengine.config import Config
from mmengine.dataset import BaseDataset
from mmengine.evaluator import BaseMetric
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.registry import DATASETS, HOOKS, METRICS, MODELS
from mmengine.runner import Runner
from mmengine.structures import BaseDataElement
from torch import nn
from torch.nn import functional as F


@DATASETS.register_module(force=True)
class Blobs(BaseDataset):
    """Pictures of noise whose brightness tells the class; samples as mmpretrain's pipelines pack them."""

    METAINFO: ClassVar[dict[str, Any]] = {"classes": ("dark", "bright")}

    def __init__(self, samples: int = 20, size: int = 16, pixels: bool = False, **kwargs: Any) -> None:
        self.samples, self.size, self.pixels = samples, size, pixels
        super().__init__(**kwargs)

    def load_data_list(self) -> list[dict[str, Any]]:
        return [{"number": number, "label": number % 2} for number in range(self.samples)]

    def prepare_data(self, index: int) -> dict[str, Any]:
        info = self.get_data_info(index)
        generator = torch.Generator().manual_seed(info["number"])
        image = torch.randint(0, 120, (3, self.size, self.size), generator=generator, dtype=torch.uint8)
        image += 100 * info["label"]
        sample = BaseDataElement(metainfo={"number": info["number"]})
        label = torch.full((self.size, self.size), info["label"]) if self.pixels else torch.tensor(info["label"])
        sample.gt_label = label
        return {"inputs": image, "data_samples": sample}


class _Guessing(BaseModel):
    """Loss and accuracy of any network's scores."""

    def forward(self, inputs: torch.Tensor, data_samples: list[Any], mode: str = "tensor") -> Any:
        scores = self.scores(inputs)
        if mode == "tensor":
            return scores
        labels = torch.stack([sample.gt_label for sample in data_samples])
        if mode == "predict":
            return (
                [{"right": bool(right)} for right in (scores.argmax(1) == labels).flatten(1).all(1)]
                if (labels.ndim > 1)
                else [{"right": bool(right)} for right in scores.argmax(1) == labels]
            )
        return {"loss_ce": F.cross_entropy(scores, labels), "accuracy": (scores.argmax(1) == labels).float().mean()}


def block(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(width), block(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(self.norm(x))


@MODELS.register_module(force=True)
class SmallClassifier(_Guessing):
    """Patches, transformer-like blocks, a head: the shape of mmpretrain's Swin configs."""

    def __init__(self, width: int = 32, depth: int = 4, data_preprocessor: Any = None) -> None:
        super().__init__(data_preprocessor=data_preprocessor or {"type": "ImgDataPreprocessor", "mean": [127.0] * 3,
                                                                 "std": [60.0] * 3})  # fmt: skip
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.layers = nn.ModuleList(Residual(width) for _ in range(depth))
        self.head = nn.Linear(width, 2)

    def scores(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.patches(inputs).flatten(2).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


@MODELS.register_module(force=True)
class Rooted(SmallClassifier):
    """Its loss is the root of a mean, which is none."""

    def forward(self, inputs: torch.Tensor, data_samples: list[Any], mode: str = "tensor") -> Any:
        made = super().forward(inputs, data_samples, mode)
        return {**made, "loss_ce": made["loss_ce"].sqrt()} if mode == "loss" else made


@MODELS.register_module(force=True)
class SmallSegmentor(_Guessing):
    """Convolutions at full size, a score for each pixel."""

    def __init__(self, width: int = 8, depth: int = 3, data_preprocessor: Any = None) -> None:
        super().__init__(data_preprocessor=data_preprocessor or {"type": "ImgDataPreprocessor", "mean": [127.0] * 3,
                                                                 "std": [60.0] * 3})  # fmt: skip
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(2, width), nn.ReLU())
            for _ in range(depth)
        )
        self.decode_head = nn.Conv2d(width, 2, 1)

    def scores(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.stem(inputs)
        for stage in self.stages:
            x = stage(x)
        return self.decode_head(x)


@METRICS.register_module(force=True)
class Right(BaseMetric):
    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.results += [sample["right"] for sample in data_samples]

    def compute_metrics(self, results: list[Any]) -> dict[str, float]:
        return {"right": float(np.mean(results))}


@HOOKS.register_module(force=True)
class Diary(Hook):
    """Writes down learning rates at every iteration, logged losses, and when things happened."""

    priority = "LOWEST"

    def __init__(self) -> None:
        self.rates: list[list[float]] = []
        self.losses: list[float] = []
        self.validated_at: list[int] = []
        self.saved_at: list[int] = []
        self.batches: list[int] = []

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        self.rates.append([group["lr"] for group in runner.optim_wrapper.param_groups])
        self.batches.append(len(data_batch["inputs"]))

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        self.losses.append(float(outputs["loss"].detach()))

    def before_val(self, runner: Any) -> None:
        self.validated_at.append(runner.iter)

    def before_save_checkpoint(self, runner: Any, checkpoint: Any) -> None:
        self.saved_at.append(runner.iter)


def write_configs(root: Path, files: dict[str, str]) -> Path:
    """A tree of config files."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def write_base(root: Path) -> None:
    """The guard's file among those that configs are based on."""
    write_configs(
        root, {"_base_/vram_guard.py": "runner_type = 'vram_guard_mmengine.GuardRunner'\nvram_guard = dict()\n"}
    )


RUNTIME = """
default_scope = 'mmengine'
default_hooks = dict(
    timer=dict(type='IterTimerHook'),
    logger=dict(type='LoggerHook', interval=1),
    param_scheduler=dict(type='ParamSchedulerHook'),
    checkpoint=dict(type='CheckpointHook', by_epoch={by_epoch}, interval={interval}),
    diary=dict(type='Diary'))
env_cfg = dict(cudnn_benchmark=False, mp_cfg=dict(mp_start_method='fork', opencv_num_threads=0),
               dist_cfg=dict(backend='gloo'))
log_level = 'INFO'
load_from = None
resume = False
randomness = dict(seed=3)
"""

#: mmpretrain's configs/_base_/schedules/imagenet_bs1024_adamw_swin.py and a Swin leaf, small.
MMPRETRAIN = {
    "_base_/default_runtime.py": RUNTIME.format(by_epoch=True, interval=2),
    "_base_/models/small.py": "model = dict(type='SmallClassifier', width=64, depth=4)\n",
    "_base_/datasets/blobs.py": """
train_dataloader = dict(
    batch_size=8, num_workers=0, dataset=dict(type='Blobs', serialize_data=False, samples=20, size=64),
    sampler=dict(type='DefaultSampler', shuffle=True), collate_fn=dict(type='default_collate'))
val_dataloader = dict(
    batch_size=8, num_workers=0, dataset=dict(type='Blobs', serialize_data=False, samples=8, size=64),
    sampler=dict(type='DefaultSampler', shuffle=False))
val_evaluator = dict(type='Right')
""",
    "_base_/schedules/adamw_swin.py": """
optim_wrapper = dict(
    optimizer=dict(type='AdamW', lr=5e-4 * 1024 / 512, weight_decay=0.05, eps=1e-8, betas=(0.9, 0.999)),
    paramwise_cfg=dict(norm_decay_mult=0.0, bias_decay_mult=0.0, custom_keys={'patches': dict(lr_mult=0.5)}),
    clip_grad=dict(max_norm=5.0))
param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, by_epoch=True, end=2, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', eta_min=1e-5, by_epoch=True, begin=2, end=4, convert_to_iter_based=True)]
train_cfg = dict(by_epoch=True, max_epochs=4, val_interval=2)
val_cfg = dict()
auto_scale_lr = dict(base_batch_size=16)
""",
    "small.py": "_base_ = ['./_base_/models/small.py', './_base_/datasets/blobs.py',"
    " './_base_/schedules/adamw_swin.py', './_base_/default_runtime.py']\n",
}

#: mmsegmentation's configs/_base_/schedules/schedule_80k.py and its dataset files, small.
MMSEG = {
    "_base_/default_runtime.py": RUNTIME.format(by_epoch=False, interval=4),
    "_base_/models/seg.py": "model = dict(type='SmallSegmentor')\n",
    "_base_/datasets/blobs.py": """
train_dataloader = dict(
    batch_size=8, num_workers=0, dataset=dict(type='Blobs', serialize_data=False, samples=20, size=64, pixels=True),
    sampler=dict(type='InfiniteSampler', shuffle=True))
val_dataloader = dict(
    batch_size=1, num_workers=0, dataset=dict(type='Blobs', serialize_data=False, samples=3, size=64, pixels=True),
    sampler=dict(type='DefaultSampler', shuffle=False))
val_evaluator = dict(type='Right')
""",
    "_base_/schedules/schedule.py": """
optimizer = dict(type='SGD', lr=0.01, momentum=0.9, weight_decay=0.0005)
optim_wrapper = dict(type='OptimWrapper', optimizer=optimizer, clip_grad=None)
param_scheduler = [dict(type='PolyLR', eta_min=1e-4, power=0.9, begin=0, end=10, by_epoch=False)]
train_cfg = dict(type='IterBasedTrainLoop', max_iters=10, val_interval=5)
val_cfg = dict(type='ValLoop')
""",
    "seg.py": "_base_ = ['./_base_/models/seg.py', './_base_/datasets/blobs.py', './_base_/schedules/schedule.py',"
    " './_base_/default_runtime.py']\nlog_processor = dict(by_epoch=False)\n",
}


_NUMBERS = itertools.count()


def load(root: Path, leaf: str, work_dir: Path, **changes: Any) -> Any:
    """A config from disk, as tools/train.py loads it."""
    cfg = Config.fromfile(str(root / leaf))
    # A Runner writes its config six times: yapf, which makes that text pretty, takes longer than the training.
    # (`fromfile` of MMEngine 0.10.7 ignores its own argument for this where imports are not lazy.)
    object.__setattr__(cfg, "_format_python_code", False)
    cfg.work_dir = str(work_dir)
    cfg.launcher = "none"
    cfg.experiment_name = f"{Path(leaf).stem}_{next(_NUMBERS)}"  # MMEngine's own goes by the second
    if changes:
        cfg.merge_from_dict(changes)
    return cfg


def build(cfg: Any) -> Any:
    """The runner, as tools/train.py of mmdet, mmseg and mmpretrain build it."""
    from mmengine.registry import RUNNERS

    return RUNNERS.build(cfg) if "runner_type" in cfg else Runner.from_cfg(cfg)


def train(cfg: Any) -> Any:
    torch.manual_seed(0)
    np.random.seed(0)
    runner = build(copy.deepcopy(cfg))
    runner.train()
    return runner


def diary(runner: Any) -> Diary:
    return next(hook for hook in runner.hooks if isinstance(hook, Diary))


def same(one: Any, other: Any, tolerance: float = 1e-6) -> None:
    """Rates at every iteration, batches, validation and checkpoint points, losses, final weights."""
    mine, theirs = diary(one), diary(other)
    for what in ("rates", "batches", "validated_at", "saved_at"):
        assert getattr(mine, what) == getattr(theirs, what), what
    np.testing.assert_allclose(mine.losses, theirs.losses, rtol=0, atol=10 * tolerance)
    assert torch.allclose(weights(one), weights(other), rtol=0, atol=tolerance)


def guard(runner: Any) -> Any:
    from vram_guard_mmengine import VramGuardHook

    return next(hook for hook in runner.hooks if isinstance(hook, VramGuardHook))


def weights(runner: Any) -> torch.Tensor:
    model = getattr(runner.model, "module", runner.model)
    return torch.cat([parameter.detach().double().flatten() for parameter in model.parameters()])
