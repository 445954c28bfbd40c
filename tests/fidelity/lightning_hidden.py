"""State where a walk over attributes does not lead, statistics that no operator of a forward shows, later forwards."""

from __future__ import annotations

import decimal
import functools
import itertools
import sys
import tempfile
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from .harness import CHECKPOINT, MICRO
from .lightning import Base, BlockNet, Net, PureBlock, Rows, Training, case, loader
from .lightning_later import Tells, after_two

#: Each names what it reads, changes or joins.
SAYS = r"\w"


# --- counters -------------------------------------------------------------------------------------------------------


class Counted:
    """A class that is used as a variable, and an object that only a weak reference leads to."""

    calls = 0
    numbers: Iterator[int]
    one: Any


class OfAll(type):
    total = 0

    @property
    def calls(cls) -> int:
        return OfAll.total


class Own(metaclass=OfAll):
    pass


def tick() -> int:
    tick.calls += 1  # type: ignore[attr-defined]
    return tick.calls  # type: ignore[attr-defined,no-any-return]


def bumped(holder: Any) -> int:
    holder.calls += 1
    return int(holder.calls)


HELPERS = types.ModuleType("fidelity_helpers")
HELPERS.__file__ = __file__
HIDDEN, LOCAL = Counted(), threading.local()
TO_HIDDEN = weakref.ref(HIDDEN)
FOLDER: list[str] = []


def in_module() -> int:
    HELPERS.calls += 1
    return int(HELPERS.calls)


def in_library() -> int:
    sys.fidelity_calls += 1  # type: ignore[attr-defined]
    return sys.fidelity_calls  # type: ignore[attr-defined,no-any-return]


def in_class() -> int:
    Counted.calls += 1
    return Counted.calls


def in_metaclass() -> int:
    OfAll.total += 1
    return Own.calls


def behind_reference() -> int:
    return bumped(TO_HIDDEN())


def in_thread() -> int:
    LOCAL.calls += 1
    return int(LOCAL.calls)


def in_folder() -> int:
    found = len(list(Path(FOLDER[0]).iterdir()))
    Path(f"{FOLDER[0]}/{found}").mkdir()
    return found


@functools.lru_cache
def remembered(number: int) -> int:
    return number


def by_hits() -> int:
    remembered(1)
    return remembered.cache_info().hits


def by_precision() -> int:
    decimal.getcontext().prec += 1
    return decimal.getcontext().prec - 28


def in_list_of_module() -> int:
    HELPERS.seen.append(1)
    return len(HELPERS.seen)


def under_another_name() -> int:
    table = HELPERS.table
    table["calls"] += 1
    return int(table["calls"])


def in_iterator_of_class() -> int:
    return next(Counted.numbers)


def in_object_of_class() -> int:
    return bumped(Counted.one)


def reset() -> None:
    remembered.cache_clear()
    remembered(1)
    decimal.getcontext().prec = 28
    HELPERS.seen, HELPERS.table = [], {"calls": 0}
    Counted.numbers, Counted.one = itertools.count(1), types.SimpleNamespace(calls=0)
    tick.calls = HELPERS.calls = LOCAL.calls = Counted.calls = HIDDEN.calls = OfAll.total = 0  # type: ignore[attr-defined]
    sys.fidelity_calls = 0  # type: ignore[attr-defined]
    FOLDER[:] = [tempfile.mkdtemp()]


def counting(name: str, count: Callable[[], int], *, in_blocks: bool = True) -> None:
    """The same counter in the loss, in the network's forward, and in its blocks."""

    def rate(most: int = 5) -> float:
        return 1.0 if count() <= most else 0.5

    class InLoss(Base):
        def loss(self, batch):
            return super().loss(batch) * rate()

    class Network(Net):
        def forward(self, x):
            return super().forward(x) * rate()

    class Block(PureBlock):
        def change(self, x):
            return x * rate(13)

    def of(net: Callable[[], nn.Module] | None) -> Base:
        module = InLoss() if net is None else Base()
        module.net = Net() if net is None else net()
        return module

    def register(place: str, net: Callable[[], nn.Module] | None, *modes: str) -> None:
        def make() -> Training:
            reset()
            return Training(of(net))

        make.__module__ = __name__
        case(f"hidden {name} {place}", *modes, says=SAYS)(make)

    register("in the loss", None, MICRO)
    register("in the network", Network, MICRO)
    if in_blocks:
        register("in blocks", lambda: BlockNet(Block), CHECKPOINT)


counting("attribute of a function", tick)
counting("variable of an imported module", in_module)
counting("variable of a library's module", in_library)
counting("attribute of a class", in_class)
counting("attribute of a metaclass", in_metaclass)
counting("attribute behind a weak reference", behind_reference)
counting("attribute of a thread", in_thread)
counting("hits of a cache", by_hits)
counting("precision of decimal numbers", by_precision)
counting("list of an imported module", in_list_of_module)
counting("table under another name", under_another_name)
counting("iterator of a class", in_iterator_of_class)
counting("object of a class", in_object_of_class)
counting("folders that are made", in_folder, in_blocks=False)


def hidden(name: str, *modes: str, **about: Any) -> Any:
    return case(f"hidden {name}", *(modes or (MICRO,)), **{"says": SAYS, **about})


@hidden("schedule of torch that weighs the loss")
class Scheduled(Base):
    def __init__(self) -> None:
        super().__init__()
        other = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(other, lambda step: 1.0 if step <= 4 else 0.3)

    def loss(self, batch):
        self.schedule.step()
        return super().loss(batch) * self.schedule.get_last_lr()[0]


