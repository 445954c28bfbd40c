"""Steps of a Trainer's run that are followed: the first two, and each later one that differs from those before it."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vram_guard.guard.places import StepDecisions
from vram_guard.language import Message, _
from vram_guard.limits import LATER_SECONDS, LATER_STEPS, PLACES_LOOKED_AT
from vram_guard.simulate.tracing.batches import tensors_of
from vram_guard.state.random_generators import random_state_kept
from vram_guard_lightning._followed import modules_in, within
from vram_guard_lightning._sample import loaders_in, read

if TYPE_CHECKING:
    import torch

    from vram_guard.capture.loader import Sample
    from vram_guard_lightning._followed import FollowedTrainer

# ruff: noqa: SLF001 - every private name of Lightning used here is listed in private_api.py

_HOOKS = ("on_train_epoch_end", "on_train_epoch_start")


@dataclass(frozen=True)
class Epochs:
    """The epochs of a training, as they are known before it begins.

    Attributes:
        total: how many there are; infinite where nothing says.
        steps: optimizer steps of each, as ``trainer.global_step`` counts them.
        sample: of the first one's loader.
    """

    total: float
    steps: int
    sample: Sample


class FollowedSteps:
    """The steps of one trace.

    Args:
        followed: the Trainer, with states of a checkpoint where it resumes from one.
        epochs: of the training.

    Attributes:
        asked: what steps have decided by the place in the training.
        interrupted: something else has run since the last step: another one, as it was, meets what that left.
        over: no later epoch is followed.
        unsettled: another step is needed, see :meth:`vram_guard.job.LoopRun.step_ends`.
    """

    def __init__(self, followed: FollowedTrainer, epochs: Epochs) -> None:
        self._followed = followed
        self._run = followed.run
        self._trainer = followed.trainer
        self._epochs = epochs
        self.asked = StepDecisions()
        self.interrupted = False
        self.over = False
        self.unsettled = False
        self._first = -1
        """The epoch that the training begins with; -1: it has not begun."""
        self._samples: dict[Any, Sample] = {}
        self._loaders: list[Any] = []
        """Kept, since their identities are keys."""
        self._as_written: tuple[Any, ...] = ()
        self._known: tuple[Any, ...] = ()
        """The signature of the latest epoch."""
        self._seen: set[tuple[Any, int]] = set()
        """Signatures of the steps that were followed, and how many weights had states of an optimizer then."""
        self._count = 0
        """Later steps that were followed."""
        self._left_over = ""
        """Label of a later step for which there was no room any more."""
        self._last = False
        """No epoch after this one is followed."""
        self._seconds = 0.0
        """Of the processor, for the steps of the first epoch."""
        self._deadline = math.inf
        self._hooks = False

    # --- epochs -----------------------------------------------------------------------------------------------

    def epoch_begins(self) -> Iterator[tuple[int, str]]:
        """The steps of this epoch that are followed, each asked for when the one before it is over."""
        epoch: int = self._trainer.current_epoch
        if self._first == -1:
            self._first = epoch
        return self._first_steps() if epoch == self._first else self._later_steps(epoch)

    def epoch_ends(self) -> None:
        """All that is followed of the epoch's steps is over; counters go to its end."""
        epoch: int = self._trainer.current_epoch
        if epoch == self._first:
            self._first_epoch_ends()
        else:
            self.over = self._last or epoch + 1 >= self._epochs.total
            if self.over and epoch + 1 < self._epochs.total and (self._hooks or self.asked):
                self._say_reached(epoch)
        self._count_steps((epoch + 1) * self._epochs.steps)

    def _first_steps(self) -> Iterator[tuple[int, str]]:
        begun, start = time.process_time(), self._trainer.global_step
        self._known = self._signature(self._first)
        yield from ((start + number, "") for number in range(2))
        while self.unsettled:
            yield start + 2, ""
        self._seconds = time.process_time() - begun
        self.asked.followed({"current_epoch": self._first, "global_step": start})
        self._see()
        for step in self._differing(self._first, start):
            yield from self._differently(self._first, step, _("global_step {step}", step=step))

    def _first_epoch_ends(self) -> None:
        self._hooks = bool(self._trainer.reload_dataloaders_every_n_epochs) or any(map(self._followed.has, _HOOKS))
        self._deadline = time.process_time() + max(self._seconds, LATER_SECONDS)
        self.over = self._first + 1 >= self._epochs.total
        if not (self._hooks or self.asked or self.interrupted):
            self.over = True

    def _later_steps(self, epoch: int) -> Iterator[tuple[int, str]]:
        began, before, start = time.process_time(), self._count, epoch * self._epochs.steps
        self._last = not (self._hooks or self.asked) or self._stops(epoch)
        label = _("epoch {epoch}", epoch=epoch)
        differs = self._takes_over(self._signature(epoch) if self._hooks else self._known)
        differs |= self.asked.undecided and epoch + 1 >= self._epochs.total
        for step in itertools.chain([start] * differs, self._differing(epoch, start)):
            if self._count >= LATER_STEPS:
                self._left_over = label
                break
            yield from self._differently(epoch, step, label)
        if self._last and self._left_over:
            yield from self._differently(epoch, start, self._left_over)
        if epoch == self._first + 1 and self.interrupted and self._count == before:
            yield start, ""
        self._deadline += time.process_time() - began

    def _stops(self, epoch: int) -> bool:
        return epoch - self._first >= PLACES_LOOKED_AT or time.process_time() > self._deadline

    def _say_reached(self, epoch: int) -> None:
        total = self._epochs.total
        said = Message(
            "hooks were followed up to epoch {epoch} ({total} epochs): what later ones change is not included",
            epoch=epoch,
            total=_("an unlimited number of") if math.isinf(total) else str(int(total)),
        )
        self._run.note(said)

    # --- steps ------------------------------------------------------------------------------------------------

    def _differing(self, epoch: int, start: int) -> Iterator[int]:
        """Steps of an epoch that decide otherwise than all that have been followed when they are asked for."""
        asked = self.asked
        for step in asked.steps("global_step", start, start + self._epochs.steps) if asked else ():
            if asked.differs({"current_epoch": epoch, "global_step": step}):
                yield step

    def _differently(self, epoch: int, step: int, label: str) -> Iterator[tuple[int, str]]:
        """A step that differs from those before it, and a second where it leaves more than it has met."""
        self._count += 1
        self.asked.followed({"current_epoch": epoch, "global_step": step})
        self._count_steps(step)
        self._see()
        met = self._run.allocated
        yield step, label
        if self._run.allocated > met:
            yield step, label
        self._see()

    def _count_steps(self, step: int) -> None:
        """As many optimizer steps have been taken."""
        loop = self._trainer.fit_loop.epoch_loop
        if self._followed.module.automatic_optimization:
            loop.automatic_optimization.optim_progress.optimizer.step.total.completed = step
        else:
            loop.manual_optimization.optim_step_progress.total.completed = step

    def batch(self, epoch: int) -> Any:
        """The next batch of a loader in this epoch; where a plan cuts batches, micro-batches keep their size."""
        sample, first = self._sample(epoch), self._epochs.sample
        return sample.make(math.ceil(self._run.loaded_samples * sample.batch_size / first.batch_size))

    # --- what a step depends on -------------------------------------------------------------------------------

    def _see(self) -> None:
        self._seen.add((self._known, self._states()))

    def _states(self) -> int:
        """Weights that have been trained."""
        return sum(len(getattr(one, "state", ())) for one in self._trainer.optimizers)

    def _takes_over(self, now: tuple[Any, ...]) -> bool:
        """Note what hooks have left; True if no step that was followed was like that."""
        before, self._known = self._known, now
        if [one[2] for one in now[0]] != [one[2] for one in before[0]]:
            self._run.changes_later("trained")
        if now[2] != before[2]:
            self._run.changes_later("optimized")
        # The same step may meet more than it did: the states of what others have trained since.
        return now != before and (now, self._states()) not in self._seen

    def _signature(self, epoch: int) -> tuple[Any, ...]:
        """What the memory of a step depends on, as far as hooks change it; the shapes of its batches come last."""
        module = self._followed.module
        parts = list(within(module))
        return (
            tuple(
                (id(part), name, one.requires_grad, one.shape)
                for part in parts
                for name, one in vars(part)["_parameters"].items()
                if one is not None
            ),
            tuple((id(part), part.training) for part in parts),
            tuple(_groups(optimizer) for optimizer in self._trainer.optimizers),
            sum(one.nbytes for part in modules_in(self._trainer.callbacks, besides=module) for one in _on_gpu(part)),
            self._shapes_of(self._sample(epoch)),
        )

    def _shapes_of(self, sample: Sample) -> tuple[Any, ...]:
        if sample is self._epochs.sample and not self._samples:
            return ()  # nothing has been read anew
        return tuple(tuple(one.shape) for one in tensors_of(sample.make(sample.batch_size)))

    def _sample(self, epoch: int) -> Sample:
        """Batches of the train loader as it is now: hooks may have switched it, or the Trainer made another one."""
        loaders = self._trainer.fit_loop._combined_loader
        if all(loaders is not one for one in self._loaders):
            self._loaders.append(loaders)
        now = (id(loaders), *_switches(_switched(loaders)))
        if epoch == self._first:
            self._as_written = self._as_written or now
        if now == self._as_written:
            return self._epochs.sample
        if now not in self._samples:
            with random_state_kept():
                self._samples[now] = read(loaders)
        return self._samples[now]


