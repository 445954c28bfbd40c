"""Steps of a runner's training that are followed: the first two, and each later one that differs from those before it.

MMEngine's loop asks for its batches here, so it is led from place to place. Its hooks run at each; ``train_step`` runs
where something that decides about its memory is as it was at no place before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from mmengine.hooks import Hook

from vram_guard.errors import UnsupportedStepError
from vram_guard.guard.places import StepDecisions
from vram_guard.guard.unfollowed import forget_frames, in_a_line
from vram_guard.language import Message, _
from vram_guard.limits import BATCHES_WITHOUT_A_STEP, LATER_SECONDS, LATER_STEPS, LONGEST_SWITCHES, PLACES_LOOKED_AT
from vram_guard.patching import replaced
from vram_guard_mmengine._followed import OF_EPOCHS, FollowedRunner, is_users
from vram_guard_mmengine._step_switches import StepSwitches

# ruff: noqa: SLF001 - loops and optimizer wrappers have no public names for where they are

_OF_ITERATIONS = ("before_train_iter", "after_train_iter")


#: Of a step: its batches are delivered; it does not differ, or cannot be followed; weights are updated; hooks are over.
_State = Literal["asked", "left out", "begun", "updated", "over"]


class OverError(Exception):
    """All that is followed of a training has run."""


class FollowedIterations:
    """The steps of one trace.

    Args:
        followed: the runner, whose training loop and optimizer wrapper are built, where its training begins.
        switches: what decides about the memory of a step.
        batches: of an epoch; None where the training is not counted in epochs.
        step: what ``train_step`` is called with -> what it returns, traced.
        first_ends: called when the first epoch's steps are over; the first steps, where epochs do not count.

    Attributes:
        over: no later epoch is followed.
    """

    def __init__(
        self,
        followed: FollowedRunner,
        switches: StepSwitches,
        batches: int | None,
        step: Callable[..., Any],
        first_ends: Callable[[], None],
    ) -> None:
        self._followed = followed
        self._run, self._runner, self._loop = followed.run, followed.runner, followed.runner._train_loop
        self._hooks, self._switches, self._batches = followed.hooks, switches, batches
        self._step, self._first_ends = step, first_ends
        self._asked = StepDecisions()
        self._state: _State = "over"
        """Of the step whose batches are delivered."""
        self._label = ""
        self._follows: Callable[[], bool] = lambda: True
        """Asked when the hooks before a step's first batch have run."""
        self._taken = 0
        self._unsettled = False
        self.over = False
        self._places: list[int] = []
        """Iterations at which hooks may change the step, from the last to the next one."""
        self._plain = -1
        """The place whose step is followed though nothing differs: it meets what has run since the first ones."""
        self._found = self._left_out = self._looked = 0
        self._deadline = 0.0
        self._met = 0
        """Bytes that were taken before the hooks of a place."""
        self._before = 0
        """Bytes that were taken before the latest step."""
        self._outputs: list[str] = []
        """Names of what a training step returns."""
        followed.after_batch = self._batch_ends

    @property
    def first_over(self) -> bool:
        """The first steps are over."""
        return self._taken >= 2 and not self._unsettled

    def elsewhere(self) -> None:
        """Something else has run, such as a validation: what it has left was taken by no hook."""
        self._met = self._run.allocated

    # --- what the loop calls ----------------------------------------------------------------------------------

    def deliver(self) -> Iterator[Any]:
        """The batches of one epoch; of the whole training where it is not counted in epochs.

        Raises:
            OverError: nothing is left to follow.
        """
        if self.over:
            raise OverError
        first = not self._followed.begun  # the loop may have left its first epoch before they were over
        if first:
            yield from self._first_steps()
        if self._batches is None:
            yield from self._later_steps(self._loop._max_iters)
            raise OverError
        yield from self._later_steps((self._loop._epoch + 1) * self._batches)
        if first:
            self._first_ends()
        self._met = self._run.allocated
        self.over = not self._places
        if self._places:  # MMEngine counts the epoch when the hooks after this one have run
            self._loop._epoch = self._places[-1] // self._batches - 1
            self._loop._iter = (self._loop._epoch + 1) * self._batches

    def train_step(self, data: Any, optim_wrapper: Any) -> Any:
        """In place of the model's."""
        if self._state == "asked" and not self._follows():
            self._state = "left out"
        if self._state == "left out":
            return self._unknown()
        if self._state == "asked":
            self._before = self._run.allocated
        self._state = "begun"
        self._switches.used()
        self._run.batch_begins(self._label)
        hub = self._runner.message_hub
        with replaced(hub, {"get_info": self._noted(hub.get_info)}):
            try:
                outputs = self._updated(data, optim_wrapper)
            except Exception as error:
                if not self._looked:
                    raise
                return self._given_up(error)
        if optim_wrapper.should_update():
            self._state = "updated"
        self._outputs = list(outputs) if isinstance(outputs, dict) else []
        return outputs

    def _updated(self, data: Any, optim_wrapper: Any) -> Any:
        counted = optim_wrapper._inner_count
        outputs = self._step(data, optim_wrapper)
        if optim_wrapper._inner_count == counted:
            raise UnsupportedStepError(
                _("train_step did not call optim_wrapper.update_params: there is no loss to follow")
            )
        return outputs

    def _given_up(self, error: Exception) -> dict[str, Any]:
        self._run.note(
            Message(
                "the step from {place} on cannot be followed ({error}): it is not included in the prediction",
                place=self._name(self._loop._iter),
                error=in_a_line(error),
            )
        )
        forget_frames(error)
        self._state = "left out"
        return self._unknown()

    def _unknown(self) -> dict[str, torch.Tensor]:
        """What ``train_step`` returns where it is not followed."""
        return {name: torch.zeros(()) for name in self._outputs}

    def _batch_ends(self) -> None:
        """The hooks after an iteration have run."""
        if self._state == "updated":
            self._state = "over"
            self._taken += 1
            self._unsettled = self._run.step_ends() and not self._looked
            if self._batches is None and self.first_over and not self._looked:
                self._first_ends()

    def _noted(self, get_info: Callable[..., Any]) -> Callable[..., Any]:
        """In place of ``MessageHub.get_info``: a model that asks it may run other steps later."""

        def answered(key: str, *default: Any, **named: Any) -> Any:
            value = get_info(key, *default, **named)
            return self._asked.answer(key, value) if key in ("epoch", "iter") and type(value) is int else value

        return answered

    # --- steps ------------------------------------------------------------------------------------------------

    def _first_steps(self) -> Iterator[Any]:
        start = self._loop._iter
        if self._batches is None:  # MMEngine passes over the batches of those that a checkpoint has behind it
            yield from (None for _place in range(start))
        self._asked.followed(self._numbers(start))
        idle = 0
        while not self.first_over:
            taken = self._taken
            yield from self._one_step(start + taken, lambda: True)
            idle = 0 if self._taken > taken else idle + 1
            if idle == BATCHES_WITHOUT_A_STEP:
                raise UnsupportedStepError(
                    _(
                        "{kind} takes batches, and none of them ends a training step: it calls neither train_step nor "
                        "the hooks after an iteration as MMEngine's own loops do",
                        kind=type(self._loop).__name__,
                    )
                )
        self._switches.begin()
        self._followed.begun = True
        self._plain = start + 2 if self._batches is None else (start // self._batches + 1) * self._batches
        self._places = sorted(self._later_places(start + 1) | {self._plain}, reverse=True)
        self._places = [place for place in self._places if start < place < self._loop._max_iters]
        self._deadline = time.process_time() + LATER_SECONDS
        self._met = self._run.allocated

    def _one_step(self, place: int, follows: Callable[[], bool]) -> Iterator[Any]:
        """The batches of an optimizer step: all between the first and the last would be like these."""
        wrapper = self._runner.optim_wrapper
        self._state, self._label, self._follows = "asked", self._label if self._looked else "", follows
        for number in range(3):  # the hooks before the first batch may have it accumulate more
            counts = wrapper._accumulative_counts
            wrapper._inner_count = counts - 1 if number >= min(counts, 2) - 1 else 0
            self._loop._iter = min(place + number, self._loop._max_iters - 1)
            self._runner.message_hub.update_info_dict({"epoch": self._loop._epoch, "iter": self._loop._iter})
            yield self._switches.batch()
            if not self._goes_on():
                return

    def _goes_on(self) -> bool:
        """More batches belong to the step."""
        return self._state == "begun"

    def _later_steps(self, end: int) -> Iterator[Any]:
        """Places before an iteration, each followed where it differs."""
        while self._places and self._places[-1] < end:
            if self._looked >= PLACES_LOOKED_AT or time.process_time() > self._deadline:
                self._run.note(
                    Message(
                        "hooks are followed up to {place} only: what they change later is not included in the "
                        "prediction",
                        place=self._name(self._loop._iter),
                    )
                )
                self._places.clear()
                break
            place = self._places.pop()
            self._looked += 1
            began = time.process_time()
            yield from self._one_step(place, self._differs)
            if self._state == "over":
                if self._label and self._run.allocated > self._before:
                    yield from self._one_step(place, lambda: True)
                self._deadline += time.process_time() - began
            self._met = self._run.allocated
        if self._left_out and not self._places:
            self._run.note(Message("{count} more steps that differ are not followed", count=self._left_out))

    def _differs(self) -> bool:
        """True if a step here differs from those that were followed, or is followed without that."""
        place, last = self._loop._iter, not self._places
        what = self._switches.difference() or (_("a hook takes memory") if self._run.allocated > self._met else "")
        if not what and self._asked_at(place, last=last):
            what = _("the model asks how far the training is")
        self._label = self._name(place) if what else ""
        if not what:
            return bool(place == self._plain)
        if self._found >= LATER_STEPS and not last:
            self._left_out += 1
            return False
        self._found += 1
        self._run.note(Message("from {place} on the step differs: {what}", place=self._label, what=what))
        if self._switches.other_loss or self._asked:
            self._run.changes_later("loss")
        self._asked.followed(self._numbers(place))
        return True

    def _asked_at(self, place: int, *, last: bool) -> bool:
        """True where a model may do otherwise than before by how far the training is."""
        if self._asked and self._asked.differs(self._numbers(place)):
            return True
        counts = bool(self._switches.counters)  # attributes of the model do: it may name epochs (``initial_epoch = 4``)
        if last or not counts:
            return last and (counts or self._asked.undecided)
        named = {
            value
            for module in self._runner.model.modules()
            for name, value in vars(module).items()
            if type(value) is int and ("epoch" in name or "iter" in name)
        }
        return self._loop._epoch in named or place in named

    # --- places -----------------------------------------------------------------------------------------------

    def _later_places(self, first: int) -> set[int]:
        """Iterations at which hooks, or the model by what it has asked, may change the step."""
        users = [hook for hook in self._hooks if is_users(hook)]
        most, batches = self._loop._max_iters, self._batches
        places: set[int] = set()
        if batches and (_overriding(users, OF_EPOCHS) or self._asked):
            places |= set(range((first // batches) * batches, most, batches))
        elif self._asked:
            places.add(most - 1)
        if self._asked:
            places |= set(self._asked.steps("iter", first, most))
        for hook in _overriding(users, _OF_ITERATIONS):
            for number in _numbers_of(hook):
                places |= {number - 1, number, number + 1}
                if batches:
                    places |= {epoch * batches for epoch in (number - 1, number)}
        return places

    def _name(self, place: int) -> str:
        if self._batches and place % self._batches == 0:
            return _("epoch {number}", number=place // self._batches + 1)
        return _("iteration {number}", number=place + 1)

    def _numbers(self, place: int) -> dict[str, int]:
        return {"epoch": place // self._batches if self._batches else 0, "iter": place}


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
