"""The results on disk: ``results.json`` and ``histories.json.gz``, written whole or not at all, read with suspicion."""

from __future__ import annotations

import gzip
import json
import types
import zlib
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from benchmarks.gpu.cases import Case
from vram_guard.errors import InvalidInputError

FORMAT = "vram_guard measured on a GPU"
VERSION = 1

RESULTS = "results.json"
HISTORIES = "histories.json.gz"

#: Bytes. A file of this size travels where attachments are limited to 16 MiB; histories beyond it are left out.
LARGEST_HISTORIES = 15 * 2**20
#: Bytes that unpacked histories may take: a gzip file can claim to hold anything.
LARGEST_UNPACKED = 2**30

Status = Literal["ok", "out of memory", "error", "timeout", "skipped"]

T = TypeVar("T")


@dataclass(frozen=True)
class Machine:
    """Where it was measured. Sizes in bytes."""

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
    """What the CUDA context took, as NVML counts."""


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
    """What a GradScaler refused."""
    free: int | None = None
    """After the context was made, before anything was allocated."""
    used_before: int | None = None
    used_context: int | None = None
    used_after: int | None = None
    """NVML's use of the whole device: before the process, after its context was made, at the end of the run."""
    outside: int | None = None
    """Taken by the process between context and end beside what the allocator reserved: kernels, library handles."""
    alloc_retries: int = 0
    """How often the allocator gave back its cache because the device was full."""
    workspaces: list[dict[str, Any]] | None = None
    """cuBLAS's workspaces that lived to the end: size, stream, thread, allocations_before."""
    has_history: bool = False
    seconds: float = 0.0
    """Of the whole process."""

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
    """Workspaces of single operators: see probes.py."""
    minutes: float = 0.0


def write_results(folder: Path, results: Results) -> None:
    """Write ``results.json`` whole: a reader never sees half of it."""
    data = {"format": FORMAT, "version": VERSION, **asdict(results)}
    _replace(folder / RESULTS, (json.dumps(data, indent=1) + "\n").encode())


def write_histories(folder: Path, histories: Mapping[str, Any]) -> None:
    """Write ``histories.json.gz``: case name -> columns (see history.py)."""
    data = {"format": FORMAT, "version": VERSION, "histories": dict(histories)}
    _replace(folder / HISTORIES, gzip.compress(json.dumps(data, separators=(",", ":")).encode(), 6, mtime=0))


def _replace(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(content)
    partial.replace(path)


def read_results(path: Path) -> Results:
    """Read a ``results.json``.

    Raises:
        InvalidInputError: it is missing, truncated, of another version, or has a field that is missing, unknown or of
            the wrong kind; the message names the file and the field.
    """
    data = _checked_head(_parsed(_content(path), path), path)
    results = _built(Results, data, f"{path}")
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
        content = unpacker.decompress(_content(path), LARGEST_UNPACKED)
    except zlib.error as error:
        raise InvalidInputError(f"{path} is no gzip file, or damaged ({error}): measure again") from error
    if unpacker.unconsumed_tail:
        raise InvalidInputError(f"{path} unpacks to more than {LARGEST_UNPACKED} bytes: it is not one of ours")
    if not unpacker.eof:
        raise InvalidInputError(f"{path} is truncated: measure again, or copy it again")
    data = _checked_head(_parsed(content, path), path)
    for name in data:
        if name != "histories":
            raise InvalidInputError(f"{path}: unknown field {name!r}")
    if not isinstance(data.get("histories"), dict):
        raise InvalidInputError(f"{path}: missing field 'histories'")
    histories: dict[str, Any] = data["histories"]
    return histories


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidInputError(f"cannot read {path}: {error.strerror}") from error


def _parsed(content: bytes, path: Path) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"{path} is truncated or no JSON ({error}): measure again, or copy it again") from error


def _checked_head(data: Any, path: Path) -> dict[str, Any]:
    """The fields that follow ``format`` and ``version``."""
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise InvalidInputError(f"{path}: field 'format' is not {FORMAT!r}: this is no file of benchmarks/gpu")
    if data.get("version") != VERSION:
        raise InvalidInputError(
            f"{path}: field 'version' is {data.get('version')!r}, this program reads {VERSION}: measure again, or read "
            "it with the release that wrote it"
        )
    return {name: value for name, value in data.items() if name not in ("format", "version")}


def _built(kind: type[T], data: Any, where: str) -> T:
    """A dataclass from parsed JSON, every field checked."""
    if not isinstance(data, dict):
        raise InvalidInputError(f"{where}: expected an object, found {type(data).__name__}")
    known = {each.name: each for each in fields(kind)}  # type: ignore[arg-type]
    hints = get_type_hints(kind)
    for name in data:
        if name not in known:
            raise InvalidInputError(f"{where}: unknown field {name!r}")
    values = {}
    for name, each in known.items():
        if name in data:
            values[name] = _value(hints[name], data[name], f"{where}: {name}")
        elif each.default is MISSING and each.default_factory is MISSING:
            raise InvalidInputError(f"{where}: missing field {name!r}")
    return kind(**values)


def _value(hint: Any, value: Any, where: str) -> Any:
    """``value`` where it is what the annotation says."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        return None if value is None else _value(next(a for a in arguments if a is not type(None)), value, where)
    if origin is Literal:
        if value not in arguments:
            raise InvalidInputError(f"{where}: {value!r} is not one of {', '.join(map(repr, arguments))}")
        return value
    if origin is list:
        _check_kind(isinstance(value, list), "a list", value, where)
        return [_value(arguments[0], item, f"{where}[{number}]") for number, item in enumerate(value)]
    if origin is dict:
        _check_kind(isinstance(value, dict), "an object", value, where)
        return value
    if hasattr(hint, "__dataclass_fields__"):
        return _built(hint, value, where)
    numbers = (int, float) if hint is float else (hint,)
    fits = isinstance(value, numbers) and (hint is bool or not isinstance(value, bool))
    _check_kind(fits, hint.__name__, value, where)
    return value


def _check_kind(fits: bool, wanted: str, value: Any, where: str) -> None:
    if not fits:
        raise InvalidInputError(f"{where}: expected {wanted}, found {type(value).__name__}")
