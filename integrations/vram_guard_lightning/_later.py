"""Steps of a Trainer's run that are followed: how its loops are led to them, and what decides about their memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vram_guard.guard.followed_steps import FollowedSteps, StepPlace
from vram_guard.guard.step_state import LoaderBatches
from vram_guard.language import _
from vram_guard_lightning import _namespaces
from vram_guard_lightning._followed import modules_in
from vram_guard_lightning._sample import loaders_in, read

if TYPE_CHECKING:
    from vram_guard.capture.loader import Sample
    from vram_guard_lightning._followed import FollowedTrainer

# ruff: noqa: SLF001 - every private name of Lightning used here is listed in private_api.py


class TrainerSteps(FollowedSteps):
    """The steps of one trace.

    Args:
        followed: the Trainer, with states of a checkpoint where it resumes from one.
        epochs: of the training; infinite where nothing says.
        steps: optimizer steps of each, as ``trainer.global_step`` counts them.
        sample: of the first one's loader.
    """

    names = ("current_epoch", "global_step")
    of_epochs = ("on_train_epoch_end", "on_train_epoch_start")
    of_steps = ("on_train_batch_start", "on_train_batch_end")
    same_loss = ("callbacks",)

    def __init__(self, followed: FollowedTrainer, epochs: float, steps: int, sample: Sample) -> None:
        self._followed = followed
        self._trainer: Any = followed.trainer
        fit = self._trainer.fit_loop
        batches = LoaderBatches(
            followed.run,
            sample,
            lambda: [] if fit._combined_loader is None else loaders_in(fit._combined_loader),
            lambda: read(fit._combined_loader),
        )
        own = vars(_namespaces.of(self._trainer).LightningModule())
        super().__init__(followed.run, followed.module, batches, epochs, steps, set_by_framework=own)

    def epoch_begins(self) -> Iterator[str]:
        """The label of each step of this epoch that is followed, asked for when the one before it is over."""
        for place in self.of_epoch(self._trainer.current_epoch, self._trainer.global_step):
            around = self.later and self.overriding(self.of_steps)
            if self.later:
                self._count_steps(place.step)
            if around and not self._followed.begins_step(self.batches.batch()):
                continue
            if self.follows():
                yield self.label
            elif around:
                self._count_steps(place.step + 1)
                self._followed.ends_step(self.batches.batch())

    def epoch_ends(self) -> None:
        """All that is followed of the epoch's steps is over; counters go to its end."""
        epoch: int = self._trainer.current_epoch
        self.next_epoch(epoch)
        self._count_steps((epoch + 1) * self._steps)

    def _count_steps(self, step: int) -> None:
        """As many optimizer steps have been taken."""
        loop = self._trainer.fit_loop.epoch_loop
        if self._followed.module.automatic_optimization:
            loop.automatic_optimization.optim_progress.optimizer.step.total.completed = step
        else:
            loop.manual_optimization.optim_step_progress.total.completed = step

    def in_words(self, place: StepPlace) -> str:
        """As phases are labelled by it."""
        begins = place.step == place.epoch * self._steps
        return _("epoch {epoch}", epoch=place.epoch) if begins else _("global_step {step}", step=place.step)

    def optimizers(self) -> list[Any]:
        """The Trainer's."""
        return list(self._trainer.optimizers)

    def overriding(self, names: tuple[str, ...]) -> list[Any]:
        """Of callbacks and the module; of steps, only the user's own."""
        followed = self._followed
        found = [one for one in (*self._trainer.callbacks, followed.module) if followed.overrides(one, names)]
        if names != self.of_steps:
            return found
        return [one for one in found if not all(_namespaces.is_lightnings(one, name) for name in names)]

    def besides(self) -> dict[str, Any]:
        """What callbacks keep on the GPU."""
        copies = [
            one
            for part in modules_in(self._trainer.callbacks, besides=self._followed.module)
            for one in (*part.parameters(recurse=False), *part.buffers(recurse=False))
        ]
        return {"callbacks": sum(one.nbytes for one in copies if one.is_cuda)}

    def hooks_run(self) -> bool:
        """Or loaders are made anew."""
        return bool(self._trainer.reload_dataloaders_every_n_epochs) or super().hooks_run()
