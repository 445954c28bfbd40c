"""Plans for several budgets: those that each would get by itself, from the traces of one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from vram_guard import TrainingStep, plan
from vram_guard.errors import InvalidInputError
from vram_guard.plan.per_budget import plans_per_budget
from vram_guard.report import budget_figure, save_figure

BUDGETS = ("96MiB", "128MiB", "192MiB", "384MiB")
SIZE = 8
ALLOW = ("precision", "accumulate", "checkpoint")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.two(torch.tanh(self.one(x)))


def step() -> TrainingStep:
    net = nn.Sequential(*(Block() for _ in range(4)))
    return TrainingStep(net, torch.ones(4, 1024, 256), lambda net, x: net(x).sum(), torch.optim.SGD)


def test_each_plan_is_the_one_of_its_budget_and_few_traces_give_all() -> None:
    traces: list[str] = []
    found = plans_per_budget(step(), SIZE, reversed(BUDGETS), gpu="RTX 4070", allow=ALLOW, progress=traces.append)
    assert [one.name for one in found] == list(BUDGETS)
    for name, made in found:
        alone = plan(step(), SIZE, name, gpu="RTX 4070", allow=ALLOW)
        assert (made.fits, made.precision, made.splits, made.recipe, made.peak) == (
            alone.fits,
            alone.precision,
            alone.splits,
            alone.recipe,
            alone.peak,
        )
    assert len({(one.plan.precision, one.plan.splits, one.plan.recipe) for one in found}) == len(BUDGETS)
    said = [line for line in traces if line.startswith("tracing")]
    assert len(said) == len(set(said)), "nothing is traced twice"


def test_the_memory_of_a_card_counts_and_the_kernels_of_the_other() -> None:
    ((name, made),) = plans_per_budget(step(), SIZE, ["A100 SXM4 80GB"], gpu="RTX 4070")
    assert (name, made.budget.gpu.name) == ("A100 SXM4 80GB", "RTX 4070")  # type: ignore[union-attr]
    assert made.budget.total > 70 * 2**30


def test_no_budgets_and_several_gpus_are_refused() -> None:
    from vram_guard import Parallel

    with pytest.raises(InvalidInputError, match="at least one GPU"):
        plans_per_budget(step(), SIZE, [])
    with pytest.raises(InvalidInputError, match="on one GPU"):
        plans_per_budget(step().with_(parallel=Parallel(gpus=2, kind="ddp")), SIZE, ["1GiB"])
    with pytest.raises(InvalidInputError, match="at least one GPU"):
        budget_figure([])


def test_the_picture_names_every_budget_and_its_plan(tmp_path: Path) -> None:
    import matplotlib as mpl

    found = plans_per_budget(step(), SIZE, ["1MiB", *BUDGETS], gpu="RTX 4070", allow=ALLOW)
    with mpl.rc_context({"svg.fonttype": "none"}):
        assert save_figure(budget_figure(found), tmp_path / "budgets.svg")
    text = (tmp_path / "budgets.svg").read_text()
    assert "nothing fits" in text
    assert "as written" in text
    assert all(name in text for name in BUDGETS)
    assert "micro-batches of" in text or "checkpointed" in text
    assert "384MiB: batch" in text
