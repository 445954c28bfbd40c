"""PyTorch's CUDA caching allocator, replayed without a device."""

from vram_guard.allocator._caching import CachingAllocator, SimulatedOutOfMemory
from vram_guard.allocator._comparison import Divergence, RecordingComparison, SegmentCount, compare
from vram_guard.allocator._driver import PLACEMENTS, Placement
from vram_guard.allocator._host import host_peak, pinned_size
from vram_guard.allocator._recording import Recording, read_recording, read_recordings
from vram_guard.allocator._replaying import Replay, ReplayFailure, StretchPeak, replay
from vram_guard.allocator._settings import AllocatorSettings, with_expandable_segments
from vram_guard.allocator.blocks import Segment, SegmentBlock, SegmentEvent, TraceEntry

__all__ = [
    "PLACEMENTS",
    "AllocatorSettings",
    "CachingAllocator",
    "Divergence",
    "Placement",
    "Recording",
    "RecordingComparison",
    "Replay",
    "ReplayFailure",
    "Segment",
    "SegmentBlock",
    "SegmentCount",
    "SegmentEvent",
    "SimulatedOutOfMemory",
    "StretchPeak",
    "TraceEntry",
    "compare",
    "host_peak",
    "pinned_size",
    "read_recording",
    "read_recordings",
    "replay",
    "with_expandable_segments",
]
