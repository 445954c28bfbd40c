"""Recording: a real run's allocations, read from a snapshot of ``torch.cuda.memory._snapshot()``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vram_guard.allocator._plain_pickle import load_plain_pickle
from vram_guard.allocator._rewind import Rewound, rewind
from vram_guard.allocator._settings import AllocatorSettings
from vram_guard.allocator.blocks import Segment, SegmentBlock, TraceEntry
from vram_guard.errors import InvalidInputError
from vram_guard.language import _
from vram_guard.limits import LARGEST_SNAPSHOT

#: What torch writes into a trace (``TraceEntry::Action``); those not named in TraceEntry say nothing about
#: memory.
ACTIONS = frozenset(
    {
        *("alloc", "free_requested", "free_completed", "oom"),
        *("segment_alloc", "segment_free", "segment_map", "segment_unmap"),
    }
)
IGNORED = frozenset({"snapshot", "user_defined", "workspace_snapshot"})


@dataclass(frozen=True)
class Recording:
    """The actions of one device's allocator while its history was recorded.

    ``replay(recording.events, recording.sizes, streams=recording.streams)`` runs it through a fresh
    allocator; :func:`vram_guard.allocator.compare` starts from the segments that were there and follows the
    run step by step.
    """

    device: int
    settings: AllocatorSettings
    """Those the run was made under, as far as the snapshot contains them."""
    trace: tuple[TraceEntry, ...]
    initial: tuple[Segment, ...]
    """The segments when recording began: the final ones, with the trace undone."""
    final: tuple[Segment, ...]
    """The segments when the snapshot was taken."""
    existing: tuple[TraceEntry, ...]
    """The blocks that were alive when recording began, as if each had just been allocated."""
    freed_by: str
    """The action that makes memory free again: free_completed, unless the recorder skips it."""
    events: tuple[int, ...]
    """As :func:`replay` takes them. Blocks that were alive when recording began are allocated first."""
    sizes: tuple[int, ...]
    """Requested bytes of every block."""
    streams: tuple[int, ...]
    """Stream of every block."""
    trace_index: tuple[int, ...]
    """For every event the position of its entry in the snapshot's trace; -1: from before the recording."""
    notes: tuple[str, ...] = ()
    """The parts that were left out, and why."""


def read_recording(source: str | Path | bytes | Mapping[str, Any], device: int = 0) -> Recording:
    """Read a snapshot: the file of ``torch.cuda.memory._dump_snapshot()``, its bytes, or the dict itself.

    The file is read as plain values: nothing in it is imported or run. Memory that another stream still uses when it
    is freed becomes available later; the events here follow "free_completed", when that has happened.

    Args:
        source: where the snapshot is.
        device: whose trace; the snapshot holds one for each device.

    Raises:
        InvalidInputError: for a file that is no such snapshot, is damaged, holds no history, or whose trace
            contradicts its segments.
    """
    return _recording(_snapshot(source), device)


def read_recordings(source: str | Path | bytes | Mapping[str, Any]) -> list[Recording]:
    """Read the history of every device that has one; otherwise like :func:`read_recording`."""
    snapshot = _snapshot(source)
    return [_recording(snapshot, device) for device, trace in enumerate(snapshot["device_traces"]) if trace]


def _snapshot(source: str | Path | bytes | Mapping[str, Any]) -> Mapping[str, Any]:
    snapshot = source if isinstance(source, Mapping) else load_plain_pickle(_bytes_of(source))
    if isinstance(snapshot, list):  # torch.cuda.memory_snapshot(), and _snapshot() of old releases
        raise InvalidInputError(_("the snapshot is a list of segments without a history. {advice}", advice=_advice()))
    if not isinstance(snapshot, Mapping) or "device_traces" not in snapshot:
        raise _no_snapshot(_("expected a dict with device_traces (and segments)"))
    if not any(_list(snapshot["device_traces"], "device_traces")):
        raise InvalidInputError(_("the snapshot holds no history of any device. {advice}", advice=_advice()))
    return snapshot


def _advice() -> str:
    return _(
        "Call torch.cuda.memory._record_memory_history() before what is to be recorded, and "
        "torch.cuda.memory._dump_snapshot() after it"
    )


