"""PyTorch's own tools on a workload: MemTracker, and bare FakeTensorMode, which records nothing."""

from __future__ import annotations

from typing import Any

from benchmarks.harness.workloads import Workload

#: Iterations: the first has no optimizer state yet.
STEPS = 2


def tracked_peak(workload: Workload) -> int:
    """The peak in bytes of ``torch.distributed._tools.mem_tracker.MemTracker``, used as its docstring says."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    with FakeTensorMode():
        model, batch, optimizer = workload.made()
        tracker = MemTracker()
        tracker.track_external(model, optimizer, *batch.values())
        with tracker:
            for _ in range(STEPS):
                tracker.reset_mod_stats()  # it refuses a second iteration otherwise
                _iterate(workload, model, batch, optimizer)
    return sum(int(device["Total"]) for device in tracker.get_tracker_snapshot("peak").values())


def run_untracked(workload: Workload) -> None:
    """The same iterations with nothing recorded."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        made = workload.made()
        for _ in range(STEPS):
            _iterate(workload, *made)


def _iterate(workload: Workload, model: Any, batch: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    workload.step.loss(model, batch).backward()
    optimizer.step()
