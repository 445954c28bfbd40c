"""What one operator's step asks CUDA's allocator for: the jobs of the workers that measure."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

import torch

from benchmarks.gpu.loop import RealLoop
from benchmarks.gpu.operators.table import OPERATORS, Operator
from benchmarks.gpu.replays import LEAST_REQUEST
from vram_guard.allocator import read_recording

UPDATES = 2
MOST_ENTRIES = 100_000


@dataclass(frozen=True)
class Requests:
    """What one operator's step asked the allocator for. Sizes in bytes."""

    name: str
    events: str = ""
    """Requests (positive) and frees (negative), in order; frees that follow each other are sorted by their sizes."""
    allocated: int = 0
    reserved: int = 0
    error: str = ""
    """The last line of the traceback, where the operator failed."""


def requests_of(names: list[str]) -> Any:
    """The job of a worker: one operator after the other."""
    wanted = set(names)
    return [asdict(_requests(one)) for one in OPERATORS if one.name in wanted]


def _requests(operator: Operator) -> Requests:
    torch._C._cuda_clearCublasWorkspaces()  # noqa: SLF001 - there is no public way
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    torch.cuda.memory._record_memory_history(max_entries=MOST_ENTRIES, stacks="python", context=None)  # noqa: SLF001
    try:
        RealLoop(operator.step(), 1, "cuda").run(UPDATES, torch.cuda.synchronize)
        recording = read_recording(torch.cuda.memory._snapshot())  # noqa: SLF001
        peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        events = " ".join(map(str, until_the_end(large(recording.events, recording.sizes))))
        return Requests(operator.name, events, *peaks)
    except Exception:  # noqa: BLE001 - an operator that this GPU does not have must not hide the others
        return Requests(operator.name, error=traceback.format_exc().strip().splitlines()[-1])
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)  # noqa: SLF001


def large(events: Iterable[int], sizes: Any) -> list[int]:
    """Requests (positive) and frees (negative) of at least LEAST_REQUEST bytes, in order.

    Of frees that follow each other the order is left open: autocast's cache frees its copies by their addresses.

    Args:
        events: block for a request, ~block for a free.
        sizes: of the blocks, in bytes.
    """
    told = [sizes[event] if event >= 0 else -sizes[~event] for event in events]
    runs = groupby((size for size in told if abs(size) >= LEAST_REQUEST), lambda size: size < 0)
    return [int(size) for freed, run in runs for size in (sorted(run) if freed else run)]


def until_the_end(events: list[int]) -> list[int]:
    """The events without the last frees, with which model and optimizer die."""
    return events[: 1 + max((at for at, size in enumerate(events) if size > 0), default=-1)]
