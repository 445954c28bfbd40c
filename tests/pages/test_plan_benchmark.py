"""The benchmark of plans: its curves, on a small network."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from benchmarks import bench_plan
from benchmarks.harness.workloads import WORKLOADS, Workload
from vram_guard import TrainingStep
from vram_guard.budget.catalogue import find_gpu

if TYPE_CHECKING:
    import pytest


def test_the_curves_give_the_largest_batch_of_each_card_and_the_plan_of_each_budget(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = TrainingStep(
        model=lambda: nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 3, 3, padding=1)),
        batch=lambda size: torch.zeros(size, 3, 64, 64),
        loss=lambda model, images: nn.functional.mse_loss(model(images), images),
        optimizer=torch.optim.AdamW,
    )
    monkeypatch.setitem(WORKLOADS, "small", Workload("small", 48, step))
    monkeypatch.setattr(bench_plan, "BUDGETS", ("30MiB", "1GiB"))
    cards = [find_gpu("GTX 1070"), find_gpu("A100 40GB"), find_gpu("A100 80GB")]
    monkeypatch.setattr(bench_plan, "catalogue", lambda: cards)
    found = bench_plan.curves("small")
    batches = [batch for _name, batch in found["batches"]]
    assert batches == sorted(set(batches)), "more memory, more samples"
    assert [name for name, _words in found["plans"]] == ["30MiB", "1GiB"]
    assert found["plans"][0][1] != found["plans"][1][1] == "as written"
    bench_plan.print_curves(found)
    out = capsys.readouterr().out
    assert f"{batches[0]:>8}  {cards[0].name}" in out
    assert "    1GiB  as written" in out
