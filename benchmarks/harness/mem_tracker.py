"""PyTorch's own tools on a training step: MemTracker, and bare FakeTensorMode, which records nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from vram_guard import TrainingStep

#: Iterations: the first has no optimizer state yet.
STEPS = 2


def run_tracked(step: TrainingStep, batch_size: int) -> int:
    """The peak, in bytes, of two iterations by ``torch.distributed._tools.mem_tracker.MemTracker``.

    It is used as its docstring says.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    with FakeTensorMode():
        model, batch, optimizer = _made(step, batch_size)
        tracker = MemTracker()
        tracker.track_external(model, optimizer, *batch.values())
        with tracker:
            for _ in range(STEPS):
                tracker.reset_mod_stats()  # it refuses a second iteration otherwise
                _iterate(step, model, batch, optimizer)
    return sum(int(device["Total"]) for device in tracker.get_tracker_snapshot("peak").values())


def run_untracked(step: TrainingStep, batch_size: int) -> None:
    """The same iterations with nothing recorded."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        made = _made(step, batch_size)
        for _ in range(STEPS):
            _iterate(step, *made)


def _made(step: TrainingStep, batch_size: int) -> tuple[Any, Any, Any]:
    """Model, batch and optimizer."""
    build, batch, optimizer = cast("Any", step.model), cast("Any", step.batch), cast("Any", step.optimizer)
    model = build().train()
    return model, batch(batch_size), optimizer(model.parameters())


def _iterate(step: TrainingStep, model: Any, batch: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    step.loss(model, batch).backward()
    optimizer.step()
