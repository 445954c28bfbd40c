"""Facts about one GPU of this machine: plain values, wherever they were read."""

from __future__ import annotations

import operator
import platform
import sys
from dataclasses import dataclass

from vram_guard.allocator import Placement
from vram_guard.errors import InvalidInputError, NoDeviceError
from vram_guard.language import _


@dataclass(frozen=True)
class GpuProcess:
    """Another process that holds memory on the GPU; ``bytes`` is None where the driver does not report it."""

    pid: int
    name: str
    bytes: int | None


@dataclass(frozen=True)
class DeviceMemory:
    """One GPU, or one MIG slice of it, as the driver describes it now.

    Attributes:
        name: the product's name.
        total, free: bytes of the device; of host RAM where the device shares it (``unified``).
        processes: other processes on it.
        compute_capability: (major, minor), None where it cannot be read.
        multiprocessors: None where it cannot be read.
        unified: the device has no memory of its own.
        mig: this is a MIG slice; name and sizes are the slice's.
        notes: sentences a person should read with the numbers.
    """

    name: str
    total: int
    free: int
    processes: tuple[GpuProcess, ...] = ()
    compute_capability: tuple[int, int] | None = None
    multiprocessors: int | None = None
    unified: bool = False
    mig: bool = False
    notes: tuple[str, ...] = ()


def placement_here(card: Placement | None) -> Placement | None:
    """Where CUDA's driver puts new segments on a card of this machine, which does so under native Linux."""
    return card if sys.platform == "linux" and "microsoft" not in platform.release().lower() else "above"


def cuda_ordinal(device: object) -> int | None:
    """The CUDA number that ``device`` means; None for None and "cuda" (the current device).

    Args:
        device: None, a number, "cuda", "cuda:1" or a ``torch.device`` of that type.

    Raises:
        InvalidInputError: for anything else, "cpu" and negative numbers included.
    """
    if device is None or str(device) == "cuda":
        return None
    text = str(device)
    if text.startswith("cuda:") and text[5:].isdigit() and text.isascii():
        return int(text[5:])
    if not isinstance(device, bool):
        try:
            ordinal = operator.index(device)  # type: ignore[arg-type]
        except TypeError:
            ordinal = -1
        if ordinal >= 0:
            return ordinal
    raise InvalidInputError(
        _('device must be a CUDA device (0, "cuda:0", torch.device("cuda", 0)), not {device}', device=repr(device))
    )


def no_device(problem: str) -> NoDeviceError:
    """The error where there is no GPU to plan for.

    Args:
        problem: why, as the beginning of a sentence.
    """
    message = _(
        '{problem}. Say what to plan for: budget="24GiB" (what PyTorch may reserve) or gpu="RTX 4090" '
        '(a card by name). A guard with mode="report" goes on without a prediction, and VRAM_GUARD_DISABLE=1 turns '
        "it off.",
        problem=problem,
    )
    return NoDeviceError(message, problem)
