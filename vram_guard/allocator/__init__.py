"""PyTorch's CUDA caching allocator, replayed without a device."""

from vram_guard.allocator.blocks import Segment, SegmentBlock, SegmentEvent, TraceEntry
from vram_guard.allocator.caching import CachingAllocator, SimulatedOutOfMemory
from vram_guard.allocator.comparison import Difference, RecordingComparison, SegmentCount, compare
from vram_guard.allocator.host import host_peak, pinned_size
from vram_guard.allocator.recording import Recording, read_recording
from vram_guard.allocator.replaying import Replay, ReplayFailure, replay
from vram_guard.allocator.settings import AllocatorSettings

__all__ = [
    "AllocatorSettings",
    "CachingAllocator",
    "Difference",
    "Recording",
    "RecordingComparison",
    "Replay",
    "ReplayFailure",
    "Segment",
    "SegmentBlock",
    "SegmentCount",
    "SegmentEvent",
    "SimulatedOutOfMemory",
    "TraceEntry",
    "compare",
    "host_peak",
    "pinned_size",
    "read_recording",
    "replay",
]
