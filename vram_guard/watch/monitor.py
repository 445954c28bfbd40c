"""Watching the GPUs of this machine: utilisation and memory, moment by moment, and what they come to."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from vram_guard.budget.nvml import NvmlUnavailableError
from vram_guard.budget.sampling import GpuSample, nvml_sampler
from vram_guard.errors import NoDeviceError
from vram_guard.language import _

#: Seconds between two samples: as often as drivers bring their figures up to date.
INTERVAL = 1.0


@dataclass(frozen=True)
class ProcessSummary:
    """One process over the whole time."""

    pid: int
    name: str
    memory_peak_bytes: int | None
    """None where the driver does not report it."""


@dataclass(frozen=True)
class GpuSummary:
    """One GPU over the whole time; utilisation from 0 to 1, None where it is unavailable."""

    gpu: str
    name: str
    samples: int
    utilization_mean: float | None
    utilization_peak: float | None
    memory_total_bytes: int
    memory_mean_bytes: int
    memory_peak_bytes: int
    processes: tuple[ProcessSummary, ...]


@dataclass
class _Watched:
    """One GPU: sums and peaks, which take little memory however long it is watched."""

    name: str
    total: int
    samples: int = 0
    used: int = 0
    used_peak: int = 0
    shares: int = 0
    """Samples with a utilisation."""
    share: float = 0.0
    share_peak: float | None = None
    processes: dict[int, ProcessSummary] = field(default_factory=dict)

    def add(self, sample: GpuSample) -> None:
        self.samples += 1
        self.used += sample.used
        self.used_peak = max(self.used_peak, sample.used)
        if sample.utilization is not None:
            self.shares += 1
            self.share += sample.utilization
            self.share_peak = max(self.share_peak or 0.0, sample.utilization)
        for process in sample.processes:
            known = self.processes.get(process.pid)
            if known is None or (process.bytes or 0) > (known.memory_peak_bytes or 0):
                self.processes[process.pid] = ProcessSummary(process.pid, process.name, process.bytes)


class Monitor:
    """Adds up moments."""

    def __init__(self) -> None:
        self._gpus: dict[str, _Watched] = {}
        self.count = 0

    def add(self, moment: tuple[GpuSample, ...]) -> None:
        """One moment of all GPUs."""
        self.count += 1
        for sample in moment:
            self._gpus.setdefault(sample.gpu, _Watched(sample.name, sample.total)).add(sample)

    def summary(self) -> tuple[GpuSummary, ...]:
        """Summary of each GPU, in the order in which they were first seen."""
        return tuple(
            GpuSummary(
                gpu=gpu,
                name=one.name,
                samples=one.samples,
                utilization_mean=one.share / one.shares if one.shares else None,
                utilization_peak=one.share_peak,
                memory_total_bytes=one.total,
                memory_mean_bytes=round(one.used / one.samples),
                memory_peak_bytes=one.used_peak,
                processes=tuple(
                    sorted(one.processes.values(), key=lambda found: (-(found.memory_peak_bytes or 0), found.pid))
                ),
            )
            for gpu, one in self._gpus.items()
        )


def watch(
    monitor: Monitor,
    *,
    seconds: float | None,
    tell: Callable[[float, tuple[GpuSample, ...]], None],
    stop: threading.Event,
) -> None:
    """Look at every GPU each second until ``seconds`` are over or ``stop`` is set; at least once.

    Args:
        monitor: adds the moments up.
        seconds: how long; None: until ``stop``. A slow look delays the next one, none is made up for.
        tell: called with the seconds since the start and the moment.
        stop: ends it early.

    Raises:
        NoDeviceError: NVML has no GPU to watch.
        DeviceQueryError: the driver does not answer, now or later; what was added until then stays.
    """
    start = time.monotonic()
    try:
        with nvml_sampler() as sampler:
            while not stop.is_set():
                began = time.monotonic()
                moment = sampler()
                monitor.add(moment)
                tell(began - start, moment)
                is_last = seconds is not None and began + INTERVAL - start > seconds
                until = start + seconds if is_last and seconds is not None else began + INTERVAL
                stop.wait(max(0.0, until - time.monotonic()))
                if is_last:
                    return
    except NvmlUnavailableError as error:
        raise NoDeviceError(_("utilisation cannot be watched: {why}", why=error)) from None
