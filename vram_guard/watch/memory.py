"""The device's memory as PyTorch counts it, and releasing what a failed step holds."""

from __future__ import annotations

import contextlib
import gc
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class MemoryReader:
    """``torch.cuda``'s own counters for one device. They are read, never reset: user code may read them too.

    Attributes:
        name: the device's name, as its vendor gives it.
        allocated, reserved: bytes in live tensors, and bytes that the allocator holds, of this process now.
        peak_allocated, peak_reserved: the most of them since the process started or its peaks were reset.
        unused: bytes of the device that no process holds now.
        release: gives unused memory back to the driver.
    """

    def __init__(self, device: torch.device) -> None:
        from torch import cuda

        self.name = partial(cuda.get_device_name, device)
        self.allocated = partial(cuda.memory_allocated, device)
        self.reserved = partial(cuda.memory_reserved, device)
        self.peak_allocated = partial(cuda.max_memory_allocated, device)
        self.peak_reserved = partial(cuda.max_memory_reserved, device)
        self.unused: Callable[[], int] = lambda: cuda.mem_get_info(device)[0]
        self.release: Callable[[], None] = cuda.empty_cache


def reader_for(device: torch.device) -> MemoryReader | None:
    """The reader of a device; None where PyTorch counts nothing (the CPU)."""
    return MemoryReader(device) if device.type == "cuda" else None


@dataclass(frozen=True)
class Failure:
    """Record of an error once the tensors that its traceback held are let go."""

    kind: str
    message: str
    trace: str
    """The formatted traceback."""

    def __str__(self) -> str:
        return f"{self.kind}: {self.message.strip().splitlines()[0] if self.message.strip() else ''}"


def drop_traceback(error: BaseException) -> Failure:
    """Write an error down and clear the frames of its traceback, which hold the failed step's activations.

    Frames that still run are left alone. The caller must not keep the error itself.
    """
    failure = Failure(type(error).__name__, str(error), "".join(traceback.format_exception(error)))
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        link = pending.pop()
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        pending += [link.__cause__, link.__context__]
        if link.__traceback__ is not None:
            traceback.clear_frames(link.__traceback__)
    return failure


def free(reader: MemoryReader | None) -> None:
    """Collect reference cycles that hold tensors, then give unused memory back.

    Giving it back also undoes fragmentation: the next step starts from whole segments.
    """
    gc.collect()
    if reader is not None:
        with contextlib.suppress(RuntimeError):  # a failing driver call is not what is to be reported
            reader.release()
