"""Loaders of all kinds, with generators, counters and state of their own."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.nn import functional as F
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from .harness import FIT, MICRO, REPORT
from .lightning import SAMPLES, Base, Pairs, Training, case, drawn, loader


def loaders(name: str, *modes: str, **about: Any) -> Callable[[Callable[[], Any]], Any]:
    """Register a case by what makes its data; a pair's second part are effects."""

    def register(function: Callable[[], Any]) -> Any:
        def make() -> Training:
            made = function()
            if isinstance(made, Training):
                return made
            data, effects = made if isinstance(made, tuple) else (made, dict)
            return Training(Base(), data, effects=effects)

        case(f"loader {name}", *(modes or (REPORT, FIT, MICRO)), **{"exact": True, **about})(make)
        return function

    return register


loaders("shuffling")(lambda: loader(shuffle=True))


@loaders("shuffling with a generator of its own")
def own_generator():
    generator = torch.Generator().manual_seed(5)
    return loader(shuffle=True, generator=generator), generator.get_state


loaders("without the short batch")(lambda: loader(shuffle=True, drop_last=True))
loaders("weighted sampler")(lambda: loader(sampler=WeightedRandomSampler(drawn(5, SAMPLES).abs(), SAMPLES)))


@loaders("weighted sampler with a generator")
def weighted_own():
    generator = torch.Generator().manual_seed(5)
    sampler = WeightedRandomSampler(drawn(5, SAMPLES).abs(), SAMPLES, generator=generator)
    return loader(sampler=sampler), generator.get_state


loaders("subset sampler")(lambda: loader(sampler=SubsetRandomSampler(range(4, 25))))
loaders("random sampler with replacement")(
    lambda: loader(sampler=RandomSampler(Pairs(), replacement=True, num_samples=20))
)


class Order(Sampler):  # type: ignore[type-arg]
    """Samples in an order that ``shuffle`` makes; counts its epochs."""

    def __init__(self, shuffle: Callable[[list[int]], None]) -> None:
        self.shuffle, self.begun = shuffle, 0

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        self.begun += 1
        order = list(range(SAMPLES))
        self.shuffle(order)
        return iter(order)


@loaders("sampler with a numpy generator")
def numpy_sampler():
    rng = np.random.default_rng(4)
    sampler = Order(rng.shuffle)
    return loader(sampler=sampler), lambda: (sampler.begun, repr(rng.bit_generator.state))


@loaders("sampler with a Python generator")
def python_sampler():
    rng = random.Random(4)
    sampler = Order(rng.shuffle)
    return loader(sampler=sampler), lambda: (sampler.begun, rng.getstate())


@loaders("sampler with a torch generator")
def torch_sampler():
    rng = torch.Generator().manual_seed(4)
    sampler = Order(lambda order: order.sort(key=torch.randperm(SAMPLES, generator=rng).tolist().__getitem__))
    return loader(sampler=sampler), lambda: (sampler.begun, rng.get_state())


class Batches(BatchSampler):
    """Batches of a sampler's own making, in an order of its own generator."""

    def __init__(self, *, sizes: tuple[int, ...] = (8, 8, 8, 5)) -> None:
        self.rng, self.sizes, self.begun = np.random.RandomState(4), sizes, 0

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Iterator[list[int]]:
        self.begun += 1
        order = iter(self.rng.permutation(SAMPLES).tolist())
        for size in self.sizes:
            yield [next(order) for _ in range(size)]


@loaders("batch sampler of its own")
def batch_sampler():
    sampler = Batches()
    made = DataLoader(Pairs(), batch_sampler=sampler)
    return made, lambda: (sampler.begun, sampler.rng.get_state())


loaders("batch sampler of uneven batches", exact=False, says=r"batch|size|sample")(
    lambda: DataLoader(Pairs(), batch_sampler=Batches(sizes=(8, 3, 7, 4, 6)))
)


