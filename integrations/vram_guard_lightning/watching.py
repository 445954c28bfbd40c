"""Measured memory beside the prediction, in a Trainer; and what earlier runs of the same training have measured."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from vram_guard.watch.corrections import Corrections, Subject, subject
from vram_guard.watch.measured import STEPS, Measured, Watcher
from vram_guard.watch.memory import MemoryReader, reader_for
from vram_guard.watch.monitor import BackgroundMonitor, device_sampler
from vram_guard_lightning import ranks

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from vram_guard.budget.sampling import Sampler
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


# --- utilisation while training ---------------------------------------------------------------------------------------


def sampler_of(trainer: Trainer) -> Callable[[], AbstractContextManager[Sampler]]:
    """What tells the utilisation of the device that trains. The tests' one seam."""
    return partial(device_sampler, trainer.strategy.root_device)


class Utilization:
    """Utilisation and memory of rank 0's GPU during one training, from a thread of its own."""

    def __init__(self, trainer: Trainer, interval: float) -> None:
        self._monitor = BackgroundMonitor(sampler_of(trainer), interval)
        self._monitor.start()

    def log(self, trainer: Trainer) -> None:
        """The last moment, as often as the Trainer logs."""
        if trainer.global_step % trainer.log_every_n_steps:  # type: ignore[attr-defined]
            return
        for sample in self._monitor.latest():
            values: dict[str, float | None] = {
                "vram_guard/gpu_utilization": sample.utilization,
                "vram_guard/gpu_memory_used_bytes": float(sample.used),
            }
            metrics = {name: value for name, value in values.items() if value is not None}
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=trainer.global_step)

    def finish(self, trainer: Trainer) -> list[str]:
        """Stop, log means and peaks; lines for the user. A second call finds nothing new to say."""
        found = self._monitor.stop()
        for one in found:
            metrics = {f"vram_guard/{name}": value for name, value in one.metrics().items()}
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=trainer.global_step)
        lines = [f"GPU {one.gpu} {one.name}: {one.words()}" for one in found]
        return lines if self._monitor.error is None else [*lines, str(self._monitor.error)]