def _recording(snapshot: Mapping[str, Any], device: int) -> Recording:
    notes: list[str] = []
    settings = _settings(snapshot, notes)
    own, private = _segments(snapshot, device)
    trace = _trace(snapshot, device, private, notes)
    freed = _freeing_action(trace)
    if "segments" not in snapshot:
        notes.append(
            _(
                "the snapshot has no segments: what the trace frees without having allocated it is taken as allocated "
                "before the recording, in fresh segments"
            )
        )
        rewound = Rewound((), _unknown_blocks(trace, freed))
    else:
        rewound = rewind(own, trace, freed, settings)
    return _numbered(device, settings, trace, rewound, tuple(own), freed, notes)


def _bytes_of(source: str | Path | bytes) -> bytes:
    if isinstance(source, bytes):
        return source
    path = Path(source)
    try:
        if path.stat().st_size > LARGEST_SNAPSHOT:
            raise InvalidInputError(_("{path} is larger than 2 GiB: record with a smaller max_entries", path=path))
        return path.read_bytes()
    except OSError as error:
        raise InvalidInputError(
            _("cannot read the snapshot {path}: {problem}", path=path, problem=error.strerror)
        ) from error


def _settings(snapshot: Mapping[str, Any], notes: list[str]) -> AllocatorSettings:
    """The string torch was configured with; older snapshots do not carry it."""
    recorded = snapshot.get("allocator_settings")
    text = recorded.get("PYTORCH_CUDA_ALLOC_CONF") if isinstance(recorded, Mapping) else None
    if isinstance(text, str):
        return AllocatorSettings.from_conf(text)
    notes.append(_("the snapshot does not name the allocator's settings: PyTorch's defaults are assumed"))
    return AllocatorSettings()


def _no_snapshot(problem: str) -> InvalidInputError:
    return InvalidInputError(
        _(
            "not a memory snapshot that is known here: {problem}. It is damaged, or another release of torch wrote it: "
            "record it again with torch 2.4 or later, or update vram_guard",
            problem=problem,
        )
    )


def _int(entry: Any, name: str, where: str) -> int:
    value = entry.get(name) if isinstance(entry, Mapping) else None
    if not isinstance(value, int) or isinstance(value, bool) or not -(2**63) <= value < 2**64:
        raise _no_snapshot(_("{where} has no whole number {name}", where=where, name=repr(name)))
    return value


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise _no_snapshot(_("{where} is not a list", where=where))
    return value


def _segments(snapshot: Mapping[str, Any], device: int) -> tuple[list[Segment], list[Segment]]:
    """The device's segments of the allocator's own pool, and those of private pools."""
    own: list[Segment] = []
    private: list[Segment] = []
    for number, entry in enumerate(_list(snapshot.get("segments", []), "segments")):
        if isinstance(entry, Mapping) and entry.get("device", 0) == device:
            segments = private if _is_private(entry.get("segment_pool_id")) else own
            segments.append(_segment(entry, f"segment {number}"))
    return own, private


def _is_private(pool: Any) -> bool:
    """(0, 0) is the allocator's own pool; others belong to CUDA graphs and ``torch.cuda.MemPool``."""
    return pool is not None and tuple(pool) != (0, 0)


def _segment(entry: Mapping[str, Any], where: str) -> Segment:
    address = _int(entry, "address", where)
    blocks = []
    for block in _list(entry.get("blocks"), f"{where}'s blocks"):
        size = _int(block, "size", where)
        if size <= 0:
            raise _no_snapshot(_("{where} holds a block of {size} bytes", where=where, size=size))
        is_live = str(block.get("state")).startswith("active")
        requested = _int(block, "requested_size", where) if is_live else 0
        blocks.append(SegmentBlock(address, size, requested, "active_allocated" if is_live else "inactive"))
        address += size
    total = _int(entry, "total_size", where)
    if not blocks or sum(block.size for block in blocks) != total:
        raise InvalidInputError(
            _("the snapshot contradicts itself: the blocks of {where} do not add up to its size", where=where)
        )
    kind = entry.get("segment_type")
    if kind not in ("small", "large"):
        raise _no_snapshot(_("{where} is neither small nor large", where=where))
    return Segment(
        address=blocks[0].address,
        total_size=total,
        stream=_int(entry, "stream", where),
        segment_type=kind,
        is_expandable=entry.get("is_expandable") is True,
        blocks=tuple(blocks),
    )


