"""The memory there is: an explicit amount, a card from the catalogue, or the device of this machine."""

from __future__ import annotations

from vram_guard.budget._device import GpuProcess
from vram_guard.budget.budget import DEFAULT_MARGIN, Budget
from vram_guard.budget.catalogue import GPU, catalogue, find_gpu
from vram_guard.budget.host import HostMemory, host_memory

__all__ = [
    "DEFAULT_MARGIN",
    "GPU",
    "Budget",
    "GpuProcess",
    "HostMemory",
    "catalogue",
    "find_gpu",
    "host_memory",
]
