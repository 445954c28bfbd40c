"""Watching the GPUs of this machine: utilisation and memory, moment by moment, and what they come to."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from vram_guard.budget.nvml import NvmlUnavailableError
from vram_guard.budget.sampling import GpuProcess, GpuSample, nvml_sampler
from vram_guard.errors import NoDeviceError
from vram_guard.language import _

#: Seconds between two samples: as often as drivers bring their figures up to date.
INTERVAL = 1.0


@dataclass
class GpuSummary:
    """One GPU over the whole time, in sums and peaks; utilisation from 0 to 1, None where it is unavailable."""

    gpu: str
    name: str
    total: int
    """Bytes of its memory."""
    samples: int = 0
    used_peak: int = 0
    utilization_peak: float | None = None
    processes: dict[int, GpuProcess] = field(default_factory=dict)
    """By number, with the most bytes that each has held."""
    _used: int = 0
    _busy: float = 0.0
    _told: int = 0
    """Samples with a utilisation."""

    @property
    def used_mean(self) -> int:
        """Bytes in use."""
        return round(self._used / self.samples)

    @property
    def utilization_mean(self) -> float | None:
        """Over the samples that have one."""
        return self._busy / self._told if self._told else None

    def add(self, sample: GpuSample) -> None:
        """One moment."""
        self.samples += 1
        self._used += sample.used
        self.used_peak = max(self.used_peak, sample.used)
        if sample.utilization is not None:
            self._told += 1
            self._busy += sample.utilization
            self.utilization_peak = max(self.utilization_peak or 0.0, sample.utilization)
        for process in sample.processes:
            known = self.processes.get(process.pid)
            if known is None or (process.bytes or 0) > (known.bytes or 0):
                self.processes[process.pid] = process


def watch(
    *, seconds: float | None, tell: Callable[[float, tuple[GpuSample, ...]], None], stop: threading.Event
) -> None:
    """Look at every GPU each second until ``seconds`` are over or ``stop`` is set; at least once.

    Args:
        seconds: how long; None: until ``stop``. A slow look delays the next one, none is made up for.
        tell: called with the seconds since the start and the moment.
        stop: ends it early.

    Raises:
        NoDeviceError: NVML has no GPU to watch.
        DeviceQueryError: the driver does not answer, now or later.
    """
    start = time.monotonic()
    try:
        with nvml_sampler() as sampler:
            while not stop.is_set():
                began = time.monotonic()
                tell(began - start, sampler())
                is_last = seconds is not None and began + INTERVAL - start > seconds
                until = start + seconds if is_last and seconds is not None else began + INTERVAL
                stop.wait(max(0.0, until - time.monotonic()))
                if is_last:
                    return
    except NvmlUnavailableError as error:
        raise NoDeviceError(_("utilisation cannot be watched: {why}", why=error)) from None
