"""Steps of a runner's training that are followed: how its loop is led to them, and what decides about their memory.

MMEngine's loop asks for its batches here, so it is led from place to place. Its hooks run at each; ``train_step`` runs
where the step is followed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from mmengine.hooks import Hook

from vram_guard.capture.loader import Sample, read_loader
from vram_guard.errors import UnsupportedStepError
from vram_guard.guard.followed_steps import FollowedSteps, StepPlace
from vram_guard.guard.step_state import LoaderBatches
from vram_guard.guard.step_switches import overriding
from vram_guard.guard.unfollowed import forget_frames, in_a_line
from vram_guard.language import Message, _
from vram_guard.limits import BATCHES_WITHOUT_A_STEP
from vram_guard.patching import replaced
from vram_guard_mmengine._evaluation import is_endless
from vram_guard_mmengine._followed import OF_EPOCHS, FollowedRunner, is_users

# ruff: noqa: SLF001 - loops and optimizer wrappers have no public names for where they are

#: Of a step: its batches are delivered; it does not differ, or cannot be followed; weights are updated; hooks are over.
_State = Literal["asked", "left out", "begun", "updated", "over"]


class OverError(Exception):
    """All that is followed of a training has run."""


class RunnerSteps(FollowedSteps):
    """The steps of one trace.

    Args:
        followed: the runner, whose training loop and optimizer wrapper are built, where its training begins.
        sample: of the training's loader.
        batches: of an epoch; None where the training is not counted in epochs.
        step: what ``train_step`` is called with -> what it returns, traced.
        first_ends: called when the first epoch's steps are over; the first steps, where epochs do not count.
    """

    names = ("epoch", "iter")
    of_epochs = OF_EPOCHS
    of_steps = ("before_train_iter", "after_train_iter")
    same_loss = ("accumulative_counts",)

    def __init__(
        self,
        followed: FollowedRunner,
        sample: Sample,
        batches: int | None,
        step: Callable[..., Any],
        first_ends: Callable[[], None],
    ) -> None:
        self._followed, self._runner, self._loop = followed, followed.runner, followed.runner._train_loop
        self._step, self._first_ends = step, first_ends
        self._state: _State = "over"
        """Of the step whose batches are delivered."""
        self._idle = 0
        """Places in a row at which no step has ended."""
        self._outputs: list[str] = []
        """Names of what a training step returns."""
        self._users = [hook for hook in followed.hooks if is_users(hook)]
        super().__init__(
            followed.run,
            self._runner.model,
            LoaderBatches(followed.run, sample, lambda: [self._loop.dataloader], self._read),
            1 if batches is None else self._loop._max_epochs,
            self._loop._max_iters if batches is None else batches,
            set_by_framework=("_device",),
            by_epoch=batches is not None,
            interrupted=True,
        )
        followed.after_batch, followed.epoch_ends = self._batch_ends, first_ends

    # --- what decides about a step ----------------------------------------------------------------------------

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Within the runner's wrapper."""
        optimizer = getattr(self._runner.optim_wrapper, "optimizer", None)
        return [] if optimizer is None else [optimizer]

    def overriding(self, names: tuple[str, ...]) -> list[Any]:
        """The user's hooks."""
        return overriding(self._users, names, Hook)

    def besides(self) -> dict[str, Any]:
        """How many batches a step has."""
        return {"accumulative_counts": getattr(self._runner.optim_wrapper, "_accumulative_counts", 1)}

    def _read(self) -> Sample:
        return read_loader(self._loop.dataloader, endless=is_endless(self._loop.dataloader))

    def in_words(self, place: StepPlace) -> str:
        """As MMEngine counts for people."""
        if self._by_epoch and place.step % self._steps == 0:
            return _("epoch {number}", number=place.epoch + 1)
        return _("iteration {number}", number=place.step + 1)

    def _noted(self, get_info: Callable[..., Any]) -> Callable[..., Any]:
        """In place of ``MessageHub.get_info``: a model that asks it may run other steps later."""

        def answered(key: str, *default: Any, **named: Any) -> Any:
            value = get_info(key, *default, **named)
            return self.asked.answer(key, value) if key in ("epoch", "iter") and type(value) is int else value

        return answered

    # --- what the loop calls ----------------------------------------------------------------------------------

    def deliver(self) -> Iterator[Any]:
        """The batches of one epoch; of the whole training where it is not counted in epochs.

        Raises:
            OverError: nothing is left to follow.
        """
        if self.over:
            raise OverError
        loop = self._loop
        if not self._by_epoch:  # MMEngine passes over the batches of those that a checkpoint has behind it
            yield from (None for _place in range(loop._iter))
        epoch = loop._epoch if self._by_epoch else 0
        for place in self.of_epoch(epoch, loop._iter):
            yield from self._one_step(place.step)
            self._idle = 0 if self._state == "over" or self.later else self._idle + 1
            if self._idle == BATCHES_WITHOUT_A_STEP:
                raise UnsupportedStepError(self._why_none_ends())
        following = self.next_epoch(epoch)
        if not self._by_epoch:
            raise OverError
        if following is not None:  # MMEngine counts the epoch when the hooks after this one have run
            loop._epoch, loop._iter = following - 1, following * self._steps

    def _one_step(self, place: int) -> Iterator[Any]:
        """The batches of an optimizer step: all between the first and the last would be like these."""
        wrapper, loop = self._runner.optim_wrapper, self._loop
        self._state = "asked"
        for number in range(3):  # the hooks before the first batch may have it accumulate more
            counts = wrapper._accumulative_counts
            wrapper._inner_count = counts - 1 if number >= min(counts, 2) - 1 else 0
            loop._iter = min(place + number, loop._max_iters - 1)
            self._runner.message_hub.update_info_dict({"epoch": loop._epoch, "iter": loop._iter})
            yield self.batches.batch()
            if not self._goes_on():
                return

    def _goes_on(self) -> bool:
        """More batches belong to the step."""
        return self._state == "begun"

    def _why_none_ends(self) -> str:
        """The reason for which batches end no step."""
        loop, wrapper = type(self._loop).__name__, type(self._runner.optim_wrapper).__name__
        if self._state == "begun":
            return _("should_update of {kind} lets none of the first batches update the weights", kind=wrapper)
        if self._state == "updated":
            return _("{kind} does not call the hooks after an iteration, as MMEngine's own loops do", kind=loop)
        return _("{kind} does not call train_step of the runner's model, as MMEngine's own loops do", kind=loop)

    def train_step(self, data: Any, optim_wrapper: Any) -> Any:
        """In place of the model's."""
        if self._state == "asked":
            self._state = "begun" if self.follows() else "left out"
        if self._state == "left out":
            return self._unknown()
        self._state = "begun"
        self.batches.used()
        self._run.batch_begins(self.label)
        hub = self._runner.message_hub
        with replaced(hub, {"get_info": self._noted(hub.get_info)}):
            try:
                outputs = self._updated(data, optim_wrapper)
            except Exception as error:
                if not self.later:
                    raise
                return self._given_up(error)
        if optim_wrapper.should_update():
            self._state = "updated"
        self._outputs = list(outputs) if isinstance(outputs, dict) else []
        return outputs

    def _updated(self, data: Any, optim_wrapper: Any) -> Any:
        counted = optim_wrapper._inner_count
        with self.in_step():
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
                place=self.in_words(self._place),
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
            self.step_ends()
            self._followed.begun = self.first_over
            if not self._by_epoch and not self.later:
                self._first_ends()
