"""The search over hand-built and random timelines: which option is taken, and the laws that always hold."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vram_guard.budget import Budget
from vram_guard.plan.growth import grown
from vram_guard.plan.options import Candidate, Option, Request
from vram_guard.plan.search import search
from vram_guard.plan.techniques import growth_multiples, mixed_precision, resident_batch, splits_of
from vram_guard.timeline import Affine, Block, Phase, Timeline

if TYPE_CHECKING:
    from vram_guard.plan import Plan

MIB = 2**20


def line(fixed: int, per_sample: int, *, batch: int = 0, tier="symbolic", operator="aten.mm.default") -> Timeline:
    """Parameters of ``fixed`` bytes, a batch and activations that grow with the batch size."""
    blocks = (
        Block(Affine(fixed, 0), "parameters", "", "", ""),
        Block(Affine(0, batch), "batch", "", "", ""),
        Block(Affine(0, per_sample), "activations", "net", "train.py:7", operator),
    )
    phases = (Phase("setup", 0, 0), Phase("batch", 1, 1), Phase("forward", 1, 2), Phase("backward", 1, 3))
    return Timeline(blocks, (0, 1, 2, ~2, ~1), phases, (2, 3), tier=tier)


class Source:
    """Timelines by precision, as the tracer would give them; counts what was asked for."""

    def __init__(self, **by_precision: Timeline | Exception) -> None:
        self.by_precision = {name.replace("_", "-").lstrip("p"): made for name, made in by_precision.items()}
        self.asked: list[tuple[str, int]] = []

    def __call__(self, precision: str, splits: int) -> Timeline:
        self.asked.append((precision, splits))
        made = self.by_precision[precision]
        if isinstance(made, Exception):
            raise made
        return resident_batch(made, 1, splits)


def request(usable: int, batch_size: int = 64, **changes) -> Request:
    budget = Budget.of(usable, margin=0)
    asked = Request(batch_size, "32-true", budget, mixed="bf16-mixed", mixed_why="bf16.", may_accumulate=True)
    return replace(asked, **changes)


def taken(plan: Plan) -> tuple[str, int]:
    return plan.precision, plan.splits


HALF = {"p32_true": line(10 * MIB, 2 * MIB), "bf16_mixed": line(12 * MIB, MIB)}


def test_what_fits_stays_as_written_and_nothing_else_is_traced() -> None:
    source = Source(**HALF)
    plan = search(request(1000 * MIB), source)
    assert plan.fits
    assert not plan.changed
    assert taken(plan) == ("32-true", 1)
    assert plan.learning_rate_factor == 1.0
    assert plan.rejected == ()
    assert source.asked == [("32-true", 1)]


def test_mixed_precision_alone_comes_first() -> None:
    plan = search(request(100 * MIB), Source(**HALF))
    assert taken(plan) == ("bf16-mixed", 1)
    assert plan.estimate.peak_reserved <= 100 * MIB < plan.before.peak_reserved
    assert [option.option for option in plan.rejected] == ["32-true, batch 64"]
    assert plan.rejected[0].missing == plan.before.peak_reserved - 100 * MIB


def test_then_accumulation_over_the_largest_micro_batch_that_fits() -> None:
    plan = search(request(50 * MIB), Source(**HALF))
    assert taken(plan) == ("bf16-mixed", 2)
    assert plan.micro_batch_size == 32
    assert plan.accumulate == 2
    assert plan.effective_batch_size == plan.effective_batch_size_before == 64
    assert plan.learning_rate_factor == 1.0
    assert plan.estimate.batch_size == 32


def test_precision_as_written_wins_where_it_needs_fewer_micro_batches() -> None:
    source = Source(
        p32_true=line(0, 2 * MIB), bf16_mixed=line(40 * MIB, 2 * MIB)
    )  # casts that cost more than they save
    plan = search(request(70 * MIB), source)
    assert taken(plan) == ("32-true", 2)


@pytest.mark.parametrize(
    ("mixed", "accumulate", "expected"), [(None, True, ("32-true", 4)), ("bf16-mixed", False, None)]
)
def test_only_what_is_allowed_is_tried(mixed: str | None, accumulate: bool, expected: tuple[str, int] | None) -> None:
    source = Source(**HALF)
    plan = search(request(50 * MIB, mixed=mixed, may_accumulate=accumulate), source)
    assert plan.fits == (expected is not None)
    assert taken(plan) == (expected or ("32-true", 1))
    assert (mixed is None) == all(precision == "32-true" for precision, _ in source.asked)


def test_the_users_own_accumulation_is_multiplied() -> None:
    plan = search(request(50 * MIB, accumulate=3, ranks=2), Source(**HALF))
    assert plan.accumulate == 6
    assert plan.accumulate_before == 3
    assert plan.effective_batch_size == 64 * 3 * 2


def test_micro_batches_are_equal() -> None:
    plan = search(request(60 * MIB, batch_size=45, mixed=None), Source(**HALF))
    assert plan.splits == 3  # 22 or 23 samples would fit too, but not in equal parts
    assert plan.micro_batch_size * plan.splits == 45
    assert list(splits_of(12)) == [2, 3, 4, 6, 12]
    assert list(splits_of(7)) == [7]
    assert list(splits_of(1)) == []


def test_the_loaded_batch_stays_whole_while_it_is_split() -> None:
    """100 MiB of batch never fit into 60, however small the micro-batches."""
    heavy = line(0, MIB, batch=100 * MIB // 64)
    plan = search(request(60 * MIB, mixed=None), Source(p32_true=heavy))
    assert not plan.fits
    assert plan.nearest_miss is not None
    assert plan.nearest_miss.missing >= 40 * MIB


def test_nothing_fits_changes_nothing_and_names_the_nearest_miss() -> None:
    plan = search(request(8 * MIB), Source(**HALF))
    assert not plan.fits
    assert not plan.changed
    assert plan.estimate == plan.before
    nearest = plan.nearest_miss
    assert nearest is not None
    assert nearest.option == "bf16-mixed, 64 micro-batches of 1"
    assert nearest.missing == min(option.missing for option in plan.rejected)
    assert f"{nearest.missing} bytes" in plan.explain()
    assert plan.explain().startswith("Does not fit")


def test_a_lower_bound_is_never_a_promise() -> None:
    source = Source(p32_true=line(MIB, MIB, tier="formula"), bf16_mixed=line(MIB, MIB, tier="formula"))
    plan = search(request(10_000 * MIB), source)
    assert not plan.fits
    assert not plan.changed
    assert all(option.missing == 0 and "lower bound" in option.why for option in plan.rejected)
    assert plan.explain().startswith("Not known to fit")
    assert not search(request(10_000 * MIB, grow=True), source).fits


def test_a_step_that_fails_in_mixed_precision_is_planned_without_it() -> None:
    source = Source(p32_true=line(10 * MIB, 2 * MIB), bf16_mixed=TypeError("no bf16 kernel"))
    plan = search(request(100 * MIB), source)
    assert taken(plan) == ("32-true", 2)
    broken = [option for option in plan.rejected if option.peak_reserved is None]
    assert [option.option for option in broken] == [
        "bf16-mixed, batch 64",
        "bf16-mixed, 2 micro-batches of 32",
    ]
    assert all("TypeError: no bf16 kernel" in option.why for option in broken)


def test_the_users_exception_as_written_reaches_the_caller() -> None:
    with pytest.raises(ZeroDivisionError):
        search(request(100 * MIB), Source(p32_true=ZeroDivisionError()))


def test_batch_norm_is_warned_of_when_split_and_only_then() -> None:
    normed = line(10 * MIB, 2 * MIB, operator="aten.cudnn_batch_norm.default")
    split = search(request(50 * MIB, mixed=None), Source(p32_true=normed))
    assert any("Batch normalisation" in reason for reason in split.reasons)
    whole = search(request(500 * MIB, mixed=None), Source(p32_true=normed))
    assert not any("Batch normalisation" in reason for reason in whole.reasons)


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ((6, 1), None),
        ((7, 0), "16-mixed"),
        ((7, 5), "16-mixed"),
        ((8, 0), "bf16-mixed"),
        ((12, 0), "bf16-mixed"),
        (None, "bf16-mixed"),
    ],
)
def test_the_mixed_precision_that_the_gpu_has(capability: tuple[int, int] | None, expected: str | None) -> None:
    assert mixed_precision("32-true", capability)[0] == expected


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed", "16-true", "bf16-true"])
def test_a_precision_that_was_chosen_stays(precision: str) -> None:
    mixed, why = mixed_precision(precision, (9, 0))
    assert mixed is None
    assert precision in why


# --- growth ---


def test_growth_to_the_target_with_its_learning_rate() -> None:
    asked = request(1000 * MIB, batch_size=16, grow=True, accumulate=2)
    plan = search(asked, Source(p32_true=line(10 * MIB, 2 * MIB)))
    assert plan.fits
    assert plan.batch_size == 384  # 24 x 16: 778 MiB of 800; 26 x 16 would take 842
    assert plan.micro_batch_size == 384
    assert plan.accumulate == 2
    assert plan.effective_batch_size == 768
    assert plan.learning_rate_factor == 24.0
    assert plan.estimate.peak_reserved <= 800 * MIB
    assert any("Warm the learning rate up" in reason for reason in plan.reasons)
    assert search(replace(asked, lr_rule="none"), Source(p32_true=line(10 * MIB, 2 * MIB))).learning_rate_factor == 1.0


def test_growth_stops_at_the_data_set() -> None:
    small = line(10 * MIB, MIB)
    plan = search(request(1000 * MIB, batch_size=16, grow=True, dataset_size=100), Source(p32_true=small))
    assert plan.batch_size == 96
    assert any("100 samples" in option.why for option in plan.rejected)
    stuck = search(request(1000 * MIB, batch_size=16, grow=True, dataset_size=31), Source(p32_true=small))
    assert not stuck.changed
    assert any("31 samples" in reason for reason in stuck.reasons)
    fewer = search(
        request(1000 * MIB, batch_size=16, grow=True, accumulate=2, ranks=2, dataset_size=200),
        Source(p32_true=small),
    )
    assert fewer.effective_batch_size == 192  # one optimizer step an epoch, over all processes


def test_what_is_over_the_target_but_fits_stays() -> None:
    plan = search(request(100 * MIB, batch_size=64, grow=True), Source(p32_true=line(0, int(1.4 * MIB))))
    assert plan.fits
    assert not plan.changed
    assert any("80%" in reason for reason in plan.reasons)


def test_what_does_not_fit_shrinks_even_when_growth_is_wanted() -> None:
    plan = search(request(50 * MIB, grow=True), Source(**HALF))
    assert taken(plan) == ("bf16-mixed", 2)


def test_growth_never_goes_beyond_the_budget() -> None:
    budget = Budget.of(1000 * MIB, margin=0.5)
    asked = request(0 + 1, grow=True, batch_size=8, budget=budget, target_utilization=1.0)
    plan = search(asked, Source(p32_true=line(0, MIB)))
    assert 450 * MIB < plan.estimate.peak_reserved <= 500 * MIB


def test_growth_multiples_do_not_leave_large_gaps() -> None:
    multiples = list(growth_multiples(5000))
    assert multiples[:15] == list(range(2, 17))
    assert multiples == sorted(set(multiples))
    assert all(after / before <= 1.125 + 1e-9 for before, after in pairwise(multiples[14:]))
    assert list(growth_multiples(1)) == []


# --- laws ---

sizes = st.integers(0, 3 * MIB)


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    """A random affine step: set-up, a batch, blocks that come and go in random order."""
    count = draw(st.integers(1, 6))
    blocks = [
        Block(Affine(draw(sizes), 0), "parameters", "", "", ""),
        Block(Affine(0, draw(st.integers(0, MIB // 4))), "batch", "", "", ""),
        *(Block(Affine(draw(sizes), draw(sizes)), "activations", "", "", "") for _ in range(count)),
    ]
    alive: list[int] = []
    events = [0, 1]
    for index in range(2, count + 2):
        events.append(index)
        alive.append(index)
        while alive and draw(st.booleans()):
            events.append(~alive.pop(draw(st.integers(0, len(alive) - 1))))
    events += [~index for index in alive]
    phases = (Phase("setup", 0, 0), Phase("batch", 1, 1), Phase("forward", 1, 2))
    return Timeline(tuple(blocks), tuple(events), phases, (2, 3))


batches = st.sampled_from([1, 2, 6, 7, 12, 16])
budgets = st.integers(1, 200 * MIB)


def rank(plan: Plan, asked: Request) -> int:
    """The plan's place in the order of preference of the widest request; what does not fit is last."""
    every = list(replace(asked, mixed="bf16-mixed", may_accumulate=True).options())
    return every.index(Option(plan.precision, plan.splits)) if plan.fits else len(every)