class Drawing(Pairs):
    """Draws noise for every sample that is read, and counts reads."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw, self.reads, self.cache = draw, 0, {}

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        x, y = super().__getitem__(index)
        return x + 0.1 * self.draw(), y


@loaders("dataset drawing from the process")
def global_draws():
    data = Drawing(lambda: float(torch.randn(()) + np.random.rand() + random.random()))
    return loader(data, shuffle=True), lambda: data.reads


@loaders("dataset with a torch generator")
def torch_dataset():
    rng = torch.Generator().manual_seed(4)
    data = Drawing(lambda: float(torch.randn((), generator=rng)))
    return loader(data), lambda: (data.reads, rng.get_state())


@loaders("dataset with a numpy generator")
def numpy_dataset():
    rng = np.random.default_rng(4)
    data = Drawing(lambda: float(rng.normal()))
    return loader(data), lambda: (data.reads, repr(rng.bit_generator.state))


@loaders("dataset with a Python generator")
def python_dataset():
    rng = random.Random(4)
    data = Drawing(rng.random)
    return loader(data), lambda: (data.reads, rng.getstate())


@loaders("dataset whose samples depend on the reads before")
def curriculum():
    data = Drawing(lambda: data.reads / 10)
    return loader(data), lambda: data.reads


@loaders("dataset that remembers what was read")
def caching():
    class Caching(Pairs):
        cache: dict[int, Any]

        def __getitem__(self, index):
            self.order.append(index)
            return super().__getitem__(index)

    data = Caching()
    data.order = []
    return loader(data), lambda: data.order


@loaders("collate function drawing from the process")
def collate_draws():
    def collate(samples):
        x, y = default_collate(samples)
        return x * random.uniform(0.5, 1.5) + torch.randn(()) + np.random.rand(), y

    return loader(collate_fn=collate)


@loaders("collate function with a generator")
def collate_own():
    rng = np.random.default_rng(3)

    def collate(samples):
        x, y = default_collate(samples)
        return x * rng.uniform(0.5, 1.5), y

    return loader(collate_fn=collate), lambda: repr(rng.bit_generator.state)


@loaders("collate function that counts")
def collate_counts():
    sizes = []

    def collate(samples):
        sizes.append(len(samples))
        return default_collate(samples)

    return loader(collate_fn=collate), lambda: list(sizes)


@loaders("dataset that mixes samples")
def mixing():
    class Mixing(Pairs):
        def __getitem__(self, index):
            one, other = super().__getitem__(index), super().__getitem__(random.randrange(len(self)))
            part = np.random.beta(0.4, 0.4)
            return tuple(torch.lerp(a, b, float(part)) for a, b in zip(one, other, strict=True))

    return loader(Mixing(), shuffle=True)


# --- streams ----------------------------------------------------------------------------------------------------


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __init__(self, draw: Callable[[], float] = float) -> None:
        self.pairs, self.draw, self.begun, self.given = Pairs(), draw, 0, 0

    def __iter__(self) -> Iterator[Any]:
        self.begun += 1
        for index in range(SAMPLES):
            self.given += 1
            x, y = self.pairs[index]
            yield x + self.draw(), y


@loaders("stream")
def stream():
    data = Stream()
    return loader(data), lambda: (data.begun, data.given)


@loaders("stream with a generator")
def drawing_stream():
    rng = random.Random(3)
    data = Stream(rng.random)
    return loader(data), lambda: (data.begun, data.given, rng.getstate())


@loaders("stream that goes on where it stood", exact=False, says=r"stream|read")
def one_shot():
    class Going(IterableDataset):  # type: ignore[type-arg]
        def __init__(self):
            pairs = Pairs(300)
            self.rest = (pairs[index] for index in range(300))

        def __iter__(self):
            return self.rest

    return Training(Base(), loader(Going()), trainer={"max_steps": 4})


@loaders("stream of whole batches")
def batches_streamed():
    class Whole(Stream):
        def __iter__(self):
            for x, y in zip(self.pairs.fields["x"].split(8), self.pairs.fields["y"].split(8), strict=True):
                self.given += 1
                yield x, y

    data = Whole()
    return loader(data, None), lambda: data.given


@loaders("list of batches")
def listed():
    class Listed(list):  # type: ignore[type-arg]
        """Lightning takes a plain list for several loaders."""

    return Listed(zip(drawn(1, 24, 6).split(8), drawn(2, 24, 4).split(8), strict=True))


@loaders("iterable of its own")
def own_iterable():
    class Own:
        begun = 0

        def __iter__(self):
            self.begun += 1
            yield from loader(shuffle=True)

    made = Own()
    return made, lambda: made.begun


loaders("generator", exact=False, says=r"loader|iterat|generator|stream|read")(
    lambda: Training(Base(), (batch for batch in loader(Pairs(200))), trainer={"max_steps": 4})
)


# --- loaders that are made late ---------------------------------------------------------------------------------


@loaders("train_dataloader that draws")
def drawing_method():
    class Drawn(Base):
        def train_dataloader(self):
            self.effects.append(random.random())
            order = torch.randperm(SAMPLES).tolist()
            return loader(torch.utils.data.Subset(Pairs(), order), shuffle=True)

    return Training(Drawn(), {"train_dataloaders": None})


@loaders("train_dataloader that counts")
def counting_method():
    class Counted(Base):
        made = 0

        def train_dataloader(self):
            self.made += 1
            self.effects.append(self.made)
            return loader(shuffle=True)

    trainer = {"max_epochs": 2, "reload_dataloaders_every_n_epochs": 1}
    return Training(Counted(), {"train_dataloaders": None}, trainer)


@loaders("data module")
def data_module():
    class Module(pl.LightningDataModule):
        def __init__(self):
            super().__init__()
            self.calls = []

        def prepare_data(self):
            self.calls.append("prepare")

        def setup(self, stage):
            self.calls.append(stage)
            order = np.random.permutation(SAMPLES)
            self.data = TensorDataset(drawn(1, SAMPLES, 6)[order], drawn(2, SAMPLES, 4)[order])

        def train_dataloader(self):
            self.calls.append("loader")
            return loader(self.data, shuffle=True)

        def teardown(self, stage):
            self.calls.append("teardown")

    module = Module()
    return Training(Base(), module, effects=lambda: module.calls)


class OfBoth(Base):
    def loss(self, batch):
        parts = [part for part in (batch.values() if isinstance(batch, dict) else batch) if part is not None]
        return sum(F.mse_loss(self.net(x), y) for x, y in parts) / len(parts)

    def training_step(self, batch, batch_idx, dataloader_idx=0):
        return self.loss(batch)


def combined(mode: str, short: int = 17) -> Training:
    both = {"a": loader(shuffle=True), "b": loader(Pairs(short), 8)}
    return Training(OfBoth(), CombinedLoader(both, mode))


for _mode in ("min_size", "max_size_cycle", "max_size"):
    loaders(f"combined, {_mode}", exact=False, says=r"batch|sample|size")(lambda mode=_mode: combined(mode))


loaders("list of loaders")(lambda: Training(OfBoth(), [loader(shuffle=True), loader(Pairs(29))]))
loaders("dict of loaders of unequal batches", exact=False, says=r"batch|sample|size")(
    lambda: Training(OfBoth(), {"a": loader(), "b": loader(Pairs(16), 4)})
)
loaders("workers that stay", REPORT, MICRO)(
    lambda: Training(
        Base(),
        loader(shuffle=True, num_workers=1, persistent_workers=True, multiprocessing_context="fork"),
        trainer={"max_epochs": 2},
    )
)


@loaders("workers with a generator in the dataset", REPORT)
def drawing_workers():
    rng = np.random.default_rng(4)
    data = Drawing(lambda: float(rng.normal()))
    return loader(data, num_workers=1, multiprocessing_context="fork"), lambda: data.reads
