"""Outputs of micro-batches, put together as the whole batch would have returned them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from each import each

from vram_guard.apply.microbatch import MicroBatch
from vram_guard.apply.outputs import merged

#: Three samples and one: means over samples count 3/4 and 1/4.
PARTS = [MicroBatch("first", 3, 4), MicroBatch("second", 1, 4)]


def test_rows_of_samples_are_joined() -> None:
    found = merged([torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0])], PARTS)
    assert found.tolist() == [1, 2, 3, 4]


def test_numbers_are_means_over_samples_and_losses_add_up_by_their_weights() -> None:
    numbers = [{"loss": torch.tensor(2.0), "accuracy": torch.tensor(4.0), "seconds": 4.0}] * 2
    found = merged(numbers, PARTS, [1.0, 1.0])
    assert {name: float(value) for name, value in found.items()} == {"loss": 4, "accuracy": 4, "seconds": 4}
    unlike = merged([{"accuracy": torch.tensor(0.0)}, {"accuracy": torch.tensor(4.0)}], PARTS)
    assert float(unlike["accuracy"]) == 1


UNKNOWN = "cannot be put together from micro-batches for certain"


@each(
    ("outputs", "last"),
    [
        (["one", "two"], "two"),
        ([True, False], False),
        ([{1}, {2}], {2}),
        ([[1.0], None], None),
        ([torch.ones(2, 2), torch.tensor([[5.0, 5.0], [5.0, 5.0]])], [[5, 5], [5, 5]]),  # two rows of three samples
    ],
)
def test_other_things_are_those_of_the_last_micro_batch_and_it_is_said(outputs: list[Any], last: Any) -> None:
    with pytest.warns(UserWarning, match=UNKNOWN + ": the last one's is taken"):
        found = merged(outputs, PARTS)
    assert (found.tolist() if isinstance(found, torch.Tensor) else found) == last


@each("outputs", [[torch.tensor(1), torch.tensor(2)], [1, 2], [np.int64(1), np.int64(2)], [3, 1], [np.array(1)] * 2])
def test_whole_numbers_are_taken_for_counts_and_it_is_said(outputs: list[Any]) -> None:
    if not isinstance(outputs[0], np.ndarray):
        with pytest.warns(UserWarning, match=f"right.*{UNKNOWN}: their sum is taken"):
            found = merged([{"right": number} for number in outputs], PARTS)["right"]
        assert int(found) == sum(map(int, outputs))
    assert merged([torch.tensor(7), torch.tensor(7)], PARTS) == 7, "the same in all is no count"


@each("one", ["text", 7, None, b"bytes", True, torch.tensor([7, 7]), np.array([1.0, 2.0]), (1, "a")])
def test_the_same_in_all_micro_batches_is_kept(one: Any) -> None:
    found = merged([{"it": one}, {"it": one}], PARTS)["it"]
    assert type(found) is type(one)
    assert np.array_equal(np.asarray(found), np.asarray(one)) if hasattr(one, "shape") else found == one


class Pair(NamedTuple):
    rows: Any
    error: Any


@dataclass
class Output:
    names: list[str]
    pair: Pair


def test_structures_are_merged_part_by_part() -> None:
    first, second = np.array([[1.0], [2.0], [3.0]]), np.array([[4.0]])
    found = merged(
        [Output(["a", "b", "c"], Pair(first, np.float32(0.0))), Output(["d"], Pair(second, np.float32(4.0)))], PARTS
    )
    assert found.names == ["a", "b", "c", "d"]
    assert found.pair.rows.tolist() == [[1], [2], [3], [4]]
    assert found.pair.error == 1
    assert type(found.pair) is Pair


def test_lists_are_of_samples_where_they_have_their_number_and_else_merged_item_by_item() -> None:
    halves = [MicroBatch("first", 2, 4), MicroBatch("second", 2, 4)]
    assert merged([[{"id": 1}, {"id": 2}], [{"id": 3}, {"id": 4}]], halves) == [{"id": one} for one in (1, 2, 3, 4)]
    assert merged([[0.0, 1.0, 2.0], [4.0, 3.0, 2.0]], halves) == [2, 2, 2]
    levels = [torch.zeros(2, 3), torch.zeros(2, 5)]
    assert [tuple(level.shape) for level in merged([levels, levels], halves)] == [(4, 3), (4, 5)]


def test_keys_of_any_micro_batch_are_kept() -> None:
    found = merged([{"early": torch.tensor([1.0])}, {"late": "x"}], PARTS)
    assert found == {"early": torch.tensor([1.0]), "late": "x"}
    some = merged([{"error": 1.0}, {}, {"error": 4.0}], [MicroBatch(None, 2, 4), MicroBatch(None, 1, 4), PARTS[1]])
    assert some == {"error": 2.0}, "the mean over the three samples that have one"
    assert merged([None, None], PARTS) is None
    assert merged(["alone"], PARTS[:1]) == "alone"
