"""Later steps of a training that differ from the first: found by running the hooks of later epochs in the trace."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from mmengine.hooks import Hook
from torch import nn

from vram_guard.capture.loader import Sample, read_loader
from vram_guard.language import Message, _
from vram_guard.state.random_generators import random_state_kept
from vram_guard_mmengine._shadow import PARTS, Shadow, is_users

if TYPE_CHECKING:
    from vram_guard.job import JobRun

#: Different steps that are followed, besides the first and the last one.
MOST_STEPS = 6
#: Places in a training (begins of epochs, iterations that hooks name) that are looked at, and how long that may take.
MOST_PLACES, MOST_SECONDS = 1000, 2.0

_OF_EPOCHS = ("before_train_epoch", "after_train_epoch")
_OF_ITERATIONS = ("before_train_iter", "after_train_iter")
_NOT_OF_MODULES = frozenset(("_parameters", "_buffers", "_modules", "_device"))
#: Longer containers hold data, not switches.
_LONG = 64


@dataclass(frozen=True)
class _Found:
    """A step that differs, to be traced where it begins."""

    what: str
    changes: dict[str, Any]


@dataclass(slots=True)  # what one trace finds stays for the others: a trace puts back what a job's attributes hold
class Schedule:
    """Different later steps, found in the first trace and followed in each.

    Args:
        sample: of the training's loader.
        batch: a sample's maker -> the step's batch.
        by_epoch: True if the training is counted in epochs.
        batches: of an epoch; None where that is not known.
        asked: what the model asks the message hub for in its steps ("epoch", "iter").
    """

    sample: Sample
    batch: Callable[[Callable[[int], Any]], Callable[[int], Any]]
    by_epoch: bool
    batches: int | None
    asked: set[str] = field(default_factory=set)
    _found: dict[int, _Found] | None = None
    _looked: int = 0
    """Places that the first trace has looked at."""

    def play(self, run: JobRun, shadow: Shadow, train: Callable[..., None]) -> None:
        """Run the hooks of every later place, and a step where it differs.

        Args:
            run: the trace.
            shadow: after its first steps.
            train: label and changes -> steps of the step's own loop, and the hooks after them.
        """
        places = list(self._places(shadow))
        if self._found is None:
            self._found = self._search(run, shadow, places, train)
            return
        for place in places[: self._looked]:
            self._go(run, shadow, place)
            if place in self._found:
                self._follow(run, place, train)

    def _search(self, run: JobRun, shadow: Shadow, places: list[int], train: Callable[..., None]) -> dict[int, _Found]:
        found = self._found = {}
        if not places:
            return found
        look = _Look(run, shadow, self)
        ends, left_out = time.monotonic() + MOST_SECONDS, 0
        for place in places[:MOST_PLACES]:
            if time.monotonic() > ends:
                break
            self._looked += 1
            taken = run.allocated
            self._go(run, shadow, place)
            what = look.difference() or (_("a hook takes memory") if run.allocated > taken else "")
            if not what and (self.asked or look.counters) and self._asked_at(shadow, place, places):
                what = _("the model asks how far the training is")
            if what and len(found) >= MOST_STEPS and place != places[-1]:
                left_out += 1
            elif what:
                found[place] = _Found(what, look.changes())
                began = time.monotonic()
                self._follow(run, place, train)
                ends += time.monotonic() - began
        if self._looked < len(places):
            run.note(
                Message(
                    "hooks are followed up to {place} only: what they change later is not included in the prediction",
                    place=self._name(places[self._looked - 1]),
                )
            )
        if left_out:
            run.note(Message("{count} more steps that differ are not followed", count=left_out))
        return found

    def _follow(self, run: JobRun, place: int, train: Callable[..., None]) -> None:
        found = (self._found or {})[place]
        run.note(Message("from {place} on the step differs: {what}", place=self._name(place), what=found.what))
        train(label=self._name(place), **found.changes)

    # --- places -----------------------------------------------------------------------------------------------

    def _places(self, shadow: Shadow) -> Iterator[int]:
        """Iterations at which hooks may change the step, after the first one."""
        users = [hook for hook in shadow.hooks if is_users(hook)]
        first, most = shadow.loop._iter + 1, shadow.loop._max_iters  # noqa: SLF001 - as the loops' properties
        places: set[int] = set()
        if self.by_epoch and self.batches and (_overriding(users, _OF_EPOCHS) or self.asked):
            places |= set(range((first // self.batches) * self.batches, most, self.batches))
        elif self.asked:
            places.add(most - 1)
        for hook in _overriding(users, _OF_ITERATIONS):
            for number in _numbers_of(hook):
                places |= {number - 1, number, number + 1}
                if self.batches:
                    places |= {epoch * self.batches for epoch in (number - 1, number)}
        yield from sorted(place for place in places if first <= place < most)

    def _name(self, place: int) -> str:
        if self.by_epoch and self.batches and place % self.batches == 0:
            return _("epoch {number}", number=place // self.batches + 1)
        return _("iteration {number}", number=place + 1)

    def _go(self, run: JobRun, shadow: Shadow, place: int) -> None:
        """The hooks up to an iteration, from the last place that hooks were run at."""
        epoch = place // self.batches if self.by_epoch and self.batches else 0
        if epoch != shadow.loop._epoch:  # noqa: SLF001 - as above
            shadow.call("after_train_epoch")
            shadow.at(epoch, place)
            shadow.call("before_train_epoch")
        shadow.at(epoch, place)
        run.model.train()
        shadow.call("before_train_iter", batch_idx=place % (self.batches or 1), data_batch=shadow.data_batch)

    def _asked_at(self, shadow: Shadow, place: int, places: list[int]) -> bool:
        """True at the last place, and at epochs that attributes of the model name (``initial_epoch = 4``)."""
        if place == places[-1]:
            return True
        named = {
            value
            for module in shadow.runner.model.modules()
            for name, value in vars(module).items()
            if type(value) is int and ("epoch" in name or "iter" in name)
        }
        return shadow.loop._epoch in named or place in named  # noqa: SLF001 - as above


def _overriding(hooks: list[Any], names: tuple[str, ...]) -> list[Any]:
    return [hook for hook in hooks if any(getattr(type(hook), name, None) is not getattr(Hook, name) for name in names)]


def _numbers_of(part: Any, depth: int = 3) -> Iterator[int]:
    """The whole numbers among an object's attributes, nested ones too."""
    if type(part) is int:
        if part > 0:
            yield part
    elif depth and isinstance(part, (list, tuple, set, dict)) and len(part) <= _LONG:
        for one in [*part, *(part.values() if isinstance(part, dict) else ())]:
            yield from _numbers_of(one, depth - 1)
    elif depth == 3 and hasattr(part, "__dict__"):
        for one in vars(part).values():
            yield from _numbers_of(one, depth - 1)


