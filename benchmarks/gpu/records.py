"""The measurements on disk: ``results.json`` and ``histories.json.gz``, written whole or not at all."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks.gpu.cases import Case
from benchmarks.harness import checked
from benchmarks.harness.checked import content, write_json
from benchmarks.harness.environment import Machine
from vram_guard.errors import InvalidInputError
from vram_guard.files import write_atomically

FORMAT = "vram_guard measured on a GPU"
VERSION = 1

RESULTS = "results.json"
HISTORIES = "histories.json.gz"

#: Bytes. A file of this size travels where attachments are limited to 16 MiB; histories beyond it are left out.
LARGEST_HISTORIES = 15 * 2**20
#: Bytes that unpacked histories may take: a gzip file can claim to hold anything.
LARGEST_UNPACKED = 2**30

Status = Literal["ok", "out of memory", "error", "timeout", "skipped"]


@dataclass(frozen=True)
class Measured:
    """One case, run. Sizes in bytes."""

    case: Case
    status: Status
    batch_size: int = 0
    """The one that ran: the case's own, or the one that its ``fill`` led to."""
    message: str = ""
    """The traceback of an error, CUDA's words where memory ran out, the reason of a skip."""
    peaks: list[list[int]] = field(default_factory=list)
    """After every iteration, so far: [max_memory_allocated, max_memory_reserved, number of allocations]."""
    updates: int = 0
    skipped_updates: int = 0
    """Updates that a GradScaler refused."""
    free: int | None = None
    """After the context was made, before anything was allocated."""
    used_before: int | None = None
    used_context: int | None = None
    used_after: int | None = None
    """NVML's use of the whole device: before the process, after its context was made, at the end of the run."""
    outside: int | None = None
    """Taken by the process between context and end on top of what the allocator reserved: kernels, library handles."""
    alloc_retries: int = 0
    """Times that the allocator gave back its cache because the device was full."""
    has_history: bool = False
    update_seconds: list[float] = field(default_factory=list)
    """Of single updates after those whose memory was measured; empty where the GPU was shared."""
    batch_seconds: list[float] = field(default_factory=list)
    """Of making a batch on the CPU and copying it. Results without them have it in ``update_seconds``, and in rows with
    a history the recorder's stacks as well."""
    start_seconds: list[float] = field(default_factory=list)
    """Of the host starting one update on an idle device; those of a GradScaler contain its waiting for the device."""
    seconds: float = 0.0
    """Of the whole process."""
    workspaces: list[dict[str, Any]] | None = None
    kernels: dict[str, list[float]] = field(default_factory=dict)
    """These two were measured by the suite as it was at commit b02c8b3c: cuBLAS's workspaces, and the kernels of one
    update."""

    @property
    def peak_allocated(self) -> int:
        """Over the whole run."""
        return self.peaks[-1][0] if self.peaks else 0

    @property
    def peak_reserved(self) -> int:
        """Over the whole run."""
        return self.peaks[-1][1] if self.peaks else 0


@dataclass(frozen=True)
class Results:
    """One run of the suite on one machine."""

    machine: Machine
    measured: list[Measured] = field(default_factory=list)
    probes: list[dict[str, Any]] = field(default_factory=list)
    """Workspaces of single operators, measured at commit b02c8b3c by ``benchmarks/gpu/probes.py``."""
    minutes: float = 0.0

    @property
    def capability(self) -> tuple[int, int]:
        """The GPU's compute capability."""
        major, minor = self.machine.compute_capability
        return major, minor


@dataclass(frozen=True)
class Histories:
    """The allocator histories of one run."""

    histories: dict[str, Any]


def write_results(folder: Path, results: Results) -> None:
    """Write ``results.json``."""
    write_json(folder / RESULTS, {"format": FORMAT, "version": VERSION, **asdict(results)})


def packed_size(history: Any) -> int:
    """Bytes that one history adds to the file, or somewhat more."""
    return len(zlib.compress(json.dumps(history, separators=(",", ":")).encode(), 6))


def write_histories(folder: Path, histories: Mapping[str, Any]) -> int:
    """Write ``histories.json.gz``: case name -> columns (see history.py). The answer is the file's size."""
    data = {"format": FORMAT, "version": VERSION, "histories": dict(histories)}
    packed = gzip.compress(json.dumps(data, separators=(",", ":")).encode(), 6, mtime=0)
    write_atomically(folder / HISTORIES, packed)
    return len(packed)


def read_results(path: Path) -> Results:
    """Read a ``results.json``.

    Raises:
        InvalidInputError: it is missing, truncated, of another version, or has a field that is missing, unknown or of
            the wrong kind; the message names the file and the field.
    """
    results = checked.read(Results, path, VERSION, FORMAT)
    for number, each in enumerate(results.measured):
        if any(len(peak) != 3 for peak in each.peaks):
            raise InvalidInputError(f"{path}: measured[{number}]: peaks: expected three numbers after every iteration")
    if len(results.machine.compute_capability) != 2:
        raise InvalidInputError(f"{path}: machine: compute_capability: expected [major, minor]")
    return results


def read_histories(path: Path) -> dict[str, Any]:
    """Read a ``histories.json.gz``: case name -> columns, each still to be checked by history.expanded.

    Raises:
        InvalidInputError: as :func:`read_results`.
    """
    unpacker = zlib.decompressobj(wbits=31)
    try:
        text = unpacker.decompress(content(path), LARGEST_UNPACKED)
    except zlib.error as error:
        raise InvalidInputError(f"{path} is no gzip file, or damaged ({error}): measure again") from error
    if unpacker.unconsumed_tail:
        raise InvalidInputError(f"{path} unpacks to more than {LARGEST_UNPACKED} bytes: it is not one of ours")
    if not unpacker.eof:
        raise InvalidInputError(f"{path} is truncated: measure again, or copy it again")
    return checked.read(Histories, path, VERSION, FORMAT, text).histories
