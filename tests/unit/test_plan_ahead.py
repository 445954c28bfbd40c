"""Traces that are made in copies of the process, beside those that are made here."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn

from vram_guard.plan import Plan, plan
from vram_guard.step import TrainingStep

BATCH = 48


def blocks() -> nn.Module:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(24)), nn.Linear(256, 8)
    )


STEP = TrainingStep(
    blocks, lambda size: torch.zeros(size, 64, 256), lambda net, x: net(x).square().mean(), torch.optim.AdamW
)


def children() -> set[str]:
    """The processes that this one has started and not waited for."""
    return {one for task in Path("/proc/self/task").iterdir() for one in (task / "children").read_text().split()}


def test_a_plan_is_the_same_on_one_processor_and_on_all() -> None:
    processors = getattr(os, "sched_getaffinity", lambda _process: set())(0)
    if len(processors) < 2:
        pytest.skip("needs two processors that this process may use")
    before = children()
    whole = plan(STEP, BATCH, "80GiB", allow=[]).peak

    def planned(allowed: set[int]) -> Plan:
        os.sched_setaffinity(0, allowed)
        try:
            return plan(STEP, BATCH, int(whole * 0.7), margin=0, allow=["checkpoint", "accumulate"])
        finally:
            os.sched_setaffinity(0, processors)

    alone, made = planned({min(processors)}), planned(processors)
    assert made.changed
    assert (made, made.estimate) == (alone, alone.estimate)
    assert children() == before
