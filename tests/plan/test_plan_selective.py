"""Selective checkpointing in plans: where it is taken, what it saves, and where it is not possible."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_compose import BATCH, MODELS, compared, ready
from test_compose import step as small
from torch import nn
from torch.nn import functional as F

from vram_guard import TrainingStep, plan
from vram_guard.errors import InvalidInputError, UnsupportedStepError
from vram_guard.plan.search_space import Option
from vram_guard.plan.source import source_of
from vram_guard.plan.step_time import recompute_seconds, worth_keeping
from vram_guard.simulate import trace
from vram_guard.techniques import Recipe
from vram_guard.timeline import Timeline

AMPERE = (8, 0)
BOTH = ["checkpoint", "selective_checkpoint"]


class Feed(nn.Module):
    """Products of wide layers, and as many bytes in what stands between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))).square())


class WritesOver(Feed):
    """Changes the result of a product in place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x)).relu_()).square())


def feed(width: int = 1024, **changes: Any) -> TrainingStep:
    made = TrainingStep(
        model=lambda: nn.Sequential(*(Feed(width) for _ in range(6)), nn.Linear(width, 1)),
        batch=lambda size: torch.zeros(size, 512, width),
        loss=lambda net, x: net(x).square().mean(),
        optimizer=torch.optim.SGD,
    )
    return made.with_(**changes)


BLOCKS = tuple(map(str, range(6)))
KEEPING = Recipe(checkpoint=BLOCKS, checkpoint_keeps=("addmm",))


def traced(recipe: Recipe) -> Timeline:
    return trace(feed(recipe=recipe), checked=False)


def peak(recipe: Recipe, size: int = 32) -> int:
    return traced(recipe).at(size).peak_reserved


@pytest.mark.torch_since(2, 6)
def test_a_plan_takes_it_where_it_is_named_and_saves_time() -> None:
    budget = peak(KEEPING)
    named, not_named = (plan(feed(), 32, budget, margin=0, allow=allow) for allow in (BOTH, ["checkpoint"]))
    assert named.fits
    assert not_named.fits
    assert named.recipe == KEEPING
    assert named.estimate.peak_reserved == budget
    assert not_named.recipe.checkpoint_keeps == ()
    assert 1 < named.slowdown < not_named.slowdown
    assert not plan(feed(), 32, budget, margin=0, allow=["selective_checkpoint"]).fits, "a kind of checkpointing"


@pytest.mark.torch_since(2, 6)
def test_where_a_kept_result_is_changed_in_place_blocks_are_computed_again_whole() -> None:
    def model() -> nn.Module:
        return nn.Sequential(*(WritesOver(1024) for _ in range(6)), nn.Linear(1024, 1))

    made = plan(feed(model=model), 32, peak(KEEPING), margin=0, allow=BOTH)
    assert made.fits
    assert made.recipe.checkpoint
    assert made.recipe.checkpoint_keeps == ()
    assert any(
        "cached during selective activation checkpoint has been mutated" in str(one.why) for one in made.rejected
    )


def test_it_is_not_taken_where_one_more_kind_of_change_saves_little() -> None:
    budget = peak(Recipe(checkpoint=BLOCKS[:1]))
    made = plan(feed(), 32, budget, margin=0, allow=BOTH)
    assert (made.recipe.checkpoint, made.recipe.checkpoint_keeps) == (BLOCKS[:1], ())


def test_an_operator_is_worth_keeping_by_its_seconds_for_a_byte() -> None:
    """Products of wide layers take long; those of narrow ones hardly longer than reading and writing them."""
    assert worth_keeping(traced(Recipe()), BLOCKS, 32) == ("addmm",)
    assert worth_keeping(trace(feed(8), checked=False), BLOCKS, 32) == ()
    # A step that could not be followed says nothing of its work.
    assert worth_keeping(replace(traced(Recipe()), work=()), BLOCKS, 32) == ()


def test_kept_products_cost_no_time_on_the_gpu_and_some_on_the_host() -> None:
    work = traced(Recipe()).exact(32).work
    whole, kept = (recompute_seconds(work, BLOCKS, 32, keeps=keeps) for keeps in ((), ("addmm",)))
    assert whole.compute > 0
    assert kept.compute == 0
    assert kept.memory == whole.memory
    assert kept.dispatch > whole.dispatch


@pytest.mark.parametrize(("made", "precision"), [("layers", "bf16-mixed"), ("convolutions", "32-true")])
def test_blocks_that_keep_results_are_composed(made: str, precision: str) -> None:
    traces, blocks = ready(small(*MODELS[made]))
    for checkpoint in (blocks, blocks[:2], blocks[1::2]):
        for splits in (1, 3):
            recipe = Recipe(checkpoint=checkpoint, checkpoint_keeps=("addmm", "convolution"))
            composed, direct = compared(traces, Option(precision, splits, recipe), BATCH)
            assert composed == direct


def test_pins_of_operators() -> None:
    pinned = plan(feed(), 32, "64GiB", pin={"checkpoint": 2, "checkpoint_keeps": ["addmm"]})
    assert (pinned.recipe.checkpoint, pinned.recipe.checkpoint_keeps) == (BLOCKS[:2], ("addmm",))
    budget = peak(KEEPING)
    never = plan(feed(), 32, budget, margin=0, allow=BOTH, pin={"checkpoint_keeps": "none"})
    assert never.recipe.checkpoint_keeps == ()
    always = plan(feed(), 32, peak(Recipe()) - 1, margin=0, allow=["checkpoint"], pin={"checkpoint_keeps": ["addmm"]})
    assert always.recipe.checkpoint_keeps == ("addmm",)
    for value in ("addm", 3, ["gelu"]):
        with pytest.raises(InvalidInputError, match="checkpoint_keeps"):
            plan(feed(), 32, "64GiB", pin={"checkpoint_keeps": value})


def test_not_beside_fsdp_and_not_in_compiled_blocks() -> None:
    with pytest.raises(UnsupportedStepError, match="checkpoint_keeps"):
        _compiled(pin={"checkpoint": "all", "checkpoint_keeps": ["addmm"]})
    on_host = {"checkpoint": "all", "checkpoint_keeps": ["addmm"], "parameters_on_host": True}
    made = plan(feed(), 32, "64GiB", pin=on_host)
    assert not made.recipe.checkpoint_keeps


def _compiled(**options: Any) -> None:
    source = replace(source_of(feed(), AMPERE), compiles=True)
    plan(source, 32, "64GiB", **options)