#: Attributes by which data sets hold what makes their samples.
_PARTS = ("dataset", "transform", "transforms", "pipeline")


def _switched(loaders: Any) -> list[Any]:
    """What hooks may switch a loader by: its data sets, their transforms and pipelines, and its batch samplers."""
    found: list[Any] = []
    for loader in loaders_in(loaders):
        pending = [getattr(loader, "dataset", None), getattr(loader, "batch_sampler", None)]
        while pending:
            one = pending.pop()
            if hasattr(one, "__dict__") and all(one is not other for other in found):
                found.append(one)
                pending += [vars(one).get(name) for name in _PARTS]
    return found


def _switches(parts: list[Any]) -> tuple[Any, ...]:
    """The attributes of these objects: numbers, names and sizes by value, others by identity."""
    return tuple(
        (name, value if isinstance(value, (int, float, str, tuple)) and _hashes(value) else id(value))
        for part in parts
        for name, value in vars(part).items()
    )


def _hashes(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _groups(optimizer: torch.optim.Optimizer) -> tuple[Any, ...]:
    """The weights that an optimizer changes, and its switches."""
    return tuple(
        (tuple(map(id, group["params"])), tuple(value for value in group.values() if isinstance(value, bool)))
        for group in optimizer.param_groups
    )


def _on_gpu(module: torch.nn.Module) -> list[torch.Tensor]:
    """A callback's own weights that have been moved to the simulated GPU."""
    own = (one for kind in ("_parameters", "_buffers") for one in vars(module)[kind].values())
    return [one for one in own if one is not None and one.is_cuda]