def _trace(
    snapshot: Mapping[str, Any], device: int, private: Sequence[Segment], notes: list[str]
) -> tuple[TraceEntry, ...]:
    """The device's trace without what private pools did."""
    traces = _list(snapshot["device_traces"], "device_traces")
    if not 0 <= device < len(traces):
        raise InvalidInputError(
            _("the snapshot has no trace of device {device}: it has {count} traces", device=device, count=len(traces))
        )
    kept = []
    left_out = 0
    for index, raw in enumerate(_list(traces[device], f"device_traces[{device}]")):
        entry = _entry(raw, index)
        if entry is None:
            continue
        inside = any(segment.address <= entry.address < segment.end for segment in private)
        if inside or _is_private(raw.get("pool_id")):
            left_out += 1
        else:
            kept.append(entry)
    if left_out or private:
        notes.append(
            _(
                "private pools (CUDA graphs, MemPool) are not modelled: {count} of their actions and {size} bytes of "
                "their segments are left out",
                count=left_out,
                size=sum(segment.total_size for segment in private),
            )
        )
    return tuple(kept)


def _entry(raw: Any, index: int) -> TraceEntry | None:
    where = f"trace entry {index}"
    action = raw.get("action") if isinstance(raw, Mapping) else None
    if isinstance(action, str) and action in IGNORED:
        return None
    if not isinstance(action, str) or action not in ACTIONS:
        raise _no_snapshot(_("{where} has the unknown action {action}", where=where, action=repr(action)))
    address = 0 if action == "oom" else _int(raw, "addr", where)
    size = _int(raw, "size", where)
    if size < 0 or address < 0:
        raise _no_snapshot(_("{where} has a negative size or address", where=where))
    return TraceEntry(action, address, size, _int(raw, "stream", where), index)


def _freeing_action(trace: Iterable[TraceEntry]) -> str:
    """The action that marks memory as free again: free_completed, unless the recorder skipped it."""
    actions = {entry.action for entry in trace}
    return "free_requested" if "free_completed" not in actions else "free_completed"


def _unknown_blocks(trace: Iterable[TraceEntry], freed: str) -> tuple[TraceEntry, ...]:
    """The blocks that are freed without having been allocated in the trace."""
    live: set[int] = set()
    unknown = []
    for entry in trace:
        if entry.action == "alloc":
            live.add(entry.address)
        elif entry.action == freed:
            if entry.address not in live:
                unknown.append(entry)
            live.discard(entry.address)
    return tuple(unknown)


def _numbered(
    device: int,
    settings: AllocatorSettings,
    trace: tuple[TraceEntry, ...],
    rewound: Rewound,
    final: tuple[Segment, ...],
    freed: str,
    notes: list[str],
) -> Recording:
    """Give every block a number, and write the trace as events over the numbers."""
    sizes = [block.size for block in rewound.live]
    streams = [block.stream for block in rewound.live]
    number = {block.address: index for index, block in enumerate(rewound.live)}
    events = list(range(len(sizes)))
    positions = [-1] * len(sizes)
    for entry in trace:
        if entry.action == "alloc":
            if entry.address in number:
                raise InvalidInputError(
                    _("trace entry {position} allocates at an address that is still in use", position=entry.position)
                )
            number[entry.address] = len(sizes)
            events.append(len(sizes))
            sizes.append(entry.size)
            streams.append(entry.stream)
        elif entry.action == freed:
            if entry.address not in number:
                raise InvalidInputError(
                    _("trace entry {position} frees an address that is not in use", position=entry.position)
                )
            events.append(~number.pop(entry.address))
        else:
            continue
        positions.append(entry.position)
    if rewound.live:
        notes.append(
            _(
                "{count} blocks ({size} bytes) were allocated before the recording began: they come first, in the "
                "order of their addresses",
                count=len(rewound.live),
                size=sum(block.size for block in rewound.live),
            )
        )
    return Recording(
        device=device,
        settings=settings,
        trace=trace,
        initial=rewound.segments,
        final=final,
        existing=rewound.live,
        freed_by=freed,
        events=tuple(events),
        sizes=tuple(sizes),
        streams=tuple(streams),
        trace_index=tuple(positions),
        notes=tuple(notes),
    )
