"""Traces that are made in copies of the process, beside those that are made here."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

from vram_guard import Plan, TrainingStep, plan
from vram_guard.plan import _ahead
from vram_guard.simulate.tracing.run import run_step
from vram_guard.timeline import Timeline

BATCH = 48


def blocks() -> nn.Module:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(6)), nn.Linear(256, 8)
    )


STEP = TrainingStep(
    blocks, lambda size: torch.zeros(size, 64, 256), lambda net, x: net(x).square().mean(), torch.optim.AdamW
)


@pytest.fixture(params=[1, 2], ids=["one processor", "two processors"])
def processors(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """So many processors, and traces that always take long enough for a copy."""
    monkeypatch.setattr(_ahead, "COPY_WORTH_SECONDS", 0.0)
    monkeypatch.setattr(_ahead, "_processors", lambda: request.param)
    return int(request.param)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The processes that are copied from this one."""
    made: list[int] = []
    fork = os.fork

    def noted() -> int:
        process = fork()
        made.append(process)
        return process

    monkeypatch.setattr(os, "fork", noted)
    return made


def assert_ended(copies: list[int]) -> None:
    for process in copies:
        with pytest.raises(ChildProcessError):
            os.waitpid(process, os.WNOHANG)


def traced_here(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The batch sizes of the traces that this very process makes."""
    sizes: list[int] = []

    def counted(step: object, batch_size: int, *arguments: object, **settings: object) -> Timeline:
        sizes.append(batch_size)
        return run_step(step, batch_size, *arguments, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr("vram_guard.simulate.tracing.run.run_step", counted)
    return sizes


def test_a_plan_is_the_same_on_one_processor_and_on_two(
    processors: int, copies: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = plan(STEP, BATCH, "80GiB", allow=[]).peak
    sizes = traced_here(monkeypatch)

    def planned(count: int) -> tuple[Plan, int]:
        """With so many processors; and the traces of this very process."""
        monkeypatch.setattr(_ahead, "_processors", lambda: count)
        sizes.clear()
        return plan(STEP, BATCH, int(whole * 0.7), margin=0, allow=["checkpoint", "accumulate"]), len(sizes)

    (made, here), (alone, every) = planned(processors), planned(1)
    assert made.changed
    assert made.explain() == alone.explain()
    assert made.estimate == alone.estimate
    assert here < every if processors == 2 else here == every
    assert copies or processors == 1
    assert_ended(copies)
