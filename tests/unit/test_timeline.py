"""Timelines worked out by hand: what they answer at a batch size, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from architectures import BY_NAME, adamw
from each import each
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from vram_guard.simulate import CHECKED_SIZE, trace
from vram_guard.step import TrainingStep
from vram_guard.timeline import (
    Affine,
    Block,
    Phase,
    Scratch,
    Timeline,
    Work,
    largest_that_fits,
    merge_affine,
)

MIB = 2**20


def block(base: int, per_sample: int = 0, category: str = "activations", **settings) -> Block:
    return Block(Affine(base, per_sample), category, "layer", "train.py:7", "aten.mm.default", **settings)


def timeline(*blocks: Block, events=None, **settings) -> Timeline:
    settings.setdefault("traced", (2, 3))
    events = events if events is not None else tuple(range(len(blocks)))
    phases = (Phase("setup", 0, 0), Phase("forward", 1, 1))
    return Timeline(blocks=blocks, events=tuple(events), phases=phases, **settings)


def test_an_estimate_says_who_holds_the_bytes_at_the_peak() -> None:
    made = timeline(
        block(4 * MIB, category="parameters"), block(0, MIB), block(0, 2 * MIB, "temporaries"), events=(0, 1, 2, ~2, ~1)
    )
    found = made.at(20)
    assert found.peak_allocated == 4 * MIB + 20 * MIB + 40 * MIB
    assert found.breakdown["temporaries"] == 40 * MIB
    assert sum(found.breakdown.values()) == found.peak_allocated == sum(found.by_module.values())
    assert (found.peak_phase.name, found.peak_source, found.peak_operator) == (
        "forward",
        "train.py:7",
        "aten.mm.default",
    )
    # 4 MiB come from a segment of 20 MiB; 20 and 40 MiB have segments of their own.
    assert found.peak_reserved == 80 * MIB


class Above(NamedTuple):
    """A rule of the card's multiprocessors: bytes above a threshold."""

    threshold: int

    def bytes(self, numbers, card):
        quantity, each = numbers
        return quantity * each * card.multiprocessors if quantity > self.threshold else 0


def test_a_rule_decides_over_a_temporary_at_each_size_and_on_each_card() -> None:
    made = timeline(block(0, scratch=Scratch(Above(31), (Affine(1, 1), Affine(MIB, 0)))), multiprocessors=2)
    assert made.at(30).peak_allocated == 0
    assert made.at(31).peak_allocated == 64 * MIB
    assert [made.sizes(size) for size in (30, 31)] == [[0], [64 * MIB]], "the threshold itself is not above it"
    assert made.on(4).sizes(31) == [128 * MIB]
    assert made.on(None).sizes(31) == [32 * 108 * MIB], "an A100, where no card is named"


@each(
    ("small", "large", "merged"),
    [
        (Scratch(Above(1), (Affine(4, 0),)), Scratch(Above(1), (Affine(5, 0),)), Scratch(Above(1), (Affine(2, 1),))),
        (Scratch(Above(1), (Affine(4, 0),)), Scratch(Above(2), (Affine(5, 0),)), None),
        (Scratch(Above(1), (Affine(4, 0),)), Scratch(Above(1), (Affine(3, 0),)), None),
        (Scratch(Above(1), (Affine(4, 0),)), Scratch(Above(1), (Affine(5, 0), Affine(1, 0))), None),
        (Scratch(Above(1), (Affine(4, 0),)), None, None),
    ],
)
def test_rules_of_two_sizes_are_one_law_or_none(small, large, merged) -> None:
    one, other = (timeline(block(0, scratch=scratch), traced=(size,)) for scratch, size in ((small, 2), (large, 3)))
    found = merge_affine(one, other)
    assert (found and found.blocks[0].scratch) == merged


def test_a_capacity_names_the_request_that_fails() -> None:
    made = timeline(block(0, MIB), block(0, 4 * MIB))
    point = made.at(20, capacity=60 * MIB).out_of_memory
    assert point is not None
    assert (point.requested, point.reserved, point.source) == (80 * MIB, 20 * MIB, "train.py:7")
    assert made.at(20, capacity=100 * MIB).out_of_memory is None


