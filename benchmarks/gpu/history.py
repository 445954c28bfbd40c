"""An allocator's recorded history in columns: a tenth of the snapshot's size, and back to a snapshot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.checked import built
from vram_guard.errors import InvalidInputError

COLUMNS = ("action", "addr", "size", "stream", "thread")

#: In the column "thread". The allocator notes Python's frames. What the training loop's own thread asks for has the
#: loop among them; autograd runs a backward in a thread of its own, where there are no frames, or only those of hooks
#: and of a checkpointed block that is computed again.
MAIN_THREAD, AUTOGRAD_THREAD, UNTOLD = 1, 0, -1

_LOOP = "benchmarks/gpu/loop.py"

_BLOCK = ("size", "requested_size", "state")


def compacted(snapshot: Mapping[str, Any], device: int = 0) -> dict[str, Any]:
    """The device's part of ``torch.cuda.memory._snapshot()`` as plain lists; frames become one number each."""
    settings = snapshot.get("allocator_settings")
    conf = settings.get("PYTORCH_CUDA_ALLOC_CONF", "") if isinstance(settings, Mapping) else ""
    entries = [entry for entry in snapshot["device_traces"][device] if "size" in entry]
    return {
        "conf": conf,
        "segments": [_segment(s) for s in snapshot["segments"] if s.get("device", 0) == device],
        "action": [entry["action"] for entry in entries],
        "addr": [entry.get("addr", 0) for entry in entries],
        "size": [entry["size"] for entry in entries],
        "stream": [entry.get("stream", 0) for entry in entries],
        "thread": [_thread(entry) for entry in entries],
    }


def _thread(entry: Mapping[str, Any]) -> int:
    if entry["action"] not in ("alloc", "segment_alloc", "segment_map"):
        return UNTOLD
    files = (frame.get("filename", "").replace("\\", "/") for frame in entry.get("frames", ()))
    return MAIN_THREAD if any(file.endswith(_LOOP) for file in files) else AUTOGRAD_THREAD


def _segment(segment: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "address": segment["address"],
        "stream": segment["stream"],
        "type": segment["segment_type"],
        "expandable": bool(segment.get("is_expandable")),
        "pool": list(segment.get("segment_pool_id", (0, 0))),
        "blocks": [[block.get(key, 0) for key in _BLOCK] for block in segment["blocks"]],
    }


@dataclass(frozen=True)
class _Segment:
    address: int
    stream: int
    type: str
    expandable: bool
    pool: list[int]
    blocks: list[Any]


@dataclass(frozen=True)
class _History:
    conf: str
    segments: list[_Segment]
    action: list[Any]
    addr: list[Any]
    size: list[Any]
    stream: list[Any]
    thread: list[Any]


def expanded(history: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A snapshot as :func:`vram_guard.allocator.read_recording` takes it.

    Args:
        history: what :func:`compacted` answered.
        where: file and case, for messages.

    Raises:
        InvalidInputError: a field is missing, unknown, of the wrong kind or of another length.
    """
    found = built(_History, history, where)
    for column in COLUMNS:
        if len(getattr(found, column)) != len(found.action):
            raise InvalidInputError(
                f"{where}: {column} has {len(getattr(found, column))} entries, not as many as action"
            )
    rows = zip(*(getattr(found, column) for column in COLUMNS), strict=True)
    return {
        "segments": [_as_segment(s, f"{where}: segments[{n}]") for n, s in enumerate(found.segments)],
        "device_traces": [[dict(zip(COLUMNS, row, strict=True)) for row in rows]],
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": found.conf},
    }


def _as_segment(segment: _Segment, where: str) -> dict[str, Any]:
    for block in segment.blocks:
        if not isinstance(block, list) or len(block) != len(_BLOCK) or not isinstance(block[0], int):
            raise InvalidInputError(f"{where}.blocks: expected [size, requested_size, state], found {block!r}")
    return {
        "device": 0,
        "address": segment.address,
        "total_size": sum(block[0] for block in segment.blocks),
        "stream": segment.stream,
        "segment_type": segment.type,
        "is_expandable": segment.expandable,
        "segment_pool_id": tuple(segment.pool),
        "blocks": [dict(zip(_BLOCK, block, strict=True)) for block in segment.blocks],
    }