laws = settings(max_examples=150, deadline=None)


@laws
@given(timelines(), timelines(), batches, budgets, budgets)
def test_more_budget_never_gives_a_worse_plan(
    single: Timeline, mixed: Timeline, batch_size: int, one: int, other: int
) -> None:
    source = Source(p32_true=single, bf16_mixed=mixed)
    less, more = (request(usable, batch_size) for usable in sorted((one, other)))
    assert rank(search(more, source), more) <= rank(search(less, source), less)


@laws
@given(timelines(), timelines(), batches, budgets)
def test_one_more_technique_never_makes_it_worse(
    single: Timeline, mixed: Timeline, batch_size: int, usable: int
) -> None:
    source = Source(p32_true=single, bf16_mixed=mixed)
    both = request(usable, batch_size)
    best = rank(search(both, source), both)
    for fewer in (replace(both, mixed=None), replace(both, may_accumulate=False)):
        alone = rank(search(fewer, source), both)
        assert best <= alone <= rank(search(replace(fewer, mixed=None, may_accumulate=False), source), both)


@laws
@given(timelines(), timelines(), batches, budgets)
def test_a_plan_that_fits_is_proven_by_a_replay_and_keeps_the_effective_batch(
    single: Timeline, mixed: Timeline, batch_size: int, usable: int
) -> None:
    source = Source(p32_true=single, bf16_mixed=mixed)
    plan = search(request(usable, batch_size), source)
    replayed = source(plan.precision, plan.splits).replay(plan.micro_batch_size)
    assert plan.estimate.peak_reserved == replayed.peak_reserved
    assert plan.fits == (replayed.peak_reserved <= usable)
    assert plan.micro_batch_size * plan.splits == plan.batch_size == batch_size
    assert plan.learning_rate_factor == 1.0
    for option in plan.rejected:
        assert option.peak_reserved == usable + option.missing


@laws
@given(timelines(), batches, budgets, budgets, st.integers(1, 500))
def test_more_budget_never_grows_less(single: Timeline, batch_size: int, one: int, other: int, dataset: int) -> None:
    grew = []
    for usable in sorted((one, other)):
        asked = request(usable, batch_size, grow=True, dataset_size=dataset * batch_size)
        plan = search(asked, Source(p32_true=single, bf16_mixed=single))
        grew.append((plan.fits, plan.batch_size // batch_size / plan.splits))
        if plan.batch_size > batch_size:
            assert plan.estimate.peak_reserved <= 0.8 * usable
            assert plan.effective_batch_size <= dataset * batch_size
    assert grew[0] <= grew[1]


def test_grown_is_what_search_uses() -> None:
    asked = request(1000 * MIB, batch_size=16, grow=True)
    source = Source(p32_true=line(10 * MIB, 2 * MIB))
    plan = search(asked, source)
    before = source("32-true", 1)
    assert grown(asked, Candidate(before, before.at(16))) == plan
