"""PyTorch's own knowledge of the GPU, read without starting CUDA where it has not run yet."""

from __future__ import annotations

import ctypes
import os
import re
import runpy
import sys
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vram_guard.budget._device import DeviceMemory, no_device
from vram_guard.errors import DeviceQueryError, InvalidInputError, NoDeviceError
from vram_guard.language import _

_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_ASYNC_BACKEND = re.compile(r"backend\s*:\s*(?:cuda|hip)MallocAsync")


@dataclass(frozen=True)
class TorchUse:
    """A GPU on which this process already runs, in bytes.

    Attributes:
        total: the device's memory as CUDA counts it.
        free: what the device has free now; this process's CUDA context is already taken.
        reserved: what torch's allocator holds, and can use again.
        cap: the most the allocator may reserve (``set_per_process_memory_fraction``); None where that is
            the whole device, and on releases of torch that cannot be asked.
    """

    total: int
    free: int
    reserved: int
    cap: int | None


@dataclass(frozen=True)
class Build:
    """A build of torch, as its ``torch/version.py`` describes it."""

    version: str
    cuda: str | None
    hip: str | None

    def sees_none(self) -> bool:
        """True if this build surely sees no GPU here: one for CPUs, or one for CUDA where CUDA's driver is missing."""
        return self.hip is None and (self.cuda is None or not _has_cuda_driver())


def installed_build() -> Build | None:
    """The installed torch, without importing it, which takes seconds; None where that cannot be read."""
    spec = find_spec("torch")
    file = None if spec is None or spec.origin is None else Path(spec.origin).with_name("version.py")
    if file is None or not file.is_file():
        return None
    try:
        facts = runpy.run_path(str(file))
    except Exception:  # noqa: BLE001 - a file of another project
        return None
    return Build(str(facts.get("__version__", "")), facts.get("cuda"), facts.get("hip"))


def _has_cuda_driver() -> bool:
    try:
        ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return False
    return True


def _none_seen(build: Build, why: str) -> NoDeviceError:
    of_cpu = "" if build.cuda or build.hip else _(" (a CPU build)")
    return no_device(
        _(
            "No GPU can be read on this machine: {why}, and torch {version}{build} sees none",
            why=why,
            version=build.version,
            build=of_cpu,
        )
    )


def loaded_torch() -> Any | None:
    """The module torch where something has imported it already, else None: tests replace this."""
    return sys.modules.get("torch")


def running_torch() -> Any | None:
    """The module torch where this process already uses CUDA, else None."""
    torch = loaded_torch()
    return torch if torch is not None and torch.cuda.is_initialized() else None


def current_device() -> int:
    """CUDA's number of the device that torch uses by default; 0 before CUDA runs."""
    torch = running_torch()
    return 0 if torch is None else int(torch.cuda.current_device())


def device_uuid(ordinal: int) -> str | None:
    """The UUID ("GPU-...") of a device as CUDA itself counts it; None before CUDA runs in this process."""
    torch = running_torch()
    if torch is None or ordinal >= torch.cuda.device_count():
        return None
    # A plain hexadecimal UUID, which the oldest supported releases do not have.
    uuid = str(getattr(torch.cuda.get_device_properties(ordinal), "uuid", ""))
    return f"GPU-{uuid.removeprefix('GPU-')}" if uuid else None


def use_of(ordinal: int) -> TorchUse | None:
    """Torch's use of a device now; None where CUDA does not run in this process.

    Raises:
        DeviceQueryError: CUDA does not answer.
        InvalidInputError: torch sees no device of this number.
    """
    torch = running_torch()
    return None if torch is None else _use_of(torch, ordinal)


def read_device(ordinal: int, why: str) -> tuple[DeviceMemory, TorchUse]:
    """A GPU as torch sees it, where NVML cannot be asked. Starts CUDA in this process.

    Args:
        ordinal: CUDA's number.
        why: the reason why NVML could not be asked, for messages.

    Raises:
        NoDeviceError: torch sees no GPU either.
        DeviceQueryError: CUDA does not answer.
        InvalidInputError: torch sees no device of this number.
    """
    if loaded_torch() is None and (build := installed_build()) is not None and build.sees_none():
        raise _none_seen(build, why)
    torch = loaded_torch() or import_module("torch")
    if not torch.cuda.is_available():
        raise _none_seen(Build(torch.__version__, torch.version.cuda, torch.version.hip), why)
    use = _use_of(torch, ordinal)
    properties = torch.cuda.get_device_properties(ordinal)
    note = _("read through torch alone ({why}): other processes cannot be listed", why=why)
    memory = DeviceMemory(
        name=str(properties.name),
        total=use.total,
        free=use.free,
        compute_capability=(int(properties.major), int(properties.minor)),
        multiprocessors=int(properties.multi_processor_count),
        unified=bool(getattr(properties, "is_integrated", False)),
        notes=(note,),
    )
    return memory, use


def notes() -> tuple[str, ...]:
    """The properties of this torch and its settings that make a prediction for this GPU doubtful."""
    found = []
    torch = loaded_torch()
    if torch is not None and not (torch.version.cuda or torch.version.hip):
        found.append(_("this torch is a CPU build: training here runs on the CPU, the plan is for the GPU"))
    found.extend(
        _(
            "{variable} chooses the cudaMallocAsync allocator, which is not supported: predictions do not hold",
            variable=variable,
        )
        for variable in _SETTINGS
        if _ASYNC_BACKEND.search(os.environ.get(variable, ""))
    )
    return tuple(found)


def _use_of(torch: Any, ordinal: int) -> TorchUse:
    if ordinal >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise InvalidInputError(
            _("device {ordinal} does not exist: torch sees {count} GPUs", ordinal=ordinal, count=count)
        )
    try:
        free, total = torch.cuda.mem_get_info(ordinal)
    except RuntimeError as error:
        raise DeviceQueryError(
            _(
                'CUDA does not report the memory of device {ordinal} ({error}): give budget="24GiB" or gpu="RTX 4090".',
                ordinal=ordinal,
                error=error,
            )
        ) from error
    return TorchUse(int(total), int(free), int(torch.cuda.memory_reserved(ordinal)), _cap(torch, ordinal, total))


def _cap(torch: Any, ordinal: int, total: int) -> int | None:
    read = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    if read is None:
        return None
    fraction = float(read(ordinal))
    return int(total * fraction) if fraction < 1 else None
