"""What MMEngine calls once per batch is called once per batch, or micro-batches are refused."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import pytest

pytest.importorskip("mmengine")
from vram_guard_mmengine import VramGuardHook  # noqa: F401, I001 - first: it knows what MMEngine's own imports warn of

import mmengine_cases as cases
import torch
from mmengine.optim import OptimWrapper
from mmengine.registry import HOOKS, MODELS, OPTIM_WRAPPERS

RUNNER = "vram_guard_mmengine.GuardRunner"


class Counting(OptimWrapper):  # type: ignore[misc]
    """Edits gradients in ``step``, once a batch."""

    counts: ClassVar[Counter[str]] = Counter()

    def step(self, **kwargs: Any) -> None:
        self.counts["step"] += 1
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.clamp_(-1e-3, 1e-3)
        super().step(**kwargs)

    def zero_grad(self, **kwargs: Any) -> None:
        self.counts["zero_grad"] += 1
        super().zero_grad(**kwargs)


class OwnBackward(OptimWrapper):  # type: ignore[misc]
    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        super().backward(loss**2, **kwargs)


class OwnScale(OptimWrapper):  # type: ignore[misc]
    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        return super().scale_loss(loss.sqrt())


class Hooked(cases.SmallSegmentor):
    """With a hook that edits the gradient in backward."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.decode_head.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


class Returning(cases.SmallSegmentor):
    """Returns more than log variables."""

    def train_step(self, data: Any, optim_wrapper: Any) -> Any:
        log_vars = super().train_step(data, optim_wrapper)
        numbers = [sample.number for sample in data["data_samples"]]
        return {**log_vars, "mean": sum(numbers) / len(numbers), "samples": len(numbers)}


class Watching(cases.Hook):
    """Keeps outputs; and registers a hook late, where it is told to."""

    def __init__(self, late: bool = False) -> None:
        self.late = late
        self.counts: Counter[str] = Counter()
        self.outputs: list[Any] = []

    def before_train(self, runner: Any) -> None:
        if self.late:
            runner.model.decode_head.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))

    def before_train_iter(self, *_: Any, **__: Any) -> None:
        self.counts["before_train_iter"] += 1

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        self.counts["after_train_iter"] += 1
        self.outputs.append(outputs)


for wrapper in (Counting, OwnBackward, OwnScale):
    OPTIM_WRAPPERS.register_module(module=wrapper, force=True)
for model in (Hooked, Returning):
    MODELS.register_module(module=model, force=True)
HOOKS.register_module(module=Watching, force=True)


@pytest.fixture(scope="module")
def root(tmp_path_factory: Any) -> Path:
    return cases.write_configs(tmp_path_factory.mktemp("hooks") / "configs", cases.MMSEG)


def train(root: Path, name: str, guard: dict[str, Any] | None, **changes: Any) -> tuple[Any, Watching]:
    """Four iterations, in micro-batches of two where there is a guard."""
    cfg = cases.load(root, "seg.py", root.parent / name)
    if guard is not None:
        cfg.runner_type = RUNNER
        cfg.vram_guard = {"budget": "1GiB", "margin": 0, "loss_weight": "mean", "pin": {"micro_batch_size": 2}, **guard}
    data = {"train_dataloader.dataset.size": 16, "train_cfg.max_iters": 4, "train_cfg.val_interval": 9}
    cfg.merge_from_dict({**data, "custom_hooks": [{"type": "Watching"}], **changes})
    Counting.counts.clear()
    runner = cases.train(cfg)
    return runner, next(hook for hook in runner.hooks if isinstance(hook, Watching))


def log_of(runner: Any) -> str:
    return next(Path(runner.log_dir).glob("*.log")).read_text()


@pytest.mark.filterwarnings("ignore:Detected call of `scheduler.step:UserWarning")  # MMEngine accumulates so
@pytest.mark.parametrize("recover", [False, True], ids=["", "recovery armed"])
@pytest.mark.parametrize("batches", [1, 3])
def test_step_and_zero_grad_run_once_a_batch(root: Path, batches: int, recover: bool) -> None:
    changes = {"optim_wrapper.type": "Counting", "optim_wrapper.accumulative_counts": batches}
    plain, watched = train(root, "plain", None, **changes)
    counts = dict(Counting.counts)
    split, split_watched = train(root, "split", {"recover": recover}, **changes)
    assert cases.guard(split).plan.splits == 4
    assert counts == {"step": -(-4 // batches), "zero_grad": -(-4 // batches)}
    assert counts == Counting.counts
    assert watched.counts == split_watched.counts == {"before_train_iter": 4, "after_train_iter": 4}
    assert torch.allclose(cases.weights(split), cases.weights(plain), rtol=0, atol=1e-6)


REFUSED = {
    "backward of OwnBackward is overridden": {"optim_wrapper.type": "OwnBackward"},
    "scale_loss of OwnScale is overridden": {"optim_wrapper.type": "OwnScale"},
    "decode_head.weight has a hook": {"model.type": "Hooked"},
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_runs_with_every_backward_keeps_batches_whole(root: Path, why: str) -> None:
    plain, _ = train(root, "plain", None, **REFUSED[why])
    pinned, _ = train(root, "pinned", {"recover": True}, **REFUSED[why])
    assert f"micro_batch_size is pinned, but smaller micro-batches are not possible here: {why}" in log_of(pinned)
    recovering, _ = train(root, "recovering", {"recover": True, "pin": {}}, **REFUSED[why])
    assert f"would not be recovered from: {why}" in log_of(recovering)
    for runner in (pinned, recovering):
        assert torch.equal(cases.weights(runner), cases.weights(plain))


@pytest.mark.parametrize("recover", [False, True], ids=["", "recovery armed"])
def test_a_hook_that_comes_after_the_decision_keeps_batches_whole(root: Path, recover: bool) -> None:
    late = {"custom_hooks": [{"type": "Watching", "late": True}]}
    plain, _ = train(root, "plain", None, **late)
    with pytest.warns(UserWarning, match=r"decode_head\.weight"):
        runner, _ = train(root, "late", {"recover": recover}, **late)
    assert cases.guard(runner).plan.splits == 4
    assert torch.equal(cases.weights(runner), cases.weights(plain))


def test_hooks_get_the_numbers_of_the_whole_batch(root: Path) -> None:
    _, plain = train(root, "plain", None, **{"model.type": "Returning"})
    with pytest.warns(UserWarning, match="samples of what the step returns .int. .*their sum is taken"):
        runner, split = train(root, "split", {}, **{"model.type": "Returning"})
    assert cases.guard(runner).plan.splits == 4
    for one, other in zip(plain.outputs, split.outputs, strict=True):
        assert one.keys() == other.keys()
        assert other["samples"] == one["samples"] == 8
        for name in ("loss", "loss_ce", "accuracy", "mean"):
            torch.testing.assert_close(other[name], one[name], rtol=1e-5, atol=1e-6)