class _Look:
    """All that decides about a step's memory: flags of weights and modules, accumulation, the data set's pipeline."""

    def __init__(self, run: JobRun, shadow: Shadow, schedule: Schedule) -> None:
        self._run, self._shadow, self._schedule = run, shadow, schedule
        self._splits = run.accumulate // shadow.accumulate
        self._data = _parts_of(shadow.loader)
        self._sample = schedule.sample
        self._sizes = _shapes(self._sample.make(1))
        self.counters: set[str] = set()
        """Numbers that go on by the same amount from place to place, such as an epoch's."""
        self._known: dict[int, tuple[Any, dict[str, Any]]] = {}
        self._state = self._look()
        self._seen = [self._state]
        self._gone: dict[str, int] = {}

    def difference(self) -> str:
        """What is now as it was never before, in words; "" where there is nothing."""
        data = _parts_of(self._shadow.loader)
        if data != self._data:
            self._data = data
            self._read()
        before, self._state = self._state, self._look()
        self._count(before)
        for counter in self.counters:
            for state in (*self._seen, self._state):
                state.pop(counter, None)
        if any(self._state == state for state in self._seen):
            return ""
        self._seen.append(self._state)
        return self._in_words(before)

    def changes(self) -> dict[str, Any]:
        """The fields of the step as they are now."""
        before, after = self._schedule.sample.batch_size, self._sample.batch_size
        make = self._sample.make
        return {
            "accumulate": self._splits * self._state["accumulative_counts"],
            "batch": self._schedule.batch(lambda size: make(-(-size * after // before))),
        }

    def _count(self, before: dict[str, Any]) -> None:
        """Find counters: the same step forward twice in a row."""
        gone = {}
        for name, value in self._state.items():
            old = before.get(name)
            if type(value) is int and type(old) is int and value != old:
                gone[name] = value - old
                if self._gone.get(name) == value - old:
                    self.counters.add(name)
        self._gone = gone

    def _in_words(self, before: dict[str, Any]) -> str:
        now = self._state
        names = [name for name in {**before, **now} if before.get(name) != now.get(name) and name not in self.counters]
        trained = [name for name in names if name.startswith("requires_grad ")]
        words = []
        if trained:
            more = sum(1 if now.get(name) else -1 for name in trained)
            said = _("{count} more parameters are trained", count=more)
            words.append(said if more > 0 else _("{count} fewer parameters are trained", count=-more))
        others = [name for name in names if name not in trained]
        return ", ".join([*words, *others[:3], *(["..."] if len(others) > 3 else [])])

    def _look(self) -> dict[str, Any]:
        model, wrapper = self._shadow.runner.model, self._shadow.runner.optim_wrapper
        state: dict[str, Any] = {
            "accumulative_counts": getattr(wrapper, "_accumulative_counts", 1),
            "train_dataloader": (self._sizes, self._sample.batch_size),
        }
        for name, parameter in model.named_parameters():
            state[f"requires_grad {name}"] = parameter.requires_grad
        for path, module in model.named_modules():
            own = vars(module)
            signature = [
                (id(value), len(value) if isinstance(value, (list, dict, set)) else 0) for value in own.values()
            ]
            known = self._known.get(id(module))
            if known is None or known[0] != signature:
                simple = {
                    f"{path}.{name}".lstrip("."): _simple(value)
                    for name, value in own.items()
                    if name not in _NOT_OF_MODULES
                }
                known = self._known[id(module)] = signature, {path: type(module).__qualname__, **simple}
            state.update(known[1])
        return state

    def _read(self) -> None:
        """Samples of a pipeline that a hook has exchanged."""
        try:
            with random_state_kept():
                self._sample = read_loader(self._shadow.loader)
                self._sizes = _shapes(self._sample.make(1))
        except Exception as error:  # noqa: BLE001 - the user's own code reads the data
            self._run.note(
                Message(
                    "samples of a data set that hooks changed cannot be read ({error}): they are taken as before",
                    error=f"{type(error).__name__}: {error}",
                )
            )


def _shapes(batch: Any) -> Any:
    from vram_guard.simulate.tracing.batches import leaves_of

    return [tuple(leaf.shape) for leaf in leaves_of(batch) if hasattr(leaf, "shape")]


def _simple(value: Any, depth: int = 2) -> Any:
    """A value as far as it decides about memory: of a factor, whether it is 0."""
    if value is None or isinstance(value, (bool, str, Enum, torch.dtype, torch.device)):
        return value
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        return value == 0
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype, value.requires_grad
    if isinstance(value, (list, tuple)) and len(value) <= _LONG and depth:
        return [_simple(one, depth - 1) for one in value]
    if isinstance(value, dict) and len(value) <= _LONG and depth:
        return {str(key): _simple(one, depth - 1) for key, one in value.items()}
    if callable(value) and not isinstance(value, nn.Module):
        return getattr(value, "__qualname__", type(value).__qualname__)
    own = getattr(value, "__dict__", None)
    if own is None or isinstance(value, nn.Module) or not depth:
        return type(value).__qualname__
    return type(value).__qualname__, {name: _simple(one, depth - 1) for name, one in list(own.items())[:_LONG]}


def _parts_of(part: Any, depth: int = 6) -> Any:
    """What a hook may have exchanged in a loader: objects by identity, and their simple attributes."""
    if not depth:
        return None
    if isinstance(part, (list, tuple)):
        return [_parts_of(one, depth - 1) for one in part]
    if not hasattr(part, "__dict__"):
        return type(part).__qualname__
    simple = {name: _simple(value, 1) for name, value in vars(part).items() if name not in PARTS}
    inner = {name: _parts_of(vars(part)[name], depth - 1) for name in PARTS if name in vars(part)}
    return type(part).__qualname__, simple, inner
