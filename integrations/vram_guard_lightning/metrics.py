"""Measured memory beside the prediction, in a Trainer; and what earlier runs of the same training have measured."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING

from vram_guard.watch.first_steps import FirstSteps, correction
from vram_guard.watch.measured import STEPS, Measured
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
    return correction(reader_of(trainer), module, str(trainer.precision))


def begin(trainer: Trainer, module: LightningModule, plan: Plan, *, remember: bool) -> FirstSteps | None:
    """Before the model is moved; None where nothing can be measured."""
    return FirstSteps.begin(reader_of(trainer), module, str(trainer.precision), plan.estimate, remember=remember)


def after_batch(steps: FirstSteps, trainer: Trainer) -> Measured | None:
    """Once, after the first optimizer steps, on all ranks alike: the worst rank's measurement."""
    if steps.done or trainer.global_step < STEPS:
        return None
    return steps.finish(partial(ranks.gather, trainer), first_rank=trainer.is_global_zero)


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
