"""What is read of a training's loader."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import BatchSampler, DataLoader, TensorDataset  # noqa: E402 - what is tested has to be there

from vram_guard.capture.loader import read_loader  # noqa: E402
from vram_guard.errors import UnsupportedStepError  # noqa: E402


def test_a_batch_sampler_that_drops_the_only_batch_leaves_nothing_to_train_on() -> None:
    """A loader around it, as ``Accelerator.prepare`` makes one, has a drop_last of its own: False."""
    data = TensorDataset(torch.zeros(3, 2))

    def loader(*, drops: bool) -> DataLoader[Any]:
        return DataLoader(data, batch_sampler=BatchSampler(range(3), 8, drop_last=drops))

    with pytest.raises(UnsupportedStepError):
        read_loader(loader(drops=True))
    assert read_loader(loader(drops=False)).batch_size == 3


def test_a_sample_that_is_repeated_is_a_copy_of_itself_and_not_of_its_data_set() -> None:
    data = TensorDataset(torch.arange(4000.0).view(1000, 4))
    collated = read_loader(DataLoader(data, batch_size=8, collate_fn=lambda samples: samples)).make(8)
    assert len({row.untyped_storage().data_ptr() for (row,) in collated}) == 7  # the first two are the data set's own
    assert sorted({row.untyped_storage().nbytes() for (row,) in collated}) == [16, 16_000]
    assert [row.tolist() for (row,) in collated[:4]] == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3], [4, 5, 6, 7]]
