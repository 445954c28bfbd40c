"""Weights of micro-batches that a loss's graph and numbers give: never a wrong one, for losses of all kinds."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import CASES, Net, make_batch
from torch.nn import functional

from vram_guard.apply.loss_weight import LossWeight, loss_weights
from vram_guard.apply.microbatch import MicroBatch, split
from vram_guard.apply.normalisers import Normaliser, find_normaliser
from vram_guard.proof.loss_graph import LossGraph
from vram_guard.step import TrainingStep


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
    found, why = find_normaliser(lambda part: case.loss(model, part), batch, split(batch, 6, 4))
    told = found.path[-1] if isinstance(found, Normaliser) else found or ""
    assert told == case.right, why
    assert bool(why) == (found is None)


def counted_in_a_trace(loss: Any, batch: Any, most: int) -> Any:
    graph = LossGraph(TrainingStep(Net(0), batch, loss, torch.optim.SGD, device="cpu"))
    samples = len(batch["x"])
    return graph.counted([MicroBatch(batch, samples, samples), *split(batch, samples, most)], lambda part: part)


@pytest.mark.parametrize("name", CASES)
def test_a_trace_finds_counts_without_computing_the_model(name: str) -> None:
    """The values of the batch are known in it; a mean or a sum over samples needs none of them."""
    found, right = counted_in_a_trace(CASES[name].loss, make_batch(6, 1), 4), CASES[name].right
    if name == "smoothed, weighed":  # torch fills weights in place there, which is not followed
        right = ""
    assert (found.path[-1] if found else "") == (right if right in make_batch(1, 1) else "")


@pytest.mark.parametrize("name", ["masked", "cross-entropy by hand", "masked, over samples"])
def test_a_mask_that_leaves_nothing_out_tells_a_trace_nothing(name: str) -> None:
    assert counted_in_a_trace(CASES[name].loss, make_batch(4, 3, full=True), 2) is None


@pytest.mark.torch_since(2, 5)
@pytest.mark.filterwarnings("ignore:.*degrees of freedom")  # of one sample
@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(sorted(CASES)),
    samples=st.integers(4, 7),
    most=st.integers(1, 4),
    seed=st.integers(0, 10_000),
    full=st.booleans(),
)
def test_no_answer_is_wrong_for_another_batch(name: str, samples: int, most: int, seed: int, full: bool) -> None:
    case, model = CASES[name], Net(seed)
    batch, other = make_batch(samples, seed, full=full), make_batch(6, seed + 1)
    found, _why = find_normaliser(
        lambda part: case.loss(model, part), batch, split(batch, samples, min(most, samples - 1))
    )
    if found is not None:
        assert worst_difference(model, case.loss, other, split(other, 6, 2), found) < 1e-6
        assert worst_difference(model, case.loss, other, split(other, 6, 5), found) < 1e-6


def test_two_parts_of_a_batch_that_are_alike_are_not_told_apart() -> None:
    """Their copies, that is: a part whose very memory the graph keeps is the one."""
    case, model, batch = CASES["masked"], Net(0), make_batch(4, 3)
    twins: Any = {"twin": batch["mask"].clone(), **batch}
    assert find_normaliser(lambda part: case.loss(model, part), twins, split(twins, 4, 2))[0] == Normaliser(
        ("mask",), "sum"
    )

    def copied(part: Any) -> torch.Tensor:
        return case.loss(model, {**part, "mask": part["mask"].double()})

    found, why = find_normaliser(copied, twins, split(twins, 4, 2))
    assert found is None
    assert "batch['twin']" in why
    assert "batch['mask']" in why


@pytest.mark.parametrize("name", ["masked", "cross-entropy by hand", "masked, over samples"])
def test_a_mask_that_leaves_nothing_out_tells_nothing(name: str) -> None:
    case, model, batch = CASES[name], Net(0), make_batch(4, 3, full=True)
    assert find_normaliser(lambda part: case.loss(model, part), batch, split(batch, 4, 2))[0] is None


def test_labels_are_found_by_their_memory_then_by_name() -> None:
    """Without padding, what a language model reads is what it is to say."""
    case, model, batch = CASES["next token"], Net(0), make_batch(4, 3, full=True)
    for name in ("labels", "target_ids"):
        twins: Any = {"input_ids": batch["tokens"].clone(), name: batch["tokens"], **batch}
        del twins["tokens"]

        def loss_of(part: Any, name: str = name) -> torch.Tensor:
            return case.loss(model, {**part, "tokens": part[name]})

        assert find_normaliser(loss_of, twins, split(twins, 4, 2))[0] == Normaliser((name,), shifted=True)
        assert find_normaliser(
            lambda part: CASES["ignored"].loss(model, {**part, "tokens": part["input_ids"]}), twins, split(twins, 4, 2)
        )[0] == Normaliser(("input_ids",))


def test_a_factor_that_is_computed_of_the_batch_is_none_of_a_sample_also_where_slices_agree_on_it() -> None:
    model, batch = Net(0), make_batch(4, 3)
    batch["kind"] = torch.tensor([0, 1, 1, 0])  # as many in either half
    found, why = find_normaliser(
        lambda part: CASES["balanced by the batch"].loss(model, part), batch, split(batch, 4, 2)
    )
    assert found is None
    assert "was computed" in why


def test_a_loss_that_differs_from_call_to_call_is_not_weighed() -> None:
    model, batch = Net(0), make_batch(4, 3)

    def loss_of(part: Any) -> torch.Tensor:
        return functional.dropout(model(part["x"])).square().mean()

    torch.manual_seed(0)
    found, why = find_normaliser(loss_of, batch, split(batch, 4, 2))
    assert found is None
    assert "add up to" in why


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
        Normaliser(path, weights=(0.5, 1.0, 3.0)): 4.5,
    }
    for normaliser, expected in counts.items():
        assert normaliser(batch) == expected
        assert pickle.loads(pickle.dumps(normaliser)) == normaliser
        assert "batch['deep'][0]['labels'][0]" in normaliser.words()
    holed = torch.tensor([[0.5, float("nan")]])
    assert Normaliser((), ignored=float("nan"))(holed) == 1
    assert Normaliser((), "sum")(torch.tensor([0.5, 0.25])) == 0.75


def test_a_batch_in_which_nothing_counts_is_weighed_by_its_samples() -> None:
    labels = torch.full((5, 3), -100)
    parts = split({"labels": labels}, 5, 3)
    for weight in (Normaliser(("labels",)), lambda batch: int((batch["labels"] != -100).sum())):
        assert [float(one) for one in loss_weights(parts, weight)] == pytest.approx([0.6, 0.4])
    labels[4, 0] = 1
    assert [float(one) for one in loss_weights(parts, Normaliser(("labels",)))] == [0, 1]