def test_a_workspace_that_does_not_fit_is_done_without() -> None:
    workspace = block(0, 4 * MIB, "workspace", optional=True)
    made = timeline(block(0, MIB), workspace, block(0, 2 * MIB), events=(0, 1, ~1, 2))
    assert made.at(20).peak_reserved == 100 * MIB
    assert made.at(20, capacity=100 * MIB).breakdown["workspace"] == 80 * MIB
    found = made.at(20, capacity=60 * MIB)
    assert found.out_of_memory is None
    assert (found.peak_allocated, found.peak_reserved, found.breakdown["workspace"]) == (60 * MIB, 60 * MIB, 0)
    assert len(made.replay(20, capacity=60 * MIB, curve=True).allocated_curve) == 4
    assert made.at(20, capacity=59 * MIB).out_of_memory.requested == 40 * MIB  # what cannot be done without


@pytest.mark.parametrize("budget", ["1GiB", 2**30])
def test_max_batch_size_is_the_last_that_fits(budget) -> None:
    from vram_guard.budget import Budget

    made = timeline(block(100 * MIB, category="parameters"), block(0, 3 * MIB))
    largest = made.max_batch_size(Budget.resolve(budget=budget, margin=0))
    assert made.at(largest).peak_reserved <= 2**30 < made.at(largest + 1).peak_reserved


def test_a_lower_bound_never_promises_a_batch_size() -> None:
    assert timeline(block(1), tier="formula").max_batch_size("1GiB") == 0


def test_work_that_grows_faster_than_the_batch_is_never_less_than_what_was_seen() -> None:
    def worked(size: int, flops: int) -> Timeline:
        done = Work("aten.mm.default", "", "forward", False, Affine(flops, 0), Affine(flops, 0), "fp32")
        return timeline(block(10), traced=(size,), work=(done,))

    (merged,) = merge_affine(worked(2, 1), worked(3, 100)).work
    assert merged.flops == merged.moved == Affine(0, 34), "the line from 0 through 100 at 3, rounded up"
    assert merged.flops.at(3) >= 100


def test_what_fits_is_decided_with_the_margin_of_the_tier_and_the_correction() -> None:
    from vram_guard.budget import Budget

    budget = Budget.of(20 * MIB, margin=0)
    exact = timeline(block(20 * MIB)).at(1)
    assert exact.fits(budget)
    assert not exact.fits(budget, correction=1.01)
    assert not exact.fits(Budget.of(20 * MIB - 1, margin=0))
    assert not timeline(block(MIB), tier="formula").at(1).fits(budget), "a lower bound promises nothing"


def test_another_batch_size_is_answered_without_another_trace() -> None:
    calls = []
    architecture = BY_NAME["decoder"]
    step = TrainingStep(
        architecture.model,
        lambda b: calls.append(b) or architecture.batch(b),
        architecture.loss,
        adamw,
    )
    made = trace(step)
    before = len(calls)
    assert [made.at(size).peak_reserved for size in (1, 8, 512)] == sorted(
        made.at(s).peak_reserved for s in (1, 8, 512)
    )
    assert len(calls) == before
    assert set(calls) == {2, 3, CHECKED_SIZE}


#: Two equal blocks are free, in the first segment and in the second one: whichever is taken, one segment is free as a
#: whole or none is when 40 MiB are asked for. The first two are weights: kernels begin with the block of no bytes.
SIZES = [40, 40, 20, 20, 20, 20, 20, 40, 0]
FIRST_FREED = (0, 1, 8, ~8, ~0, 2, 3, ~1, 4, 5, ~2, ~4, 6, ~3, 7)
SECOND_FREED = (*FIRST_FREED[:-2], ~5, 7)


