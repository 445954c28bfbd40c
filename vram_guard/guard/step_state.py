"""What decides about the memory of a training step, and in which states of it steps were followed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from numbers import Complex
from typing import Any

import torch
from torch import nn

from vram_guard.capture.loader import Sample
from vram_guard.job import JobRun
from vram_guard.language import Message
from vram_guard.limits import LONGEST_SWITCHES
from vram_guard.state.modules import within
from vram_guard.state.random_generators import random_state_kept

#: How the names of an optimizer's settings begin: ``optimizer.momentum``. Learning rates decide about no memory.
OPTIMIZER = "optimizer."

#: Attributes by which data sets and loaders hold what makes their samples and batches.
_PARTS = ("_dataset", "dataset", "datasets", "pipeline", "transform", "transforms", "sampler", "batch_sampler")


def state_of(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer], batches: LoaderBatches) -> dict[str, Any]:
    """What decides about a step's memory in every framework, by names.

    Args:
        model: that is trained.
        optimizers: of its weights.
        batches: of its loader.
    """
    parts = list(within(model))
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    settings = {name for group in groups for name in group if name != "params" and "lr" not in name}
    weights = [
        (id(part), name, one) for part in parts for name, one in vars(part)["_parameters"].items() if one is not None
    ]
    return {
        "trained": tuple(one.requires_grad for _part, _name, one in weights),
        "weights": tuple((part, name, one.shape) for part, name, one in weights),
        "modes": tuple((id(part), part.training) for part in parts),
        "optimizer": tuple(tuple(map(id, group["params"])) for group in groups),
        "train_dataloader": batches.sizes(),
        **{f"{OPTIMIZER}{name}": _setting(one.get(name) for one in groups) for name in settings},
    }


def _setting(values: Iterable[Any]) -> list[Any]:
    """One of an optimizer's, each once of its groups; of every number, which some count up, whether it is 0."""
    found: list[Any] = []
    for value in values:
        said = simple(float(value) if type(value) is int else value)
        found += [] if said in found else [said]
    return found


def simple(value: Any, depth: int = 2, *, exact: bool = False) -> Any:
    """A value as far as it decides about memory: of a factor, whether it is 0.

    Args:
        value: of an attribute.
        depth: of what is in it that is looked at.
        exact: samples are made of it: of a number its value counts, and of functions, arrays and long containers which
            object it is.
    """
    if value is None or isinstance(value, (bool, int, str, Enum, torch.dtype, torch.device)):
        return value
    if isinstance(value, Complex):
        return repr(value) if exact else not value
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype, value.requires_grad
    if isinstance(value, (list, tuple)) and len(value) <= LONGEST_SWITCHES and depth:
        return [simple(one, depth - 1, exact=exact) for one in value]
    if isinstance(value, dict) and len(value) <= LONGEST_SWITCHES and depth:
        return {str(key): simple(one, depth - 1, exact=exact) for key, one in value.items()}
    own = getattr(value, "__dict__", None)
    if exact and not own:
        return type(value).__qualname__, id(value)
    if not exact and callable(value) and not isinstance(value, nn.Module):
        return getattr(value, "__qualname__", type(value).__qualname__)
    if not own or isinstance(value, nn.Module) or not depth:
        return type(value).__qualname__
    return type(value).__qualname__, {
        name: simple(one, depth - 1, exact=exact) for name, one in list(own.items())[:LONGEST_SWITCHES]
    }


