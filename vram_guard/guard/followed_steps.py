"""Steps of a training that are followed: the first two, and each later one that differs from those before it.

A framework's own loop runs in the trace. Its adapter leads it to places of the training: where hooks run, or where the
model may do otherwise by what it has asked. When the hooks of a place have run, the step there is followed if what
decides about its memory is as it was at no step before, or if it meets more memory than those did.
"""

from __future__ import annotations

import contextlib
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from vram_guard.guard.places import StepDecisions
from vram_guard.guard.step_state import OPTIMIZER, LoaderBatches, StepStates, state_of
from vram_guard.guard.step_switches import ModelAttributes, numbers_of
from vram_guard.job import LoopRun
from vram_guard.language import Message, _
from vram_guard.limits import LATER_SECONDS, LATER_STEPS, PLACES_LOOKED_AT

if TYPE_CHECKING:
    import torch
    from torch import nn

#: Names of a state, see :func:`vram_guard.guard.step_state.state_of`: whatever they are, the loss is the same.
_BESIDES_LOSS = ("trained", "weights", "modes", "optimizer", "train_dataloader")


class StepPlace(NamedTuple):
    """A step of a training, which all count from 0; ``step`` is that of the whole training."""

    epoch: int
    step: int


class FollowedSteps(ABC):
    """The steps of one trace; an adapter says what its framework's have of their own.

    Args:
        run: of the trace.
        model: that is trained.
        batches: of its loader.
        epochs: of the training; infinite where nothing says, and 1 where it is not counted in epochs.
        steps: of an epoch.
        set_by_framework: attributes of modules that the framework itself sets.
        by_epoch: the training is counted in epochs.
        interrupted: something else runs between the first steps and the next epoch: a step there meets what that left.

    Attributes:
        names: by which the model asks for the number of the epoch, and of the step.
        of_epochs: names of hooks between the steps of two epochs.
        of_steps: names of hooks around a step.
        same_loss: names of the state besides those of every framework by which the model computes no other loss.
        asked: what steps have decided by the place in the training.
        label: of the step that comes next; "" where nothing differs.
        batches: of the loader, as hooks leave it.
        over: no later epoch is looked at.
    """

    names: tuple[str, str]
    of_epochs: tuple[str, ...]
    of_steps: tuple[str, ...]
    same_loss: tuple[str, ...] = ()

    def __init__(
        self,
        run: LoopRun,
        model: nn.Module,
        batches: LoaderBatches,
        epochs: float,
        steps: int,
        *,
        set_by_framework: Iterable[str] = (),
        by_epoch: bool = True,
        interrupted: bool = False,
    ) -> None:
        self._model, self.batches, self._attributes = model, batches, ModelAttributes(model, set_by_framework)
        self._run, self._epochs, self._steps, self._by_epoch = run, epochs, steps, by_epoch
        self._interrupted = interrupted
        self.asked = StepDecisions()
        self.label = ""
        self.over = False
        self._begun = False
        """The first steps are over, and places after them are looked at."""
        self._first = self._place = StepPlace(0, 0)
        self._taken = self._taken_before = 0
        """Steps that have ended; until the latest epoch began."""
        self._unsettled = False
        self._seconds = 0.0
        """Of the processor, for the first steps."""
        self._deadline = math.inf
        self._named: set[int] = set()
        self._near: set[int] = set()
        """Steps that are looked at, wherever hooks run: those that numbers name, and the plain one."""
        self._plain = -1
        """The step that is followed though nothing differs: it meets what has run since the first ones."""
        self._states = StepStates()
        self._left = self._before = 0
        """Bytes that were taken when what ran last had ended; before the latest step."""
        self._looked = self._found = self._left_out = 0
        self._again = self._last = self._stopped = False

    @abstractmethod
    def optimizers(self) -> Iterable[torch.optim.Optimizer]:
        """Those of the training now."""

    @abstractmethod
    def overriding(self, names: tuple[str, ...]) -> list[Any]:
        """The objects that do something in hooks of these names which may change steps."""

    @abstractmethod
    def in_words(self, place: StepPlace) -> str:
        """A place, for people."""

    def besides(self) -> dict[str, Any]:
        """What decides about the memory of a step in this framework alone, by names."""
        return {}

    def hooks_run(self) -> bool:
        """True while hooks run between epochs that may change what decides."""
        return bool(self.overriding(self.of_epochs))

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        """Around the model's part of a step."""
        with self.asked.computing_loss(), contextlib.nullcontext() if self._begun else self._attributes.in_step():
            yield

    @property
    def first_over(self) -> bool:
        """The first steps are over."""
        return self._taken >= 2 and not self._unsettled

    @property
    def later(self) -> bool:
        """The place of the training is one after its first steps."""
        return self._looked > 0

    def ended(self) -> None:
        """What is taken now was taken by no hook of a later place."""
        self._left = self._run.allocated
        self._states.meets(self._left)

    def elsewhere(self) -> None:
        """Something else has run, such as a validation: what it has left was taken by no hook, and takes no time."""
        self._interrupted = True
        self._look_on()

    def step_ends(self) -> None:
        """A step is over, with all that the loop does in it."""
        self._taken += 1
        self._unsettled = self._run.step_ends()

    # --- places -----------------------------------------------------------------------------------------------

    def of_epoch(self, epoch: int, step: int) -> Iterator[StepPlace]:
        """The places of an epoch to which the loop is led, each asked for when the one before it is over.

        A loop may leave its epoch before that.

        Args:
            epoch: that begins.
            step: with which it begins.
        """
        self._taken_before = self._taken
        if not self._begun:
            yield from self._first_steps(epoch, step)
        places = self._places(epoch)
        for number, place in enumerate(places):
            began, taken = time.process_time(), self._taken
            more = number + 1 < len(places) or self._next(epoch) is not None
            self._arrive(place, more=more)
            yield place
            if self._taken > taken:
                if self.label and self._run.allocated > self._before:
                    self._again = True
                    yield place
                self._deadline += time.process_time() - began
            self.ended()
            if self._stopped:
                return

    def next_epoch(self, epoch: int) -> int | None:
        """The next one that is looked at; None where there is none."""
        found = self._next(epoch)
        self.over = found is None
        if self.over and self._left_out:
            self._run.note(Message("{count} more steps that differ are not followed", count=self._left_out))
            self._left_out = 0
        return found

    def _look_on(self) -> None:
        """Hooks of later places have all of their time before them."""
        self._deadline = time.process_time() + max(self._seconds, LATER_SECONDS)
        self.ended()
        if self._interrupted and self._begun:
            first = self._first
            self._plain = (first.epoch + 1) * self._steps if self._by_epoch else first.step + 2
            self._near.add(self._plain)

    def _first_steps(self, epoch: int, start: int) -> Iterator[StepPlace]:
        began, self._first = time.process_time(), StepPlace(epoch, start)
        while not self.first_over:
            yield StepPlace(epoch, start + self._taken)
        self._begun = True
        self._seconds = time.process_time() - began
        self.asked.followed(self._numbers(self._first))
        self._states.look(self._deciding())
        self._states.followed(self._run.allocated)
        self._look_on()
        self._named = self._numbers_named()
        for number in self._named:
            self._near |= {number - 1, number, number + 1}
            self._near |= {one * self._steps for one in (number - 1, number) if self._by_epoch}

    def _numbers_named(self) -> set[int]:
        """Epochs and steps that hooks and the model name: there hooks may change the state, or the model do otherwise.

        Modules that are hooks themselves name them like other modules: most of their numbers are sizes.
        """
        of_steps = self.overriding(self.of_steps)
        if not of_steps and not self.hooks_run():
            return set()
        found = {number for hook in of_steps if hook is not self._model for number in numbers_of(hook)}
        return found | self._attributes.places(tuple(name.rpartition("_")[2] for name in self.names))

    def _next(self, epoch: int) -> int | None:
        if not self._begun:
            found: float = epoch + 1 if self._taken > self._taken_before else math.inf
        elif self._stopped:
            found = math.inf
        elif self.hooks_run() or self.asked:
            found = epoch + 1
        else:
            found = min((one // self._steps for one in self._near if one // self._steps > epoch), default=math.inf)
        return int(found) if found < self._epochs else None

    def _places(self, epoch: int) -> list[StepPlace]:
        """Places of an epoch after the first steps."""
        begins, end = epoch * self._steps, (epoch + 1) * self._steps
        begins_at = self._first.step + 1 if epoch == self._first.epoch else begins
        steps = set(self._near)
        if self._by_epoch and (self.hooks_run() or self.asked):
            steps |= {begins}
        if self.asked:
            near = self.asked.steps(self.names[1], begins_at, end)
            steps |= {step for step in near if self.asked.differs(self._numbers(StepPlace(epoch, step)))}
            steps |= {end - 1} if self._epochs == 1 else set()
        return [StepPlace(epoch, step) for step in sorted(steps) if begins_at <= step < end]

    def _arrive(self, place: StepPlace, *, more: bool) -> None:
        """The loop is about to be led to a place; the hooks there have not run."""
        self._stopped = self._looked >= PLACES_LOOKED_AT or time.process_time() > self._deadline
        if self._stopped and more:
            self._run.note(
                Message(
                    "hooks are followed up to {place} only: what they change later is not included in the prediction",
                    place=self.in_words(place),
                )
            )
        self._place, self._last = place, self._stopped or not more
        self._looked += 1
        self._again = False
        self.label = ""

    # --- what differs -----------------------------------------------------------------------------------------

    def _deciding(self) -> dict[str, Any]:
        """What decides about the memory of a step now, by names."""
        own = state_of(self._model, self.optimizers(), self.batches)
        return {**own, **self._attributes.now(), **self.besides()}

    def follows(self) -> bool:
        """True where the step of this place is followed; to be asked when the hooks before it have run."""
        if not self._looked or self._again:
            return True
        self._states.look(self._deciding())
        changed = self._states.changed()
        if "trained" in changed:
            self._run.changes_later("trained")
        if any(name == "optimizer" or name.startswith(OPTIMIZER) for name in changed):
            self._run.changes_later("optimized")
        why = self._difference(changed)
        self.label = self.in_words(self._place) if why else ""
        if not why:
            if self._place.step != self._plain:
                return False
        elif self._found >= LATER_STEPS and not self._last:
            self._left_out += self._states.moved
            return False
        else:
            self._found += 1
            self._run.note(Message("from {place} on the step differs: {what}", place=self.label, what=why))
            self.asked.followed(self._numbers(self._place))
            if self.asked.in_loss or not all(map(self._leaves_loss, changed)):
                self._run.changes_later("loss")
        self._before = self._run.allocated
        self._states.followed(self._before)
        return True

    def _difference(self, changed: dict[str, tuple[Any, Any]]) -> str:
        """How the step here differs from those that were followed, in words; "" where it does not."""
        met = self._states.met()
        if met is None or self._run.allocated > min(met, self._left):
            return _in_words(changed) or _("a hook takes memory")
        return _("the model asks how far the training is") if self._otherwise_asked() else ""

    def _leaves_loss(self, name: str) -> bool:
        return name in (*_BESIDES_LOSS, *self.same_loss) or name.startswith(OPTIMIZER)

    def _otherwise_asked(self) -> bool:
        """True where the model may do otherwise than before by how far the training is."""
        if self.asked and self.asked.differs(self._numbers(self._place)):
            return True
        counts = bool(self._states.counters)  # attributes of the model do: it may name epochs (``initial_epoch = 4``)
        if self._last or not counts:
            return self._last and (counts or self.asked.undecided)
        return not self._named.isdisjoint(self._place)

    def _numbers(self, place: StepPlace) -> dict[str, int]:
        return dict(zip(self.names, place, strict=True))


def _in_words(changed: dict[str, tuple[Any, Any]]) -> str:
    said = []
    if "trained" in changed:
        before, now = changed["trained"]
        more = sum(now) - sum(before)
        said.append(
            _("{count} more parameters are trained", count=more)
            if more > 0
            else _("{count} fewer parameters are trained", count=-more)
        )
    said += [name for name in changed if name != "trained"][:3]
    return ", ".join([*said, *(["..."] if len(changed) > 3 else [])])
