"""Losses that become other ones after two batches, told in ways that nothing follows; then batches stay whole."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn import functional as F

from .harness import MICRO
from .lightning import Base, Pairs, Training, case, loader

#: What a module of the process holds, and a script's functions read.
COUNTED: list[int] = []
SWITCHES: dict[str, Any] = {}
#: Of an attribute, as no code writes it out.
NAME = "esahp"[::-1]


class Later(Base):
    """A mean, and the root of a mean from where it is told."""

    phase = 0

    def is_late(self) -> bool:
        return len(COUNTED) >= 2

    def loss(self, batch: Any) -> torch.Tensor:
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        return loss.sqrt() if self.is_late() else loss


class Tells(pl.Callback):
    """Calls a function after each batch."""

    def __init__(self, tell: Callable[[Any, int], object]) -> None:
        self.tell = tell

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.tell(pl_module, batch_idx)


def later(name: str, tell: Callable[[Any, int], object]) -> Any:
    """Register a module's class that a callback tells; it is cut, and equal all the same."""

    def register(kind: type[Later]) -> type[Later]:
        def make() -> Training:
            COUNTED.clear()
            SWITCHES.clear()
            os.environ.pop("LATER_PHASE", None)
            return Training(kind(), callbacks=[Tells(tell)])

        make.__module__ = __name__
        case(f"later {name}", MICRO, exact=True)(make)
        return kind

    return register


def after_two(change: Callable[[Any], object]) -> Callable[[Any, int], object]:
    return lambda module, batch_idx: batch_idx == 1 and change(module)


@later("a list of the process", lambda _module, _batch_idx: COUNTED.append(1))
class OfList(Later):
    pass


@later("a dict of the process", after_two(lambda _module: SWITCHES.update(late=True)))
class OfDict(Later):
    def is_late(self) -> bool:
        return "late" in SWITCHES


@later("a dict that compiled code reads", after_two(lambda _module: SWITCHES.update(late=True)))
class OfCompiled(Later):
    """Autograd does not see what compiled code computes."""

    def __init__(self) -> None:
        super().__init__()
        self.compiled = torch.compile(self.late_or_not, backend="aot_eager")

    def loss(self, batch: Any) -> torch.Tensor:
        return self.compiled(batch)

    def late_or_not(self, batch: Any) -> torch.Tensor:
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        return loss.sqrt() if "late" in SWITCHES else loss


class Adding(nn.Module):
    """A layer that adds a mean over the features, or over the samples."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x)) + x.mean(SWITCHES.get("dim", 1), keepdim=True)


@later("a dict that a compiled layer reads", after_two(lambda _module: SWITCHES.update(dim=0)))
class OfCompiledLayer(Later):
    def __init__(self) -> None:
        super().__init__()
        added = Adding(16)
        added.compile(backend="aot_eager")
        self.net.first = nn.Sequential(self.net.first, added)


@later("the environment", after_two(lambda _module: os.environ.update(LATER_PHASE="1")))
class OfEnvironment(Later):
    def is_late(self) -> bool:
        return "LATER_PHASE" in os.environ


@later("an attribute by a computed name", after_two(lambda module: setattr(module, NAME, 1)))
class OfAttribute(Later):
    def is_late(self) -> bool:
        return self.phase == 1


@later("vars of the module", after_two(lambda module: vars(module).update({NAME: 1})))
class OfVars(OfAttribute):
    pass


@later("a method that is replaced", after_two(lambda module: object.__setattr__(module, "is_late", lambda: True)))
class OfMethod(Later):
    def is_late(self) -> bool:
        return False


@later("a dimension", after_two(lambda _module: SWITCHES.update(dim=0)))
class OfDimension(Later):
    """The same operators, over samples in place of features."""

    def loss(self, batch: Any) -> torch.Tensor:
        return F.mse_loss(self.net(batch[0]).softmax(SWITCHES.get("dim", 1)), batch[1])


@later("a reduction", after_two(lambda _module: SWITCHES.update(reduction="sum")))
class OfReduction(Later):
    def loss(self, batch: Any) -> torch.Tensor:
        return F.mse_loss(self.net(batch[0]), batch[1], reduction=SWITCHES.get("reduction", "mean"))


@case("later a data set that counts", MICRO, exact=True)
def of_data_set() -> Training:
    COUNTED.clear()

    class Counting(Pairs):
        def __getitem__(self, index: int) -> Any:
            COUNTED.append(1)
            return super().__getitem__(index)

    class Counted(Later):
        def is_late(self) -> bool:
            return len(COUNTED) > 16

    return Training(Counted(), loader(Counting()))


@case("later a key of the batch", MICRO, exact=True)
def of_batch() -> Training:
    class Numbered(Pairs):
        def __getitem__(self, index: int) -> Any:
            return (*super().__getitem__(index), index)

    def collated(samples: list[Any]) -> dict[str, Any]:
        x, y, numbers = torch.utils.data.default_collate(samples)
        return {"x": x, "y": y, **({"late": "yes"} if numbers.min() >= 16 else {})}

    class Keyed(Later):
        def loss(self, batch: Any) -> torch.Tensor:
            loss = F.mse_loss(self.net(batch["x"]), batch["y"])
            return loss.sqrt() if "late" in batch else loss

    return Training(Keyed(), loader(Numbered(), collate_fn=collated))


@case("later weights that are trained too", MICRO, exact=True)
def unfrozen() -> Training:
    """No other loss: it stays cut where its graph has grown below."""

    class Frozen(Base):
        def __init__(self) -> None:
            super().__init__()
            self.net.first.requires_grad_(requires_grad=False)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.05)

    def unfreeze(module: Any) -> None:
        module.net.first.requires_grad_(requires_grad=True)

    return Training(Frozen(), callbacks=[Tells(after_two(unfreeze))])
