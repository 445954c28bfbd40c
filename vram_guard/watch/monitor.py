"""Watching GPUs over a stretch of time: utilisation and memory, moment by moment, and what they come to."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from math import isfinite
from typing import TYPE_CHECKING

from vram_guard.budget import torch_cuda
from vram_guard.budget.nvml import NvmlUnavailableError
from vram_guard.budget.sampling import GpuSample, Sampler, nvml_sampler
from vram_guard.errors import InvalidInputError, NoDeviceError, VramGuardError
from vram_guard.language import _
from vram_guard.units import format_bytes

if TYPE_CHECKING:
    import torch

#: Sampling interval in seconds unless the caller says otherwise: as often as drivers bring their figures up to date.
INTERVAL = 1.0
SHORTEST_INTERVAL = 0.05


@dataclass(frozen=True)
class ProcessSummary:
    """One process over the whole time."""

    pid: int
    name: str
    peak: int | None
    """Bytes; None where the driver does not report it."""
    utilization_mean: float | None


@dataclass(frozen=True)
class GpuSummary:
    """One GPU over the whole time; amounts in bytes, utilisation from 0 to 1, None where it is unavailable."""

    gpu: str
    name: str
    total: int
    samples: int
    utilization_mean: float | None
    utilization_peak: float | None
    used_mean: int
    used_peak: int
    processes: tuple[ProcessSummary, ...]

    def words(self) -> str:
        """Mean and peak in one line."""
        share, most = self.used_mean / max(1, self.total), self.used_peak / max(1, self.total)
        memory = _(
            "memory mean {mean} ({share}), peak {peak} ({most}) of {total}",
            mean=format_bytes(self.used_mean),
            share=f"{share:.0%}",
            peak=format_bytes(self.used_peak),
            most=f"{most:.0%}",
            total=format_bytes(self.total),
        )
        if self.utilization_mean is None or self.utilization_peak is None:
            return _("utilisation unavailable; {memory}", memory=memory)
        mean, peak = f"{self.utilization_mean:.0%}", f"{self.utilization_peak:.0%}"
        return _("utilisation mean {mean}, peak {peak}; {memory}", mean=mean, peak=peak, memory=memory)

    def metrics(self) -> dict[str, float]:
        """The figures for a logger."""
        told = {
            "gpu_utilization_mean": self.utilization_mean,
            "gpu_utilization_peak": self.utilization_peak,
            "gpu_memory_mean_bytes": float(self.used_mean),
            "gpu_memory_peak_bytes": float(self.used_peak),
        }
        return {name: value for name, value in told.items() if value is not None}


@dataclass
class _Sum:
    """Values seen of one quantity: its mean and its peak."""

    total: float = 0.0
    count: int = 0
    peak: float | None = None

    def add(self, value: float | None) -> None:
        if value is not None:
            self.total, self.count = self.total + value, self.count + 1
            self.peak = value if self.peak is None else max(self.peak, value)

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None


@dataclass
class _Watched:
    latest: GpuSample
    utilization: _Sum = field(default_factory=_Sum)
    used: _Sum = field(default_factory=_Sum)
    processes: dict[int, tuple[str, _Sum, _Sum]] = field(default_factory=dict)


class Monitor:
    """Adds up moments; takes little memory however long it watches."""

    def __init__(self) -> None:
        self._gpus: dict[str, _Watched] = {}
        self.count = 0

    def add(self, moment: tuple[GpuSample, ...]) -> None:
        """One moment of all GPUs."""
        self.count += 1
        for sample in moment:
            watched = self._gpus.setdefault(sample.gpu, _Watched(sample))
            watched.latest = sample
            watched.utilization.add(sample.utilization)
            watched.used.add(sample.used)
            for process in sample.processes:
                _name, held, share = watched.processes.setdefault(process.pid, (process.name, _Sum(), _Sum()))
                held.add(process.bytes)
                share.add(process.utilization)

    def latest(self) -> tuple[GpuSample, ...]:
        """The last moment of each GPU."""
        return tuple(watched.latest for watched in self._gpus.values())

    def summary(self) -> tuple[GpuSummary, ...]:
        """Summary of each GPU, in the order in which they were first seen."""
        return tuple(map(_summed, self._gpus.values()))


def _summed(watched: _Watched) -> GpuSummary:
    processes = (
        ProcessSummary(pid, name, None if held.peak is None else int(held.peak), share.mean)
        for pid, (name, held, share) in watched.processes.items()
    )
    return GpuSummary(
        gpu=watched.latest.gpu,
        name=watched.latest.name,
        total=watched.latest.total,
        samples=watched.used.count,
        utilization_mean=watched.utilization.mean,
        utilization_peak=watched.utilization.peak,
        used_mean=round(watched.used.mean or 0),
        used_peak=int(watched.used.peak or 0),
        processes=tuple(sorted(processes, key=lambda one: (-(one.peak or 0), one.pid))),
    )


def checked_interval(seconds: object) -> float:
    """Sampling interval in seconds.

    Raises:
        InvalidInputError: no number, or shorter than :data:`SHORTEST_INTERVAL`.
    """
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise InvalidInputError(_("the interval must be a number of seconds, not {value}", value=repr(seconds)))
    if not isfinite(seconds) or not SHORTEST_INTERVAL <= seconds <= 86400:
        raise InvalidInputError(
            _(
                "the interval must be between {least} and 86400 seconds, not {value}",
                least=SHORTEST_INTERVAL,
                value=seconds,
            )
        )
    return float(seconds)


def watch(
    sampler: Sampler,
    monitor: Monitor,
    *,
    seconds: float | None,
    interval: float = INTERVAL,
    tell: Callable[[float, tuple[GpuSample, ...]], None] | None = None,
    stop: threading.Event | None = None,
) -> None:
    """Look every ``interval`` seconds until ``seconds`` are over or ``stop`` is set; at least once.

    Args:
        sampler: what to ask.
        monitor: adds the moments up.
        seconds: how long; None: until ``stop``, or an exception (Ctrl-C).
        interval: sampling interval in seconds; a slow look delays the next one, none is made up for.
        tell: called with the seconds since the start and the moment.
        stop: ends it early.

    Raises:
        DeviceQueryError: the driver stopped answering; what was added until then stays.
    """
    stop = stop or threading.Event()
    start = time.monotonic()
    while not stop.is_set():
        began = time.monotonic()
        moment = sampler()
        monitor.add(moment)
        if tell is not None:
            tell(began - start, moment)
        rest = began + interval - time.monotonic()
        if seconds is not None and began + interval - start > seconds:
            stop.wait(max(0.0, min(rest, start + seconds - time.monotonic())))
            return
        stop.wait(max(0.0, rest))


@contextmanager
def any_sampler() -> Iterator[Sampler]:
    """A sampler over every GPU of this machine.

    Raises:
        NoDeviceError: NVML has no GPU to watch.
        DeviceQueryError: the driver is there but does not answer.
    """
    with _answering(), nvml_sampler() as sampler:
        yield sampler


@contextmanager
def device_sampler(device: torch.device) -> Iterator[Sampler]:
    """A sampler over the one CUDA device that a training runs on.

    Raises:
        NoDeviceError: it is not a CUDA device, or NVML does not know it.
        DeviceQueryError: the driver is there but does not answer.
    """
    if device.type != "cuda":
        raise NoDeviceError(_("there is no GPU to watch: the training runs on {device}", device=device))
    index: int | None = device.index  # torch's annotation forgets "cuda" without a number
    ordinal = torch_cuda.current_device() if index is None else index
    with _answering(), nvml_sampler(ordinal, torch_cuda.device_uuid(ordinal)) as sampler:
        yield sampler


@contextmanager
def _answering() -> Iterator[None]:
    """Without NVML, a GPU cannot be watched."""
    try:
        yield
    except NvmlUnavailableError as error:
        raise NoDeviceError(_("utilisation cannot be watched: {why}", why=error)) from None


class BackgroundMonitor:
    """Watches from a thread of its own while something else runs, such as a training."""

    def __init__(self, source: Callable[[], AbstractContextManager[Sampler]], interval: float = INTERVAL) -> None:
        self._source, self._interval = source, checked_interval(interval)
        self._monitor, self._stop = Monitor(), threading.Event()
        self._thread: threading.Thread | None = None
        self.error: VramGuardError | None = None
        """The reason for which watching ended early, or never began."""

    def start(self) -> None:
        """Begin; a second call does nothing."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="vram_guard monitor", daemon=True)
            self._thread.start()

    def latest(self) -> tuple[GpuSample, ...]:
        """The last moment; nothing before the first."""
        return self._monitor.latest()

    def stop(self) -> tuple[GpuSummary, ...]:
        """End, and what was seen; nothing where watching never began."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=10)  # a driver that hangs must not hang the training
        return self._monitor.summary()

    def _run(self) -> None:
        try:
            with self._source() as sampler:
                watch(sampler, self._monitor, seconds=None, interval=self._interval, stop=self._stop)
        except VramGuardError as error:
            self.error = error
