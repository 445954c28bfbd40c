"""What a rehearsal of a step costs, by the trace's own count of its operations."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from vram_guard.budget.host import host_share
from vram_guard.language import _
from vram_guard.units import format_bytes

if TYPE_CHECKING:
    from vram_guard.guard.training import CapturedTraining
    from vram_guard.plan import Plan
    from vram_guard.proof.rehearsal import Rehearsal

#: Rehearsals whose time a proof takes: the step as written, the changed one, and forwards to find the loss's weight.
_RUNS = 2.5

#: A rehearsal's time for arithmetic, against that of the trace's operations at the speed of matrix products in double
#: precision, in which it runs. Measured on one thread: 1.2 for ResNet-50, 2.4 for GPT-2.
_OVERHEAD = 2.0

#: How often all weights are written to new memory in a rehearsal: in double precision, before and after the step,
#: gradients, the optimizer's states and its intermediate results, what goes home. With one layer of 100 million
#: weights, whose arithmetic is nothing, a rehearsal took 25 times as long as a copy of them.
_WRITTEN = 25

#: Copies of all weights beside what the step itself takes: those before the step, those after it and the gradients, and
#: of the step as written those after it and the gradients again, beside which the changed one runs.
_COPIES = 5
#: What a rehearsal took of memory, against that: 0.9 to 1.1 times as much for ResNet-50 and GPT-2 (temporaries on the
#: CPU are others than on a GPU).
_MORE_MEMORY = 1.2


def seconds_needed(captured: CapturedTraining, plan: Plan, samples: int) -> float:
    """Seconds that a proof by running so many samples takes."""
    timeline = plan.timeline_before
    if timeline is None:
        return 0.0
    operations = sum(item.flops.base + item.flops.per_sample * samples for item in timeline.work)
    weights = sum(weight.numel() for weight in captured.model.parameters())
    arithmetic = _OVERHEAD * operations / _operations_per_second()
    return _RUNS * (arithmetic + _WRITTEN * weights / _copied_per_second())


def memory_lacking(captured: CapturedTraining, plan: Plan, way: Rehearsal) -> str:
    """Why the host memory does not suffice; "" where it does, or where nobody knows."""
    timeline = plan.timeline_before
    free = host_share(None, captured.step.data_parallel_ranks)
    if timeline is None or free is None:
        return ""
    each = 8 if way.double else 4
    law = replace(timeline, retrace=None)  # to trace anew for that would be too dear
    scaled = law.at(way.samples).peak_allocated * each // (4 if timeline.precision == "32-true" else 2)
    model = captured.model
    copies = _COPIES * each * sum(part.numel() for part in (*model.parameters(), *model.buffers()))
    needed = int(_MORE_MEMORY * (scaled + copies))
    if needed <= free:
        return ""
    return _(
        "it would take {needed} of host memory, and {free} are free",
        needed=format_bytes(needed),
        free=format_bytes(free),
    )


def _operations_per_second() -> float:
    """Floating-point operations that one thread of this processor does in a second, in matrix products.

    Of processor time: in so short a while, other work on the machine would decide about the answer.
    """
    size = 384
    one = torch.rand(size, size, dtype=torch.float64)
    one @ one
    began, count = time.thread_time(), 0
    while time.thread_time() - began < 0.02:
        one @ one
        count += 1
    return 2.0 * size**3 * count / (time.thread_time() - began)


def _copied_per_second() -> float:
    """Numbers in double precision that are copied to new memory in a second of processor time; the best of three."""
    numbers = torch.ones(2**23, dtype=torch.float64)  # more than the C library keeps for later use
    seconds = []
    for _attempt in range(3):
        began = time.thread_time()
        numbers.clone()
        seconds.append(time.thread_time() - began)
    return numbers.numel() / min(seconds)
