"""The time that a traced step would take on this CPU, by its count of operations."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import torch

from vram_guard.tensors import without_modes
from vram_guard.timeline import Timeline

#: Share of the rate of one large multiplication, and of one large copy, that the operators of a step reach together.
REACHED = 0.4

_WIDTH = 384
_COPIED = 2**22


def seconds_on_cpu(timeline: Timeline, batch_size: int) -> float:
    """Of an optimizer step's forwards and backwards in double precision, on one core."""
    work = [one for one in timeline.work if one.phase in ("forward", "backward")]
    flops_per_second, bytes_per_second = _rates()
    computing = sum(one.flops.at(batch_size) for one in work) / flops_per_second
    moving = 2 * sum(one.moved.at(batch_size) for one in work) / bytes_per_second  # twice the single precision's
    return (computing + moving) / REACHED


@cache
def _rates() -> tuple[float, float]:
    """Multiplications and additions a second, and bytes read and written."""
    with without_modes():
        one = torch.ones(_WIDTH, _WIDTH, dtype=torch.float64)
        many = torch.ones(_COPIED, dtype=torch.float64)
        computing = min(_seconds(lambda: one @ one) for _ in range(3))
        moving = min(_seconds(lambda: many + many) for _ in range(3))
    return 2 * _WIDTH**3 / computing, 24 * _COPIED / moving


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