@hidden("number that is kept on a weight")
class OnWeight(Base):
    def loss(self, batch):
        weight = self.net.first.weight
        weight.calls = getattr(weight, "calls", 0) + 1
        return super().loss(batch) * (1.0 if weight.calls <= 5 else 0.5)


class Meter:
    """As metrics are kept: its own methods change it."""

    def __init__(self) -> None:
        self.sums, self.count = {"loss": 0.0}, 0

    def update(self, value: float) -> None:
        self.count += 1
        self.sums["loss"] += value


@hidden("attributes and tables that a step makes for itself", says="", exact=True)
class MakesItsOwn(Base):
    def loss(self, batch):
        meter, found = Meter(), {}
        meter.update(1.0)
        found["parts"] = [super().loss(batch)]
        found["parts"].append(found["parts"][0] * meter.sums["loss"])
        places = {name: number for number, name in enumerate(("first", "second"))}
        places["third"] = len(places)
        return sum(found["parts"]) / places["third"]


# --- statistics -----------------------------------------------------------------------------------------------------


class Words(Net):
    """Gradients are divided by how often each word is in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(4, 6, scale_grad_by_freq=True)

    def forward(self, x):
        return super().forward(self.words(x))


@hidden("gradients by frequencies")
def by_frequency():
    class OfWords(Base):
        def __init__(self):
            super().__init__()
            self.net = Words()

        def loss(self, batch):
            return F.mse_loss(self.net(batch["label"]), batch["y"])

    return Training(OfWords(), loader(Rows("label", "y")))


class Normalised(Net):
    """Normalises by a function, in no module of normalisation."""

    def forward(self, x):
        return super().forward(F.batch_norm(x, None, None, training=True))


@hidden("batch normalisation by a function", micro=2)
class ByFunction(Base):
    def __init__(self):
        super().__init__()
        self.net = Normalised()


class AcrossInstance(Net):
    def forward(self, x):
        return super().forward(F.instance_norm(x.t()[None])[0].t())


@hidden("instance normalisation over the batch", micro=2)
class ByInstance(Base):
    def __init__(self):
        super().__init__()
        self.net = AcrossInstance()


@hidden("spread by NumPy")
class ByNumpy(Base):
    def loss(self, batch):
        return super().loss(batch) * float(batch[1].numpy().std())


@hidden("largest of a list")
class ByList(Base):
    def loss(self, batch):
        return super().loss(batch) * max(map(max, batch[1].tolist()))


@hidden("spread by an array")
class ByArray(Base):
    def loss(self, batch):
        return super().loss(batch) * float(np.asarray(batch[1]).std())


@hidden("factor for few samples", micro=2)
class OfFew(Base):
    def loss(self, batch):
        loss = super().loss(batch)
        return loss if len(batch[0]) > 3 else 0.3 * loss


class FewRows(Net):
    def forward(self, x):
        return super().forward(x if len(x) > 3 else 0.5 * x)


@hidden("network for few samples", micro=2)
class InFewRows(Base):
    def __init__(self):
        super().__init__()
        self.net = FewRows()


# --- forwards that become others ------------------------------------------------------------------------------------


COUNTED: list[int] = []


class Centring(Net):
    def forward(self, x):
        out = super().forward(x)
        return out if len(COUNTED) < 2 else out - out.mean(0)


@hidden("network that centres its batch later", says=r"another way")
def centring():
    COUNTED.clear()
    module = Base()
    module.net = Centring()
    return Training(module, callbacks=[Tells(lambda _module, _batch_idx: COUNTED.append(1))])


@hidden("layer whose forward is replaced", says=r"another way")
def replaced():
    def centre(module):
        first, weight = module.net.first, module.net.first.weight
        vars(first)["forward"] = lambda x: F.linear(x, weight) - F.linear(x, weight).mean(0)

    return Training(Base(), callbacks=[Tells(after_two(centre))])


# --- weights of a class of their own ----------------------------------------------------------------------------------


class Wrapped(torch.Tensor):
    """A weight that is kept in another form, and what is multiplied with it."""

    kept: torch.Tensor

    @staticmethod
    def __new__(cls, kept: torch.Tensor) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, kept.shape, dtype=kept.dtype, device=kept.device)
        made.kept = kept
        return made

    def __tensor_flatten__(self) -> Any:
        return ["kept"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, _meta: Any, _size: Any, _stride: Any) -> Any:
        return cls(inner["kept"])

    @classmethod
    def scaled(cls, x: torch.Tensor) -> torch.Tensor:
        return x

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        plain = [one.kept if isinstance(one, Wrapped) else one for one in args]
        if func is torch.ops.aten.addmm.default:
            plain[1] = cls.scaled(plain[1])
        out = func(*plain, **{name: getattr(one, "kept", one) for name, one in (kwargs or {}).items()})
        again = "t", "detach", "alias", "clone", "empty_like", "_to_copy"
        return cls(out) if func.overloadpacket.__name__ in again else out


class Rescaling(Wrapped):
    @classmethod
    def scaled(cls, x: torch.Tensor) -> torch.Tensor:
        return x / x.abs().max()


def wrapped(kind: type[Wrapped]) -> Callable[[], Training]:
    def make() -> Training:
        module = Base()
        module.net.last.weight = nn.Parameter(kind(module.net.last.weight.detach()), requires_grad=False)
        return Training(module)

    return make


hidden("weight of a class of its own", says="", exact=True)(wrapped(Wrapped))
hidden("weight that scales what it is multiplied with", says="joins samples: aten.max|aten.max joins")(
    wrapped(Rescaling)
)