def test_where_the_placement_of_segments_is_not_known_the_larger_peak_counts() -> None:
    from vram_guard.allocator import AllocatorSettings
    from vram_guard.budget import Budget
    from vram_guard.report import render
    from vram_guard.report.as_json import as_dict

    expandable = AllocatorSettings(expandable_segments=True)
    for events, largest in ((FIRST_FREED, "above"), (SECOND_FREED, "below")):
        unknown = timeline(*(block(size * MIB) for size in SIZES), events=events)
        found = unknown.at(1)
        assert (found.peak_lower, found.peak_reserved) == (80 * MIB, 120 * MIB)
        known = {one: unknown.on(None, one).at(1) for one in ("below", "above")}
        assert {one for one, each in known.items() if each.peak_reserved == 120 * MIB} == {largest}
        assert all(each.peak_lower == 0 for each in known.values())
        assert not found.fits(Budget.of(100 * MIB, margin=0))
        assert unknown.at(1, capacity=100 * MIB).out_of_memory is not None
        assert unknown.max_batch_size(Budget.of(100 * MIB, margin=0)) == 0
        assert unknown.on(None, {"above": "below", "below": "above"}[largest]).max_batch_size(100 * MIB, limit=4) == 4
        both = [
            [line for line in render(one).splitlines() if "80.00" in line and "120.00" in line]
            for one in (found, known[largest])
        ]
        assert [len(lines) for lines in both] == [1, 0]
        told = as_dict(found)["estimate"]
        assert (told["peak_reserved_lower"], told["peak_reserved"]) == (80 * MIB, 120 * MIB)
        assert unknown.at(1, settings=expandable).peak_lower == 0, "no tie between segments there"


def test_a_convolution_does_without_the_workspace_that_does_not_fit() -> None:
    step = TrainingStep(
        lambda: nn.Conv2d(64, 64, 3, padding=1, dtype=torch.bfloat16),
        lambda b: torch.empty(b, 64, 32, 32, device="meta", dtype=torch.bfloat16),
        lambda model, batch: model(batch).mean(),
        adamw,
    )
    found = trace(step)
    wanted = found.at(128)
    activation = 128 * 64 * 32 * 32 * 2  # in bfloat16; the workspace holds two
    assert {one.bytes_at(128) for one in found.blocks if one.optional} == {2 * activation}
    assert wanted.breakdown["workspace"] >= 2 * activation
    needed = replace(found, blocks=tuple(one._replace(optional=False) for one in found.blocks))

    def least(made: Timeline) -> int:
        amounts = range(0, wanted.peak_reserved + MIB, MIB)
        return next(amount for amount in amounts if made.at(128, capacity=amount).out_of_memory is None)

    assert least(found) <= least(needed) - 4 * MIB


@given(answer=st.integers(0, 300), limit=st.integers(1, 300), near=st.integers(-5, 400))
def test_largest_that_fits_is_found_from_anywhere(answer: int, limit: int, near: int) -> None:
    asked: list[int] = []

    def fits(count: int) -> bool:
        assert 1 <= count <= limit
        asked.append(count)
        return count <= answer

    assert largest_that_fits(fits, limit, near) == min(answer, limit)
    assert len(asked) == len(set(asked)), "nothing is asked twice"


def test_where_peaks_do_not_rise_evenly_the_answer_is_the_same_from_anywhere() -> None:
    """As of a network of convolutions, whose peak is lower at some larger batches."""
    failing = {159, 160, 169, 170, 180}

    def fits(count: int) -> bool:
        return count < 190 and count not in failing

    assert {largest_that_fits(fits, 2**16, near) for near in (1, 3, 158, 189, 5000)} == {158}


def test_merging_demands_one_sequence_and_whole_bytes_per_sample() -> None:
    low = timeline(block(10), traced=(2,))
    assert merge_affine(low, timeline(block(13), traced=(3,))).blocks[0].size == Affine(4, 3)
    assert merge_affine(low, timeline(block(13), events=(0, ~0), traced=(3,))) is None
    assert merge_affine(low, timeline(block(7), traced=(3,))) is None  # shrinks
    assert merge_affine(low, timeline(block(13), traced=(4,))) is None  # a byte and a half for each sample
    other = block(13)._replace(operator="aten.bmm.default")
    assert merge_affine(low, timeline(other, traced=(3,))) is None
