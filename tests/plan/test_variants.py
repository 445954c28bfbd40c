"""variants(): what several sizes of one model take, which is chosen, and input that makes no sense."""

from __future__ import annotations

import io
import json

import pytest
import torch
from each import each
from torch import nn

from vram_guard import TrainingStep, trace, variants
from vram_guard.errors import InvalidInputError
from vram_guard.plan.comparison import Compared, Comparison
from vram_guard.report.comparison import comparison_dict, show


def shown(answer: Comparison) -> str:
    """The table as a file has it."""
    file = io.StringIO()
    assert show(answer, file=file)
    return file.getvalue()


def row(answer: Comparison, name: str) -> Compared:
    return next(one for one in answer.rows if one.name == name)


MIB = 2**20


def network(width: int) -> nn.Module:
    """Three convolutions of this width."""
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1), nn.ReLU(),
        nn.Conv2d(width, 3, 3, padding=1),
    )  # fmt: skip


def images(size: int) -> torch.Tensor:
    return torch.zeros(size, 3, 64, 64)


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch), batch)


STEP = TrainingStep(model=lambda: network(8), batch=images, loss=loss, optimizer=torch.optim.AdamW)
WIDTHS = {"micro": 4, "lite": 16, "full": 64}
STEPS = {name: STEP.with_(model=lambda width=width: network(width)) for name, width in WIDTHS.items()}


@pytest.fixture(scope="module")
def answer() -> Comparison:
    """All three at 64 images in 150 MiB: only "full" is too large."""
    return variants(STEPS, 64, "150MiB", margin=0)


def test_rows_say_what_traces_say(answer: Comparison) -> None:
    assert [row.name for row in answer.rows] == ["micro", "lite", "full"]
    for row in answer.rows:
        model = network(WIDTHS[row.name])
        assert row.parameters == sum(weight.numel() for weight in model.parameters())
        timeline = trace(STEP.with_(model=model))
        assert row.peak == timeline.at(64).peak_reserved
        assert row.largest_batch_size == timeline.max_batch_size(answer.budget) > 0
        assert row.fits == (row.peak <= answer.budget.usable)
        assert (row.largest_batch_size >= 64) == row.fits


def test_the_largest_that_fits_is_chosen(answer: Comparison) -> None:
    assert answer.chosen is row(answer, "lite")
    assert not row(answer, "full").fits
    assert row(answer, "full").verdict().endswith(" over budget")
    assert variants(STEPS, 64, "4GiB").chosen.name == "full"


def test_the_order_decides_between_equally_large_ones_alone() -> None:
    assert variants(dict(reversed(STEPS.items())), 8, "4GiB").chosen.name == "full"
    assert variants({"one": STEPS["lite"], "other": STEPS["lite"]}, 8, "4GiB").chosen.name == "one"


def test_what_does_not_fit_is_planned_for_where_that_is_allowed(answer: Comparison) -> None:
    allowed = variants(STEPS, 64, "150MiB", margin=0, allow=["accumulate"])
    full = row(allowed, "full")
    assert allowed.chosen is full
    assert full.fits
    assert not full.fits_as_written
    assert full.plan.splits > 1
    assert full.plan.estimate.peak_reserved <= 150 * MIB < full.peak
    assert full.peak == row(answer, "full").peak
    assert row(allowed, "lite").fits_as_written, "what fits is left alone"


def test_nothing_fits() -> None:
    made = variants(STEPS, 64, "1MiB")
    assert made.chosen is None
    assert [row.largest_batch_size for row in made.rows] == [0, 0, 0]
    assert made.choice().startswith("None of 3 variants fits into")
    assert comparison_dict(made)["chosen"] is None
    assert "None of 3 variants fits" in shown(made)


def never() -> nn.Module:
    raise AssertionError("the model was built")


@each(
    ("steps", "changes", "message"),
    [
        ({}, {}, "nothing to compare"),
        ([("lite", STEP)], {}, "variants are"),
        ({"lite": never}, {}, "variants are"),
        (None, {}, "variants are"),
        ({"lite": STEP}, {"batch_size": 0}, "batch_size"),
        ({"lite": STEP}, {"gpu": "RTX 9999"}, "not in the catalogue"),
        ({"lite": STEP}, {"allow": "acumulate"}, "did you mean 'accumulate'"),
    ],
)
def test_nonsense_is_refused_before_any_work(steps: object, changes: dict[str, object], message: str) -> None:
    if isinstance(steps, dict):
        steps = {name: step.with_(model=never) if step is STEP else step for name, step in steps.items()}
    arguments = {"batch_size": 8, "budget": "4GiB", **changes}
    with pytest.raises(InvalidInputError, match=message):
        variants(steps, **arguments)


def test_the_table_and_the_json(answer: Comparison) -> None:
    text = shown(answer)
    assert text.isascii()
    assert text.splitlines()[0] == answer.choice()
    (line,) = [line for line in text.splitlines() if "lite *" in line]
    assert f"{row(answer, 'lite').parameters:,}" in line
    assert str(row(answer, "lite").largest_batch_size) in line
    read = json.loads(json.dumps(comparison_dict(answer), allow_nan=False))
    assert read["chosen"] == "lite"
    assert [row["peak_reserved"] for row in read["variants"]] == [row.peak for row in answer.rows]
    assert read["variants"][2]["plan"]["fits"] is False
