"""Outputs of micro-batches, put together as the whole batch would have returned them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

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


@pytest.mark.parametrize(
    ("outputs", "last"),
    [
        ([torch.tensor(1), torch.tensor(2)], 2),  # whole numbers have no mean
        (["one", "two"], "two"),
        ([torch.ones(2, 2), torch.tensor([[5.0, 5.0], [5.0, 5.0]])], [[5, 5], [5, 5]]),  # two rows of three samples
    ],
)
def test_other_things_are_those_of_the_last_micro_batch(outputs: list[Any], last: Any) -> None:
    found = merged(outputs, PARTS)
    assert (found.tolist() if isinstance(found, torch.Tensor) else found) == last
    assert merged(outputs, PARTS, otherwise=len) == 2


def test_without_rows_tensors_of_all_shapes_are_numbers() -> None:
    found = merged([torch.zeros(3), torch.full((3,), 4.0)], PARTS, rows=False)
    assert found.tolist() == [1, 1, 1]


def test_keys_of_any_micro_batch_are_kept() -> None:
    found = merged([{"early": torch.tensor([1.0])}, {"late": "x"}], PARTS)
    assert found == {"early": None, "late": "x"}
    assert merged([None, None], PARTS) is None
    assert merged(["alone"], PARTS[:1]) == "alone"
