"""One case in a process of its own: train for real, and write down what the memory did."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import torch

from benchmarks.gpu import loop as loops
from benchmarks.gpu.cases import Case, allow_tf32
from benchmarks.gpu.history import compacted
from benchmarks.harness import environment
from benchmarks.harness.workers import LONGEST_MESSAGE

#: Optimizer steps of every case: the second is the first with optimizer state, the third shows whether the peak of
#: reserved memory still moves.
UPDATES = 3

#: Updates that are timed at most, and seconds after which no other one is begun.
MOST_TIMED = 12
LONGEST_TIMED = 1.0

#: Batches that are made for their time, and updates whose start on the host is timed. The first updates warm up.
TIMED_BATCHES = 3
TIMED_STARTS = 3

#: Entries that the allocator's recorder keeps. A step of these cases has 2,000 to 30,000.
MOST_ENTRIES = 200_000


def case_of(case: Case, batch_size: int, device: str, used_before: int | None) -> Any:
    """The job of a worker: :func:`run_case`."""
    measured, history = run_case(case, batch_size, device, used_before)
    return {"measured": measured, "history": history}


def machine_of(device: str, used_before: int | None) -> Any:
    """The job of a worker: the machine."""
    return asdict(environment.machine(used_before, device))


def size_that_fills(case: Case, free: int, capability: tuple[int, int], multiprocessors: int | None = None) -> int:
    """The batch size at which the predicted peak takes ``case.fill`` of ``free`` bytes. Sees no GPU."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # Imported here: a process that measures holds nothing of the simulation.
    from vram_guard import trace
    from vram_guard.timeline import largest_that_fits

    allow_tf32(case.tf32)
    timeline = trace(case.step(), compute_capability=capability, multiprocessors=multiprocessors)
    wanted = int(free * case.fill)
    return max(1, largest_that_fits(lambda size: timeline.replay(size).peak_reserved <= wanted, 2**20))


def run_case(
    case: Case, batch_size: int, device: str, used_before: int | None
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Train the case and measure.

    Args:
        case: what to train.
        batch_size: samples per micro-batch.
        device: "cuda", or "cpu" to try the case's code without measuring anything.
        used_before: NVML's use of the device before this process made its context.

    Returns:
        The fields of :class:`Measured` except case and seconds, and the compacted history where one was kept.
    """
    run = _OnCuda(case, used_before) if device == "cuda" else _OnCpu()
    found: dict[str, Any] = {"batch_size": batch_size, "used_before": used_before, **run.before()}
    peaks: list[list[int]] = []
    loop = None
    torch.manual_seed(0)
    try:
        loop = loops.RealLoop(case.step(), batch_size, device)
        loop.run(UPDATES if device == "cuda" else 1, lambda: peaks.append(run.peak()))
        found["status"] = "ok"
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        found.update(status="out of memory", message=str(error)[:LONGEST_MESSAGE])
        peaks.append(run.peak())
    found["peaks"] = [peak for peak in peaks if peak]
    if loop is not None:
        found.update(updates=loop.updates, skipped_updates=loop.skipped)
    after, history = run.after()
    if loop is not None and found["status"] == "ok" and case.alone and device == "cuda":
        try:
            found.update(timed(loop, torch.cuda))
        except RuntimeError as error:  # the memory was measured all the same
            found["message"] = f"not timed: {error}"[:LONGEST_MESSAGE]
    return {**found, **after}, history


def timed(loop: loops.RealLoop, cuda: Any) -> dict[str, list[float]]:
    """Seconds of making batches and of single updates, once the memory was measured.

    Making a batch on the CPU can take longer than the step: it is timed by itself, and the updates run on a batch that
    is there. They follow each other without waiting for the device, as in training, so that events on the device mark
    their ends; the last updates are waited for, and say how long the host takes to start one.

    Args:
        loop: after its last measured update.
        cuda: ``torch.cuda``.

    Returns:
        The fields of :class:`Measured`.
    """
    batches = [_seconds(loop.place_batch, cuda)[1] for _ in range(TIMED_BATCHES)]
    started = [_seconds(loop.repeat, cuda)[0] for _ in range(TIMED_STARTS)]
    ends = [_marked(cuda)]
    before = time.perf_counter()
    while len(ends) <= MOST_TIMED and time.perf_counter() - before < LONGEST_TIMED:
        loop.repeat()
        ends.append(_marked(cuda))
    cuda.synchronize()
    milliseconds = [one.elapsed_time(next_one) for one, next_one in pairwise(ends)]
    return {
        "batch_seconds": batches,
        "start_seconds": started,
        "update_seconds": [round(each / 1000, 6) for each in milliseconds],
    }


def _seconds(work: Callable[[], None], cuda: Any) -> tuple[float, float]:
    """Seconds until the host had started some work on an idle device, and until it was done."""
    cuda.synchronize()
    before = time.perf_counter()
    work()
    started = time.perf_counter()
    cuda.synchronize()
    return round(started - before, 6), round(time.perf_counter() - before, 6)


def _marked(cuda: Any) -> Any:
    event = cuda.Event(enable_timing=True)
    event.record()
    return event


def is_out_of_memory(error: RuntimeError) -> bool:
    """True where the device was full: the allocator's own error, or a library that could not get its part."""
    return isinstance(error, torch.cuda.OutOfMemoryError) or any(sign in str(error) for sign in _SIGNS)


_SIGNS = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")


class _OnCpu:
    """Nothing to measure."""

    def before(self) -> dict[str, Any]:
        return {}

    def peak(self) -> list[int]:
        return []

    def after(self) -> tuple[dict[str, Any], None]:
        return {}, None


class _OnCuda:
    """The device's memory around one run."""

    def __init__(self, case: Case, used_before: int | None) -> None:
        self.case = case
        self.used_before = used_before
        self.used_context: int | None = None

    def before(self) -> dict[str, Any]:
        """Make the context, see what is free, start the recorder."""
        allow_tf32(self.case.tf32)
        torch.cuda.init()
        torch.cuda.synchronize()
        self.free, _ = torch.cuda.mem_get_info()
        self.used_context = environment.device_used()
        if self.case.history:
            torch.cuda.memory._record_memory_history(  # noqa: SLF001 - there is no public way
                "all", context="alloc", stacks="python", max_entries=MOST_ENTRIES
            )
        return {"free": self.free, "used_context": self.used_context}

    def peak(self) -> list[int]:
        torch.cuda.synchronize()
        allocations = int(torch.cuda.memory_stats().get("allocation.all.allocated", 0))
        return [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), allocations]

    def after(self) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """The state of the device at the end, and the history."""
        torch.cuda.synchronize()
        still_free, _ = torch.cuda.mem_get_info()
        found: dict[str, Any] = {
            "used_after": environment.device_used(),
            "outside": self.free - still_free - torch.cuda.memory_reserved(),
            "alloc_retries": int(torch.cuda.memory_stats().get("num_alloc_retries", 0)),
        }
        if not self.case.history:
            return found, None
        history = compacted(torch.cuda.memory._snapshot())  # noqa: SLF001
        torch.cuda.memory._record_memory_history(None)  # noqa: SLF001 - a stack for every block takes the host's time
        return {**found, "has_history": True}, history
