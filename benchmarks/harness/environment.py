"""The machine and its software: GPU, driver, libraries, and the GPU memory in use, read outside any CUDA context."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from vram_guard import VramGuardError
from vram_guard.budget.nvml import NvmlUnavailableError, read_device

MIB = 2**20

#: Libraries whose releases change what a step takes.
LIBRARIES = ("torch", "transformers", "torchvision", "timm", "peft", "diffusers")

#: For every worker. The first keeps torch.cuda.is_available() from opening CUDA in a process that others are forked
#: from; nothing is downloaded; warnings about ways of training say nothing about memory.
QUIET = {
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "DIFFUSERS_VERBOSITY": "error",
    "PYTHONWARNINGS": "ignore",
}


@dataclass(frozen=True)
class Machine:
    """A machine with a GPU. Sizes in bytes."""

    gpu: str
    torch: str
    python: str
    transformers: str
    cuda: str
    driver: str
    cudnn: int
    compute_capability: list[int]
    multiprocessors: int
    total: int
    """As ``torch.cuda.mem_get_info`` says."""
    free: int
    """The same, right after the CUDA context was made: what the allocator could reserve at most."""
    used_before: int | None
    """By anybody, before the process, as NVML counts."""
    context: int | None
    """Taken by the CUDA context, as NVML counts."""


def version(distribution: str) -> str:
    """The installed release, "" where there is none."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def libraries() -> dict[str, str]:
    """Python's version and those of the installed libraries that matter."""
    found = {name: version(name) for name in LIBRARIES}
    return {"python": platform.python_version(), **{name: each for name, each in found.items() if each}}


def environment() -> dict[str, Any]:
    """Python, torch and cores; GPU and driver where there is one."""
    import torch

    found = {"python": platform.python_version(), "torch": torch.__version__, "cores": os.cpu_count()}
    driver = driver_version()
    return {**found, "gpu": _through_smi("name") or "", "driver": driver} if driver else found


def device_used() -> int | None:
    """Bytes in use on the first visible GPU as NVML counts them, by any process; None where it cannot be asked.

    Through nvidia-ml-py where that is installed, else through nvidia-smi. Neither makes a CUDA context.
    """
    try:
        device = read_device(0)
    except (NvmlUnavailableError, VramGuardError):
        used = _through_smi("memory.used")
        return int(used) * MIB if used is not None and used.isdigit() else None
    return None if device.unified else device.total - device.free


def driver_version() -> str:
    """The NVIDIA driver's version, "" where it cannot be asked."""
    return _through_smi("driver_version") or ""


def _through_smi(field: str) -> str | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip() or "0"
    command = [program, f"--id={first}", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def machine(used_before: int | None, device: str) -> Machine:
    """Everything about this machine; on "cuda", makes a context and says what that took."""
    import torch

    common: dict[str, Any] = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "transformers": version("transformers"),
        "cuda": torch.version.cuda or "",
        "driver": driver_version(),
    }
    if device == "cpu":
        nothing: dict[str, Any] = {"cudnn": 0, "compute_capability": [0, 0], "multiprocessors": 0, "total": 0}
        return Machine(**common, **nothing, gpu="cpu", free=0, used_before=None, context=None)
    torch.cuda.init()
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    used = device_used()
    properties = torch.cuda.get_device_properties(0)
    return Machine(
        **common,
        gpu=properties.name,
        cudnn=int(torch.backends.cudnn.version() or 0),
        compute_capability=[properties.major, properties.minor],
        multiprocessors=properties.multi_processor_count,
        total=total,
        free=free,
        used_before=used_before,
        context=used - used_before if used is not None and used_before is not None else None,
    )


def folder_name(found: Machine) -> str:
    """The folder "<gpu>-<torch>", fit for a file system."""
    return re.sub(r"[^A-Za-z0-9.+]+", "-", f"{found.gpu.removeprefix('NVIDIA ')}-{found.torch}").strip("-").lower()
