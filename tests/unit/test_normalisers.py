"""Weights of micro-batches that a loss's graph and numbers give: never a wrong one, for losses of all kinds."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from each import each
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import CASES, Net, make_batch
from torch.nn import functional

from vram_guard.apply.loss_weight import LossWeight, bound_to, loss_weights
from vram_guard.apply.microbatch import MicroBatch, split
from vram_guard.apply.normalisers import EveryLabel, Normaliser
from vram_guard.proof.samples_apart import SamplesApart, form_over_samples


def gradients(model: Any, loss: torch.Tensor) -> list[torch.Tensor]:
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, retain_graph=False)
    return [torch.zeros_like(own) if one is None else one for own, one in zip(model.parameters(), found, strict=True)]


def worst_difference(model: Any, loss: Any, batch: Any, parts: list[MicroBatch], weight: LossWeight) -> float:
    """Of the gradients of weighted slices and of the batch, against the largest of the batch's."""
    whole = gradients(model, loss(model, batch))
    weights = loss_weights(parts, bound_to(model, weight))
    pieces = [
        gradients(model, loss(model, part.data) * float(one))
        for part, one in zip(parts, weights, strict=True)
        if float(one)
    ]
    summed = [sum(of) for of in zip(*pieces, strict=True)]
    largest = max(float(one.norm()) for one in whole)
    return max(float((one - other).norm()) for one, other in zip(whole, summed, strict=True)) / (largest or 1)


def form(loss: Any, model: Net, batch: Any, samples: int) -> Any:
    apart = SamplesApart(batch, samples, split(batch, samples, 1), model)
    with apart, apart.reading():
        found = loss(model, batch)
    return apart.form(found)


def found_in(loss: Any, model: Net, seed: int = 1) -> Any:
    of = {size: make_batch(size, seed) for size in (8, 4)}
    return form_over_samples(*(form(loss, model, batch, size) for size, batch in of.items()))


#: What weights are right for, and the graph does not show: a mask picks values, a count is read, classes' weights fill
#: masked labels.
NOT_SHOWN = (
    "masked, over samples", "masked, summed", "masked, item", "rows", "rows of both", "selected", "positives",
    "smoothed, weighed",
)  # fmt: skip


@each("name", CASES)
def test_what_is_found_is_what_was_written(name: str) -> None:
    case = CASES[name]
    found, why = found_in(case.loss, Net(0))
    told = found.path[-1] if isinstance(found, Normaliser) else found or ""
    assert told == ("" if name in NOT_SHOWN else case.right), why
    assert bool(why) == (found is None)


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")  # of one sample
@settings(max_examples=100, deadline=None)
@given(name=st.sampled_from(sorted(CASES)), seed=st.integers(0, 10_000))
def test_no_answer_is_wrong_for_another_batch(name: str, seed: int) -> None:
    case, model = CASES[name], Net(seed)
    found, _why = found_in(case.loss, model, seed)
    other = make_batch(6, seed + 1)
    if found is not None:
        assert worst_difference(model, case.loss, other, split(other, 6, 2), found) < 1e-6
        assert worst_difference(model, case.loss, other, split(other, 6, 5), found) < 1e-6


def test_means_over_samples_and_over_labels_are_one_where_every_label_counts() -> None:
    def loss(model: Net, part: Any) -> torch.Tensor:
        scores = model(part["x"])
        return functional.cross_entropy(scores[:, 0], part["kind"]) + scores.square().mean()

    model, batch = Net(0), make_batch(6, 2)
    found, _why = found_in(loss, model)
    assert found == EveryLabel((Normaliser(("kind",)),))
    assert worst_difference(model, loss, batch, split(batch, 6, 4), found) < 1e-6
    assert not found.why_whole(batch)
    batch["kind"][1] = -100
    assert found.why_whole(batch)


@dataclass
class Sample:
    """A batch of the user's."""

    labels: list[torch.Tensor]


def test_what_is_counted_is_found_in_nested_containers_and_goes_to_other_processes() -> None:
    labels = torch.tensor([[1, -100, 2], [-100, -100, 0]])
    batch = {"deep": (Sample([labels]),)}
    path = ("deep", 0, "labels", 0)
    counts = {
        Normaliser(path): 3,
        Normaliser(path, shifted=True): 2,
        Normaliser(path, "positive"): 2,
        Normaliser(path, "others", 0): 5,
    }
    for normaliser, expected in counts.items():
        assert normaliser(batch) == expected
        assert pickle.loads(pickle.dumps(normaliser)) == normaliser
        assert "batch['deep'][0]['labels'][0]" in normaliser.words()
    holed = torch.tensor([[0.5, float("nan")]])
    assert Normaliser((), ignored=float("nan"))(holed) == 1
    assert Normaliser((), "sum")(torch.tensor([0.5, 0.25])) == 0.75


def test_class_weights_are_those_that_the_model_holds_when_a_batch_is_counted() -> None:
    model = torch.nn.Sequential(torch.nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0])))
    labels = torch.tensor([0, 1])
    count = Normaliser((), weights="0.weight")
    bound = count.bound(model)
    assert "0.weight" in bound.words()
    assert bound(labels) == 4
    model[0].weight[1] = 7
    assert bound(labels) == 8
    model[0].weight = torch.tensor([5.0, 5.0])
    assert bound(labels) == 10
    with pytest.raises(RuntimeError, match="bound"):
        count(labels)


def test_a_batch_in_which_nothing_counts_is_weighed_by_its_samples() -> None:
    labels = torch.full((5, 3), -100)
    parts = split({"labels": labels}, 5, 3)
    for weight in (Normaliser(("labels",)), lambda batch: int((batch["labels"] != -100).sum())):
        assert [float(one) for one in loss_weights(parts, weight)] == pytest.approx([0.6, 0.4])
    labels[4, 0] = 1
    assert [float(one) for one in loss_weights(parts, Normaliser(("labels",)))] == [0, 1]
