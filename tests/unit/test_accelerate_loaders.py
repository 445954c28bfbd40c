"""Which loader is the training's, in a dry run and again in the launch."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("accelerate")

from torch.utils.data import BatchSampler, DataLoader, TensorDataset  # noqa: E402 - what is tested has to be there

from vram_guard.capture.loader import read_loader  # noqa: E402
from vram_guard.errors import UnsupportedStepError  # noqa: E402
from vram_guard_accelerate._launch_plan import LoaderPlace  # noqa: E402
from vram_guard_accelerate.apply.loaders import LoaderMatcher, LoadersMade  # noqa: E402

TRAINING, EVALUATION = list(range(8)), list(range(4))


def make(see: Any, sizes: dict[str, int]) -> dict[str, DataLoader[int]]:
    """Loaders of a training: several made at one line, one at another; each is shown with the frame that made it."""
    data = {"evaluation": EVALUATION, "training": TRAINING}
    made = {}
    for name, samples in data.items():
        made[name] = see(DataLoader(samples, batch_size=sizes[name]), sys._getframe())  # type: ignore[arg-type]
    made["test"] = see(DataLoader(TRAINING, batch_size=sizes["test"]), sys._getframe())  # type: ignore[arg-type]
    return made


def test_loaders_are_known_again_by_where_they_are_made() -> None:
    seen = LoadersMade()

    def remember(loader: Any, frame: Any) -> Any:
        seen.add(loader, frame)
        return loader

    sizes = {"evaluation": 4, "training": 4, "test": 2}
    loaders = make(remember, sizes)
    sample: Any = SimpleNamespace(loader=loaders["training"], batch_size=4)
    which = seen.place_of_training(sample)
    assert which is not None
    assert (which.number, which.of) == (1, 2)
    found = LoaderMatcher(which)
    kept: list[bool] = []
    for _ in range(3):
        make(lambda _loader, frame: kept.append(found.matches(frame)), sizes)
    assert kept == [False, True, False] * 3


def test_a_loader_of_another_batch_size_is_not_the_trainings() -> None:
    seen = LoadersMade()
    loader = DataLoader(TRAINING, batch_sampler=[[0, 1], [2, 3]])  # type: ignore[arg-type]
    seen.add(loader, sys._getframe())
    sample: Any = SimpleNamespace(loader=loader, batch_size=2)
    assert seen.place_of_training(sample) is None
    assert not LoaderMatcher(LoaderPlace()).matches(sys._getframe())


def test_a_batch_sampler_that_drops_the_only_batch_leaves_nothing_to_train_on() -> None:
    """A loader around it, as ``Accelerator.prepare`` makes one, has a drop_last of its own: False."""
    data = TensorDataset(torch.zeros(3, 2))

    def loader(*, drops: bool) -> DataLoader[Any]:
        return DataLoader(data, batch_sampler=BatchSampler(range(3), 8, drop_last=drops))

    with pytest.raises(UnsupportedStepError, match="3 samples"):
        read_loader(loader(drops=True))
    assert read_loader(loader(drops=False)).batch_size == 3
