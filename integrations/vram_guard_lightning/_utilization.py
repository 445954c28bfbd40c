"""Utilisation and memory of rank 0's GPU while a Trainer trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING

from vram_guard.watch.monitor import BackgroundMonitor, device_sampler

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from vram_guard.budget.sampling import Sampler


def sampler_of(trainer: Trainer) -> Callable[[], AbstractContextManager[Sampler]]:
    """The sampler of the device that trains. The tests' one seam."""
    return partial(device_sampler, trainer.strategy.root_device)


def log_metrics(trainer: Trainer, values: Mapping[str, float | None]) -> None:
    """Log what is known of these values, with the Trainer's own loggers, under the guard's name."""
    known = {f"vram_guard/{name}": float(value) for name, value in values.items() if value is not None}
    for logger in trainer.loggers:
        logger.log_metrics(known, step=trainer.global_step)


class Utilization:
    """The measurement of one training, from a thread of its own."""

    def __init__(self, trainer: Trainer, interval: float) -> None:
        self._monitor = BackgroundMonitor(sampler_of(trainer), interval)
        self._monitor.start()

    def log(self, trainer: Trainer) -> None:
        """The latest sample, as often as the Trainer logs."""
        if trainer.global_step % trainer.log_every_n_steps:  # type: ignore[attr-defined]
            return
        for sample in self._monitor.latest():
            log_metrics(trainer, {"gpu_utilization": sample.utilization, "gpu_memory_used_bytes": sample.used})

    def finish(self, trainer: Trainer) -> list[str]:
        """Stop, log means and peaks; lines for the user. A second call does nothing."""
        found = self._monitor.stop()
        for one in found:
            log_metrics(trainer, one.metrics())
        lines = [f"GPU {one.gpu} {one.name}: {one.words()}" for one in found]
        return lines if self._monitor.error is None else [*lines, str(self._monitor.error)]
