"""Later steps of a training that differ from the first: found by running the hooks of later epochs in the trace."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from mmengine.hooks import Hook

from vram_guard.capture.loader import Sample
from vram_guard.guard.places import StepDecisions, train_differently
from vram_guard.job import JobRun
from vram_guard.language import Message, _
from vram_guard.limits import LATER_SECONDS, LATER_STEPS, LONGEST_SWITCHES, PLACES_LOOKED_AT
from vram_guard_mmengine._shadow import Shadow, is_users
from vram_guard_mmengine._step_switches import StepSwitches

_OF_EPOCHS = ("before_train_epoch", "after_train_epoch")
_OF_ITERATIONS = ("before_train_iter", "after_train_iter")


@dataclass(frozen=True)
class _Found:
    """A step that differs, to be traced where it begins."""

    what: str
    accumulative_counts: int
    batch: Callable[[int], Any]


@dataclass(slots=True)  # what one trace finds stays for the others: a trace puts back what a job's attributes hold
class Schedule:
    """Different later steps, found in the first trace and followed in each.

    Args:
        sample: of the training's loader.
        batch: a sample's maker -> the step's batch.
        by_epoch: True if the training is counted in epochs.
        batches: of an epoch; None where that is not known.
        asked: what steps decide by "epoch" and "iter" of the message hub.
    """

    sample: Sample
    batch: Callable[[Callable[[int], Any]], Callable[[int], Any]]
    by_epoch: bool
    batches: int | None
    asked: StepDecisions = field(default_factory=StepDecisions)
    _found: dict[int, _Found] | None = None
    unproven: str = ""
    """A later step whose loss may be another one, in words: a proof by the first step says nothing of it."""
    _looked: int = 0
    """Places that the first trace has looked at."""

    def play(self, run: JobRun, shadow: Shadow, train: Callable[..., None]) -> None:
        """Run the hooks of every later place, and a step where it differs.

        Args:
            run: the trace.
            shadow: after its first steps.
            train: label and changes -> a step of the step's own loop, and the hooks after it.
        """
        splits = run.accumulate // shadow.accumulate

        def follow(place: int, found: _Found) -> None:
            run.note(Message("from {place} on the step differs: {what}", place=self._name(place), what=found.what))
            run.model.train()
            try:
                changes = {"accumulate": splits * found.accumulative_counts, "batch": found.batch}

                def step() -> None:
                    train(label=self._name(place), **changes)
                    changes.clear()

                train_differently(run, step)
            except Exception as error:  # noqa: BLE001 - the user's own code
                said = f"{type(error).__name__}: {error}".split("\n", 1)[0]
                run.note(
                    Message(
                        "the step from {place} on cannot be followed ({error}): it is not included in the prediction",
                        place=self._name(place),
                        error=said,
                    )
                )

        places = list(self._places(shadow))
        if self._found is None:
            self._found = self._search(run, shadow, places, follow)
            return
        for place in places[: self._looked]:
            self._go(run, shadow, place)
            if place in self._found:
                follow(place, self._found[place])

    def _search(
        self, run: JobRun, shadow: Shadow, places: list[int], follow: Callable[[int, _Found], None]
    ) -> dict[int, _Found]:
        found: dict[int, _Found] = {}
        if not places:
            return found
        look = StepSwitches(run, shadow, self.sample)
        self.asked.followed({"epoch": shadow.loop._epoch, "iter": shadow.loop._iter})  # noqa: SLF001 - as the loops' own
        self._looked = 0
        ends, left_out = time.process_time() + LATER_SECONDS, 0
        for place in places[:PLACES_LOOKED_AT]:
            if time.process_time() > ends:
                break
            self._looked += 1
            taken = run.allocated
            self._go(run, shadow, place)
            what = look.difference() or (_("a hook takes memory") if run.allocated > taken else "")
            if not what and self._asked_at(shadow, place, last=place == places[-1], counts=bool(look.counters)):
                what = _("the model asks how far the training is")
            if what and len(found) >= LATER_STEPS and place != places[-1]:
                left_out += 1
            elif what:
                self.asked.followed(self._numbers(place))
                found[place] = _Found(what, look.accumulative_counts, self.batch(look.batches()))
                if (look.other_loss or self.asked) and not self.unproven:
                    self.unproven = f"{self._name(place)}: {what}"
                began = time.process_time()
                follow(place, found[place])
                ends += time.process_time() - began
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
        if self.asked:
            places |= set(self.asked.steps("iter", first, most))
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
        if shadow.sets_modes:
            run.model.train()
        shadow.batch_idx = place - epoch * self.batches if self.batches else place  # loops of iterations count through
        shadow.call("before_train_iter", batch_idx=shadow.batch_idx, data_batch=shadow.data_batch)

    def _numbers(self, place: int) -> dict[str, int]:
        return {"epoch": place // self.batches if self.by_epoch and self.batches else 0, "iter": place}

    def _asked_at(self, shadow: Shadow, place: int, *, last: bool, counts: bool) -> bool:
        """True where a model may do otherwise than before by how far the training is.

        Args:
            shadow: at this place.
            place: that hooks were run at.
            last: of all places.
            counts: attributes of the model do, in which case it may name epochs itself (``initial_epoch = 4``).
        """
        if self.asked and self.asked.differs(self._numbers(place)):
            return True
        if last or not counts:
            return last and (counts or self.asked.undecided)
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
    elif depth and isinstance(part, (list, tuple, set, dict)) and len(part) <= LONGEST_SWITCHES:
        for one in [*part, *(part.values() if isinstance(part, dict) else ())]:
            yield from _numbers_of(one, depth - 1)
    elif depth == 3 and hasattr(part, "__dict__"):
        for one in vars(part).values():
            yield from _numbers_of(one, depth - 1)
