"""Utilisation and memory of this machine's GPUs right now, by process. Through NVML, many times cheaply."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from vram_guard.budget import nvml as _nvml
from vram_guard.budget._device import GpuProcess
from vram_guard.budget.host import host_memory
from vram_guard.budget.nvml import Nvml

__all__ = ["GpuProcess", "GpuSample", "Sampler", "nvml_sampler"]


@dataclass(frozen=True)
class GpuSample:
    """One GPU, or one MIG slice, at one moment."""

    gpu: str
    """NVML's number, as nvidia-smi counts; "0:1" is the second MIG slice of GPU 0."""
    name: str
    utilization: float | None
    """Share of the last driver's period (1/6 to 1 s) in which any kernel ran, 0 to 1; None where it is unavailable.

    It says how long the GPU was not idle, not how well it was used: one small kernel after another gives 1 (NVML API
    reference, ``nvmlUtilization_t``).
    """
    used: int
    """Bytes of its memory in use, by whomever; what the driver keeps for itself included."""
    total: int
    processes: tuple[GpuProcess, ...] = ()


#: Called again and again; every answer is one moment.
Sampler = Callable[[], tuple[GpuSample, ...]]


@contextmanager
def nvml_sampler() -> Iterator[Sampler]:
    """A sampler over all GPUs of the machine, in nvidia-smi's order, whatever CUDA may see of them; MIG slices apart.

    Raises:
        NvmlUnavailableError: there is no NVML or no GPU.
        DeviceQueryError: the driver is there but does not answer, now or later.
    """
    with _nvml.opened() as library:
        found: list[tuple[str, Any]] = []
        for index, handle in enumerate(library.devices()):
            slices = library.slices(handle)
            found += [(f"{index}:{number}", piece) for number, piece in enumerate(slices)] or [(str(index), handle)]
        named = [(gpu, _nvml.text(library.ask("nvmlDeviceGetName", handle)), handle) for gpu, handle in found]
        yield lambda: tuple(_sample(library, gpu, name, handle) for gpu, name, handle in named)


def _sample(library: Nvml, gpu: str, name: str, handle: Any) -> GpuSample:
    memory = library.own_memory(handle)
    if memory is None:  # the GPU shares the host's memory
        host = host_memory()
        used, total = host.total - host.available, host.total
    else:
        used, total = int(memory.used), int(memory.total)
    rates = library.maybe("nvmlDeviceGetUtilizationRates", handle)
    share = None if rates is None else int(rates.gpu) / 100
    return GpuSample(gpu, name, share, used, total, library.processes(handle))
