"""Weights of micro-batches that a loss's graph and numbers give: never a wrong one, for losses of all kinds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import CASES, Net, make_batch

from vram_guard.apply.loss_weight import LossWeight, loss_weights
from vram_guard.apply.microbatch import MicroBatch, split
from vram_guard.apply.normalisers import Normaliser, find_normaliser


def cut(batch: Any, samples: int, most: int) -> list[MicroBatch]:
    return split(batch, samples, most)


def gradients(model: Any, loss: torch.Tensor) -> list[torch.Tensor]:
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, retain_graph=False)
    return [torch.zeros_like(own) if one is None else one for own, one in zip(model.parameters(), found, strict=True)]


def worst_difference(model: Any, loss: Any, batch: Any, parts: list[MicroBatch], weight: LossWeight) -> float:
    """Of the gradients of weighted slices and of the batch, against the largest of the batch's."""
    whole = gradients(model, loss(model, batch))
    weights = loss_weights(parts, weight)
    pieces = [
        gradients(model, loss(model, part.data) * float(one))
        for part, one in zip(parts, weights, strict=True)
        if float(one)
    ]
    summed = [sum(of) for of in zip(*pieces, strict=True)]
    largest = max(float(one.norm()) for one in whole)
    return max(float((one - other).norm()) for one, other in zip(whole, summed, strict=True)) / (largest or 1)


@pytest.mark.parametrize("name", CASES)
def test_what_is_found_is_what_was_written(name: str) -> None:
    case, model, batch = CASES[name], Net(0), make_batch(6, 1)
    found, why = find_normaliser(lambda part: case.loss(model, part), batch, cut(batch, 6, 4))
    told = found.path[-1] if isinstance(found, Normaliser) else found or ""
    assert told == case.right, why
    assert bool(why) == (found is None)


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")  # of one sample
@pytest.mark.parametrize("name", CASES)
@settings(max_examples=6, deadline=None)
@given(samples=st.integers(4, 7), most=st.integers(1, 4), seed=st.integers(0, 10_000), full=st.booleans())
def test_no_answer_is_wrong_for_another_batch(name: str, samples: int, most: int, seed: int, full: bool) -> None:
    case, model = CASES[name], Net(seed)
    batch, other = make_batch(samples, seed, full=full), make_batch(6, seed + 1)
    found, _why = find_normaliser(
        lambda part: case.loss(model, part), batch, cut(batch, samples, min(most, samples - 1))
    )
    if found is not None:
        assert worst_difference(model, case.loss, other, cut(other, 6, 2), found) < 1e-6
        assert worst_difference(model, case.loss, other, cut(other, 6, 5), found) < 1e-6
