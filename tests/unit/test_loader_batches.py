"""Batches of a loader whose data set hooks have changed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402 - torch brings it
from torch.utils.data import DataLoader, Dataset  # noqa: E402

from vram_guard.capture.loader import read_loader  # noqa: E402
from vram_guard.guard.step_state import LoaderBatches  # noqa: E402


class Rows(Dataset[Any]):
    """Samples that are made of one attribute."""

    def __init__(self, held: Any, rows: Callable[[Any, int], Any]) -> None:
        self.held = held
        self.rows = rows

    def __len__(self) -> int:
        return 128

    def __getitem__(self, index: int) -> Any:
        return self.rows(self.held, index)


def batches_of(loader: Any) -> LoaderBatches:
    run: Any = SimpleNamespace(loaded_samples=8, note=lambda said: pytest.fail(str(said)))
    return LoaderBatches(run, read_loader(loader), lambda: [loader], lambda: read_loader(loader))


class Holder:
    """Another object, which says how long samples are."""

    def __init__(self, rows: int) -> None:
        self.rows = rows


@pytest.mark.parametrize(
    ("before", "after", "rows"),
    [
        (np.zeros((128, 4)), np.zeros((128, 8)), lambda held, index: torch.from_numpy(held[index])),
        ([torch.zeros(4)] * 128, [torch.zeros(8)] * 128, lambda held, index: held[index]),
        (np.int64(4), np.int64(8), lambda held, _index: torch.zeros(int(held))),
        (0.5, 1.0, lambda held, _index: torch.zeros(int(8 * held))),
        ((0.5, 1.0), (1.0, 1.0), lambda held, _index: torch.zeros(int(8 * held[0]))),
        (partial(torch.zeros, 4), partial(torch.zeros, 8), lambda held, _index: held()),
        (Holder(4), Holder(8), lambda held, _index: torch.zeros(held.rows)),
    ],
    ids=["array", "list", "numpy's number", "factor", "factors", "function", "object"],
)
def test_a_data_set_that_hooks_change_is_read_anew(before: Any, after: Any, rows: Callable[[Any, int], Any]) -> None:
    data = Rows(before, rows)
    batches = batches_of(DataLoader(data, 8))
    assert batches.batch().shape == (8, 4)
    sizes = batches.sizes()
    batches.used()
    data.held = after
    assert batches.sizes() != sizes
    assert batches.batch().shape == (8, 8)


def _pairs(samples: list[Any]) -> Any:
    assert len(samples) % 2 == 0, "pairs"
    return torch.stack(samples).reshape(len(samples) // 2, 2, -1)


def test_a_collate_function_of_pairs_takes_no_single_sample() -> None:
    loader = DataLoader([torch.zeros(4)] * 64, 8, collate_fn=_pairs)
    assert batches_of(loader).batch().shape == (4, 2, 4)
