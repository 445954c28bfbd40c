"""Measured memory beside the prediction, in a Trainer; and what earlier runs of the same training have measured."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vram_guard.watch.corrections import Corrections, Subject, subject
from vram_guard.watch.measured import STEPS, Measured, Watcher
from vram_guard.watch.memory import MemoryReader, reader_for
from vram_guard_lightning import ranks

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from vram_guard.plan import Plan


def reader_of(trainer: Trainer) -> MemoryReader | None:
    """The memory of the device that trains; None where PyTorch counts none. The tests' one seam."""
    return reader_for(trainer.strategy.root_device)


def correction_for(trainer: Trainer, module: LightningModule) -> float:
    """What predicted peaks are to be multiplied with; 1 where nothing is known. The model is as the user made it."""
    reader = reader_of(trainer)
    return 1.0 if reader is None else Corrections().factor(_subject(trainer, module, reader))


def _subject(trainer: Trainer, module: LightningModule, reader: MemoryReader) -> Subject:
    """The precision as written counts: that of the plan is not known when corrections are looked up."""
    return subject(module, str(trainer.precision), reader.name())


@dataclass
class Watch:
    """One training's measurement."""

    plan: Plan
    about: Subject
    watcher: Watcher
    remember: bool
    done: bool = False
    recovered: bool = field(default=False)
    """Memory ran out: what is measured from now on is another plan's."""

    @classmethod
    def begin(cls, trainer: Trainer, module: LightningModule, plan: Plan, *, remember: bool) -> Watch | None:
        """Before the model is moved; None where nothing can be measured."""
        reader = reader_of(trainer)
        if reader is None:
            return None
        return cls(plan, _subject(trainer, module, reader), Watcher(reader, plan.estimate), remember)

    def start(self) -> None:
        """Training begins."""
        self.watcher.start()

    def ran_out(self) -> None:
        """Memory ran out on this rank. A peak of live tensors above the prediction is worth remembering."""
        found = self.watcher.measure()
        self.recovered = True
        if self.remember and found is not None and found.allocated is not None:
            ratio = found.allocated / max(1, found.predicted_allocated)
            if ratio > 1:
                Corrections().remember(self.about, ratio)

    def after_batch(self, trainer: Trainer) -> Measured | None:
        """Once, after the first optimizer steps, on all ranks alike: the worst rank's measurement."""
        if self.done or trainer.global_step < STEPS:
            return None
        self.done = True
        own = None if self.recovered else self.watcher.measure()
        found: list[Any] = [one for one in ranks.gather(trainer, own) if one is not None and one.ratio is not None]
        if not found or self.recovered:
            return None
        worst: Measured = max(found, key=lambda one: one.ratio)
        if self.remember and trainer.is_global_zero and worst.ratio is not None:
            Corrections().remember(self.about, worst.ratio)
        return worst
