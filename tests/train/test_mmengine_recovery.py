"""Real out-of-memory errors inside MMEngine's loops, against the same training undisturbed."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mmengine")
from vram_guard_mmengine import VramGuardHook  # noqa: F401, I001 - first: it knows what MMEngine's own imports warn of

import mmengine_cases as cases
import oom_cases
import torch
from mmengine.registry import MODELS
from torch import nn

from vram_guard.errors import RecoveryFailedError

RUNNER = "vram_guard_mmengine.GuardRunner"
AT = 4
"""The loaded batch that breaks."""


@MODELS.register_module(force=True)
class Breaking(cases._Guessing):
    """Dropout and running statistics: what a repeated batch must not have moved twice. Breaks above 4 samples."""

    def __init__(self, breaks: str = "", width: int = 12, **kwargs: Any) -> None:
        super().__init__(data_preprocessor={"type": "ImgDataPreprocessor", "mean": [127.0] * 3, "std": [60.0] * 3})
        self.breaks, self.loaded, self.seen = breaks, 0, []
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.statistics = nn.BatchNorm2d(width, affine=False)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(width, 2)

    def scores(self, inputs: torch.Tensor) -> torch.Tensor:
        self.statistics(self.patches(inputs[:1].detach()))  # moves running statistics, decides nothing
        x = torch.relu(self.patches(inputs)).mean((2, 3))
        too_large = len(inputs) > 4 and inputs.device.type == "cpu" and self.armed
        if self.training and too_large and self.breaks == "forward":
            raise oom_cases.no_memory()
        if not self.training and too_large and self.breaks == "validation":
            raise oom_cases.no_memory()
        if self.training and too_large and self.breaks == "mistake":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        if self.training and self.armed and self.breaks == "hopeless":
            raise oom_cases.no_memory()
        if self.training and too_large and self.breaks == "backward":
            x = oom_cases.breaks_in_backward(x)
        return self.head(self.drop(x) if self.drop.p else x)

    armed = False


class Arming(cases.Hook):
    """Lets the model break from one iteration on."""

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        model = getattr(runner.model, "module", runner.model)
        model.armed = runner.iter >= AT

    def before_val_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        runner.model.armed = True


class LetGo(cases.Hook):
    """Writes down how many of the images of earlier batches are still there when one begins."""

    def __init__(self) -> None:
        self.seen: list[weakref.ref[torch.Tensor]] = []
        self.left: list[int] = []

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        self.left.append(sum(one() is not None for one in self.seen))
        self.seen += map(weakref.ref, data_batch["inputs"])


for hook in (Arming, LetGo):
    cases.HOOKS.register_module(force=True, module=hook)


@pytest.fixture(scope="module")
def root(tmp_path_factory: Any) -> Path:
    return cases.write_configs(tmp_path_factory.mktemp("recovery") / "configs", cases.MMSEG)


def train(root: Path, name: str, breaks: str, **changes: Any) -> Any:
    cfg = cases.load(root, "seg.py", root.parent / name)
    cfg.model = {"type": "Breaking", "breaks": breaks}
    cfg.runner_type = RUNNER
    cfg.vram_guard = {"budget": "1GiB", "margin": 0, "recover": True, "allow": ["accumulate"]}
    cfg.vram_guard["loss_weight"] = "mean"  # the step reads what a hook sets, so that nothing proves it
    data = {"dataset.pixels": False, "dataset.size": 16, "num_workers": 0}
    cfg.merge_from_dict({f"{loader}.{key}": value for loader in ("train_dataloader", "val_dataloader")
                         for key, value in data.items()})  # fmt: skip
    cfg.merge_from_dict(
        {
            "val_dataloader.batch_size": 6,
            "val_dataloader.dataset.samples": 6,
            "custom_hooks": [{"type": "Arming"}],
            **changes,
        }
    )
    return cases.train(cfg)


@pytest.fixture(scope="module")
def undisturbed(root: Path) -> Any:
    gc.collect()
    gc.disable()
    try:
        return train(root, "undisturbed", "", custom_hooks=[{"type": "Arming"}, {"type": "LetGo"}])
    finally:
        gc.enable()


def statistics(runner: Any) -> torch.Tensor:
    return torch.cat([runner.model.statistics.running_mean, runner.model.statistics.running_var])


def warnings_of(runner: Any) -> str:
    return next(Path(runner.log_dir).glob("*.log")).read_text()


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_batch_runs_again_and_nothing_else_is_different(root: Path, where: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(nn.Dropout, "__init__", _no_drop)  # masks of other shapes are other numbers
    plain = train(root, f"plain-{where}", "")
    runner = train(root, where, where)
    cases.same(runner, plain)
    assert "runs again in micro-batches of 4" in warnings_of(runner)
    assert "train_step" not in vars(runner.model), "given back as it came"


def _no_drop(self: nn.Dropout, p: float = 0.5, inplace: bool = False) -> None:
    nn.Module.__init__(self)
    self.p, self.inplace = 0.0, inplace


def test_armed_and_never_needed_is_bit_identical(root: Path, undisturbed: Any) -> None:
    plain = train(root, "unarmed", "", **{"vram_guard.recover": False})
    assert torch.equal(cases.weights(plain), cases.weights(undisturbed))
    assert torch.equal(statistics(plain), statistics(undisturbed))
    assert cases.diary(plain).losses == cases.diary(undisturbed).losses


@pytest.mark.filterwarnings("ignore:Detected call of `scheduler.step:UserWarning")  # MMEngine accumulates so
def test_with_gradients_of_earlier_batches(root: Path, monkeypatch: Any) -> None:
    """Breaks in the second of two batches that make one update: the first one's gradients survive."""
    monkeypatch.setattr(nn.Dropout, "__init__", _no_drop)
    options = {"optim_wrapper.accumulative_counts": 3}
    plain = train(root, "plain-accumulating", "", **options)
    runner = train(root, "accumulating", "backward", **options)
    assert torch.allclose(cases.weights(runner), cases.weights(plain), rtol=0, atol=1e-6)
    assert "runs again" in warnings_of(runner)


def test_what_cannot_be_helped_ends_clearly(root: Path) -> None:
    with pytest.raises(RecoveryFailedError, match=r"no smaller micro-batch[\s\S]*What was predicted"):
        train(root, "hopeless", "hopeless")
    with pytest.raises(RecoveryFailedError, match=r"outside a batch's[\s\S]*last checkpoint[\s\S]*budget="):
        train(root, "validation", "validation")


def test_another_error_is_raised_as_it_is(root: Path) -> None:
    with pytest.raises(RuntimeError, match="illegal memory access"):
        train(root, "mistake", "mistake")


def test_why_it_is_not_armed_is_said(root: Path) -> None:
    runner = train(root, "not-allowed", "", **{"vram_guard.allow": ["precision"]})
    assert "would not be recovered from: smaller micro-batches are not allowed" in warnings_of(runner)


def test_a_batch_is_gone_when_the_next_one_comes(undisturbed: Any) -> None:
    """None waits for Python's garbage collector."""
    left = next(hook for hook in undisturbed.hooks if isinstance(hook, LetGo)).left
    assert left == [0] * 10