class LoaderBatches:
    """Batches of a training's loader as hooks leave it: they may switch its data set, or exchange the loader.

    Args:
        run: of the trace.
        sample: of the loader as it is when the training begins.
        loaders: gives the training's as they are now; none, as long as they are not made.
        read: reads samples of them.
    """

    def __init__(
        self, run: JobRun, sample: Sample, loaders: Callable[[], list[Any]], read: Callable[[], Sample]
    ) -> None:
        self._run, self._loaders, self._read = run, loaders, read
        self._first = self._sample = sample
        self._sizes = _shapes(sample)
        self._read_of: tuple[list[Any], Any] = [], None
        """The loaders that the sample is of, and their parts then."""
        self._made: Any = None
        """The latest batch, as long as no step has been given it."""
        self._look()

    def sizes(self) -> Any:
        """The shapes of a sample, and how many are in a batch."""
        self._look()
        return self._sizes, self._sample.batch_size

    def batch(self) -> Any:
        """A batch as the loaders deliver it now; where a plan cuts batches, micro-batches keep their size."""
        self._look()
        if self._made is None:
            self._made = self._sample.make(
                -(-self._run.loaded_samples * self._sample.batch_size // self._first.batch_size)
            )
        return self._made

    def used(self) -> None:
        """A step has been given the batch, and may have changed it."""
        self._made = None

    def _look(self) -> None:
        loaders = self._loaders()
        parts = [(id(one), _parts_of(one)) for one in loaders]
        before, self._read_of = self._read_of, (loaders or self._read_of[0], parts or self._read_of[1])
        if not before[0] or self._read_of[1] == before[1]:
            return
        self._made = None
        try:
            with random_state_kept():
                self._sample = self._read()
                self._sizes = _shapes(self._sample)
        except Exception as error:  # noqa: BLE001 - the user's own code reads the data
            self._run.note(
                Message(
                    "samples of a data set that hooks changed cannot be read ({error}): they are taken as before",
                    error=f"{type(error).__name__}: {error}",
                )
            )


def _shapes(sample: Sample) -> Any:
    from vram_guard.simulate.tracing.batches import leaves_of

    try:
        batch = sample.make(1)
    except Exception:  # noqa: BLE001 - the user's own code, which may make batches of pairs
        batch = sample.make(sample.batch_size)
    return [tuple(leaf.shape) for leaf in leaves_of(batch) if hasattr(leaf, "shape")]


def _parts_of(part: Any, name: str = "", depth: int = 6) -> Any:
    """What a hook may have exchanged in a loader: objects by their classes, and their attributes."""
    if not depth:
        return None
    if isinstance(part, (list, tuple)) and len(part) <= LONGEST_SWITCHES:  # a longer one is the data set itself
        return [_parts_of(one, name, depth - 1) for one in part]
    if not getattr(part, "__dict__", None):
        return simple(part, 0, exact=True)
    own = dict(vars(part))
    if name == "sampler":
        own.pop("epoch", None)  # by which loops have it draw in another order
    inner = {name: _parts_of(own.pop(name), name, depth - 1) for name in _PARTS if name in own}
    return type(part).__qualname__, {name: simple(value, 1, exact=True) for name, value in own.items()}, inner


@dataclass
class _Known:
    """A state in which a step was followed, and the most memory that was taken where one began."""

    state: Mapping[str, Any]
    met: int


class StepStates:
    """The states in which steps were followed, and that of a place that is looked at.

    Attributes:
        counters: numbers of the state that go on by the same amount from place to place, such as an epoch's.
        moved: the state is another one than at the place before.
    """

    def __init__(self) -> None:
        self.counters: set[str] = set()
        self.moved = False
        self._now: Mapping[str, Any] = {}
        self._gone: dict[str, int] = {}
        self._known: list[_Known] = []
        """The latest one last."""

    def look(self, state: Mapping[str, Any]) -> None:
        """The loop is at a place with this state."""
        before, self._now = self._now, state
        gone = {
            name: value - before[name]
            for name, value in state.items()
            if type(value) is int and type(before.get(name)) is int and value != before[name]
        }
        self.counters |= {name for name, by in gone.items() if self._gone.get(name) == by}  # twice in a row
        self._gone = gone
        self.moved = not self._same(before)

    def followed(self, allocated: int) -> None:
        """A step is followed in this state, where so many bytes are taken."""
        self._known = [one for one in self._known if not self._same(one.state)]
        self._known.append(_Known(self._now, allocated))

    def meets(self, allocated: int) -> None:
        """Other steps in this state would begin with so many bytes taken."""
        for one in self._known:
            if self._same(one.state):
                one.met = max(one.met, allocated)

    def met(self) -> int | None:
        """The most bytes with which a step in this state began; None where none was followed."""
        return next((one.met for one in self._known if self._same(one.state)), None)

    def changed(self) -> dict[str, tuple[Any, Any]]:
        """What is otherwise than where a step was followed for the last time: name -> (value then, value now)."""
        then, now = self._known[-1].state, self._now
        found = {name: (then.get(name), now.get(name)) for name in {**then, **now} if name not in self.counters}
        return {name: values for name, values in found.items() if values[0] != values[1]}

    def _same(self, state: Mapping[str, Any]) -> bool:
        if not self.counters:
            return state == self._now
        names = {**state, **self._now}.keys() - self.counters
        return all(state.get(name) == self._now.get(name) for name in names)
