"""What a loop is seen to do between two optimizer steps; in copies of this process."""

from __future__ import annotations

import importlib
import os
import pickle
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("accelerate")
torch = pytest.importorskip("torch")
if not hasattr(os, "fork"):
    pytest.skip("the observer changes torch for good", allow_module_level=True)

from torch import nn  # noqa: E402 - what is tested has to be there
from torch.utils.data import DataLoader, IterableDataset  # noqa: E402

from vram_guard.capture.loader import Sample  # noqa: E402
from vram_guard_accelerate.dry_run.loop_profile import LoopObserver, LoopProfile, batches_of  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def compiler() -> None:
    """What an optimizer imports, once for all copies."""
    importlib.import_module("torch._dynamo")


def in_copy(work: Callable[[], Any]) -> Any:
    """What came of it in a copy, where torch may be changed."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        torch.set_num_threads(1)  # the threads of its pool were not copied
        try:
            answer = pickle.dumps(work())
        except BaseException:  # noqa: BLE001 - the copy has nobody else to tell
            answer = pickle.dumps(traceback.format_exc())
        with os.fdopen(writing, "wb") as stream:
            stream.write(answer)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        found = pickle.loads(stream.read())
    os.waitpid(process, 0)
    assert not isinstance(found, str), found
    return found


class Loop:
    """A training of two parameter groups that is observed."""

    def __init__(self, batch_size: int = 4) -> None:
        self.observer = LoopObserver()
        self.observer.install()
        self.model = nn.Linear(2, 3)
        groups = [{"params": [self.model.weight], "lr": 1.0}, {"params": [self.model.bias], "lr": 0.5}]
        self.optimizer = torch.optim.SGD(groups)
        self.loader = DataLoader(torch.zeros(10, 2), batch_size=batch_size)
        self.batch_size = batch_size

    def backward(self) -> None:
        self.model(torch.ones(self.batch_size, 2)).sum().backward()

    def step(self) -> None:
        self.optimizer.step()
        self.observer.stepped()

    def profile(self, batches_per_step: int = 1) -> LoopProfile:
        sample = Sample(lambda _size: None, self.batch_size, 10, self.loader, lambda _size: None)
        return self.observer.profile(sample, batches_per_step)


def test_what_happens_between_two_optimizer_steps() -> None:
    def work() -> LoopProfile:
        loop = Loop()
        for _ in range(3):
            for _ in range(2):
                loop.backward()
            loop.observer.clipped()
            loop.step()
            loop.optimizer.zero_grad()
            loop.model.zero_grad()
        return loop.profile(2)

    found = in_copy(work)
    assert (found.batch_size, found.batches_per_step) == (4, 2)
    assert found.counts == (("clip", 1), ("zero", 2))
    assert found.rates == ((1.0, 0.5), (1.0, 0.5))
    assert found.batches == 3


def test_a_loop_that_took_one_step_has_the_rates_of_that() -> None:
    def work() -> LoopProfile:
        loop = Loop()
        loop.backward()
        loop.step()
        return loop.profile()

    found = in_copy(work)
    assert found.rates == ((), (1.0, 0.5))


def test_the_batches_of_an_epoch_are_known_of_loaders_that_have_an_end() -> None:
    class Endless(IterableDataset[Any]):
        def __iter__(self) -> Iterator[int]:
            return iter([1])

    data = torch.zeros(10)
    assert batches_of(DataLoader(data, batch_size=4)) == 3
    assert batches_of(DataLoader(data, batch_size=4, drop_last=True)) == 2
    assert batches_of(DataLoader(Endless(), batch_size=4)) is None
    assert batches_of(range(3)) == 3
