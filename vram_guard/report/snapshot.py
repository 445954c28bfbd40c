"""A predicted timeline as a snapshot that PyTorch's memory_viz page opens.

The format is that of ``torch.cuda.memory._snapshot()``, as torch/cuda/_memory_viz.py and MemoryViz.js
read it: a pickle of protocol 4 (the page's own unpickler knows no later one) of plain dicts, lists, strings
and ints.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

from vram_guard.plan.model import Plan
from vram_guard.report._charts import timeline_of
from vram_guard.report._walk import Walk, walk

if TYPE_CHECKING:
    from vram_guard.allocator import Segment
    from vram_guard.timeline import Block, Estimate, Timeline

#: The page's unpickler stops at opcodes of protocol 5.
PICKLE_PROTOCOL = 4


def snapshot(timeline: Timeline, batch_size: int) -> dict[str, Any]:
    """The timeline at one batch size, in the format of ``torch.cuda.memory._snapshot()``.

    Args:
        timeline: what to replay.
        batch_size: samples per micro-batch.
    """
    walked = walk(timeline, batch_size)
    return {
        "segments": [_segment(segment, walked) for segment in walked.segments],
        "device_traces": [_trace(walked)],
        "allocator_settings": {},
    }


def pickled(answer: Plan | Estimate, timeline: Timeline | None = None) -> bytes:
    """The snapshot of a plan, or of an estimate and its timeline, as the page reads it from a file.

    Raises:
        InvalidInputError: there is no timeline.
    """
    estimate = answer.estimate if isinstance(answer, Plan) else answer
    return pickle.dumps(snapshot(timeline_of(answer, timeline), estimate.batch_size), protocol=PICKLE_PROTOCOL)


def _trace(walked: Walk) -> list[dict[str, Any]]:
    """Every event, each preceded by the calls to the device that it led to; "time_us" counts events."""
    entries: list[dict[str, Any]] = []
    for index, (event, calls) in enumerate(zip(walked.timeline.events, walked.calls, strict=True)):
        block = event if event >= 0 else ~event
        size = walked.sizes[block]
        about = walked.timeline.blocks[block]
        common = {"stream": about.stream, "time_us": index, "frames": _frames(about)}
        for call in calls:
            place = {"addr": call.address, "size": call.size}
            entries.append({**common, "action": call.action, **place, "stream": call.stream})
        if size:
            # As torch: an allocation is traced with its requested bytes, and freed with the same.
            actions = ("alloc",) if event >= 0 else ("free_requested", "free_completed")
            place = {"addr": walked.addresses[block], "size": size}
            entries += [{**common, "action": action, **place} for action in actions]
    return entries


def _segment(segment: Segment, walked: Walk) -> dict[str, Any]:
    blocks = []
    for block in segment.blocks:
        owner = walked.owners.get(block.address)
        blocks.append(
            {
                "address": block.address,
                "size": block.size,
                "requested_size": block.requested_size,
                "state": block.state,
                "frames": [] if owner is None else _frames(walked.timeline.blocks[owner]),
            }
        )
    return {
        "device": 0,
        "address": segment.address,
        "total_size": segment.total_size,
        "allocated_size": segment.allocated_size,
        "active_size": segment.allocated_size,
        "requested_size": sum(block.requested_size for block in segment.blocks),
        "stream": segment.stream,
        "segment_type": segment.segment_type,
        "segment_pool_id": (0, 0),
        "is_expandable": segment.is_expandable,
        "frames": [],
        "blocks": blocks,
    }


def _frames(block: Block) -> list[dict[str, Any]]:
    """Innermost first, as torch has them: the operator, the user's line, the module, the category."""
    filename, _, line = block.source.rpartition(":")
    known = bool(filename) and line.isdigit()
    place = {"filename": filename if known else block.source, "line": int(line) if known else 0}
    frames = [{"name": block.operator, "filename": "", "line": 0}] if block.operator else []
    frames.append({"name": str(block.module) or "(outside any module)", **place})
    frames.append({"name": block.category, "filename": "category", "line": 0})
    return frames
