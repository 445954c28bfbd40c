"""Measure the suite on the GPU of this machine, each case in a process of its own (harness/workers.py).

    python -m benchmarks gpu-measure [--out DIR] [--minutes N] [--only WORD ...]

Run from the root of the repository; needs torch and transformers, and nothing of this project installed
(``PYTHONPATH=.:integrations``). Writes ``results.json`` and ``histories.json.gz`` into DIR/<gpu>-<torch>/, anew after
every case: a run that is cut short keeps what it has. Cases that the minutes do not suffice for, that fail or that run
out of memory are recorded as that, and the others are still predicted.

``--device cpu`` tries every case's code with one sample where there is no GPU, and measures nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import deque
from concurrent.futures import (
    Future,
    ThreadPoolExecutor,
    TimeoutError,  # noqa: A004 - the built-in one from 3.11 on
    as_completed,
)
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.gpu import worker
from benchmarks.gpu.cases import Case, find_cases
from benchmarks.gpu.records import LARGEST_HISTORIES, Measured, Results, packed_size, write_histories, write_results
from benchmarks.harness.command import arguments_of
from benchmarks.harness.environment import Machine, device_used, folder_name
from benchmarks.harness.workers import Answer, ask, clock

DEFAULT_OUT = Path(__file__).parent / "results"

#: Seconds after which a case is given up.
LONGEST_CASE = 90.0
#: Of a case whose code is compiled first.
LONGEST_COMPILED = 240.0
#: A run that is cut short lacks so many at most.
HISTORIES_BETWEEN_WRITES = 6
#: What a case that shares the GPU cannot say.
OF_THE_WHOLE_GPU: dict[str, Any] = {
    **dict.fromkeys(("used_before", "used_context", "used_after", "outside")),
    **{name: [] for name in ("update_seconds", "batch_seconds", "start_seconds")},
}
#: Of a trace that chooses a batch size; these run in parallel with the measurements, on the CPU.
LONGEST_FILL = 120.0


def main(arguments: list[str] | None = None) -> int:
    """Measure; the exit status is 1 where a case failed."""
    options = _options(arguments)
    cases = find_cases(options.only)
    if not cases:
        print(f"no case contains {' or '.join(map(repr, options.only))}", file=sys.stderr)
        return 2
    started = clock()
    answer = ask(
        worker.machine_of, options.device, _used(options.device), limit=LONGEST_CASE, fresh=options.device == "cuda"
    )
    if answer.result is None:
        print(f"this GPU cannot be used:\n{answer.error}", file=sys.stderr)
        return 1
    suite = Suite(Machine(**answer.result), options, started)
    suite.run(cases)
    return int(any(each.status in ("error", "timeout") for each in suite.results.measured))


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = arguments_of("gpu-measure", __doc__, only="cases")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, metavar="DIR", help="where the results go")
    parser.add_argument("--minutes", type=float, default=16.0, help="start no case that would end later than this")
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="compiled and divided cases that run at a time"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    return parser.parse_args(arguments)


def _used(device: str) -> int | None:
    return device_used() if device == "cuda" else None


class Suite:
    """A run of the suite: what was measured so far, and its files."""

    def __init__(self, machine: Machine, options: argparse.Namespace, started: float) -> None:
        self.results = Results(machine=machine)
        self.histories: dict[str, Any] = {}
        self.history_bytes = 0
        self.device: str = options.device
        self.seconds = 60 * options.minutes
        self.jobs: int = options.jobs
        self.started = started
        self.folder = options.out / folder_name(machine)
        #: Measured seconds over expected ones: the table's were guessed for one kind of GPU.
        self.pace = 1.0

    def run(self, cases: list[Case]) -> None:
        """Every case in turn; batch sizes that the card decides are worked out meanwhile."""
        print(f"{self.results.machine.gpu}, torch {self.results.machine.torch}: {len(cases)} cases", flush=True)
        with ThreadPoolExecutor(max_workers=max(1, min(4, (os.cpu_count() or 2) - 1))) as pool:
            waiting = deque((case, self._batch_size(case, pool)) for case in cases if case.alone)
            self._side_by_side([case for case in cases if not case.alone])
            while waiting:
                case, size = waiting.popleft()
                self._add(self._measure(case, size))
        self._write()
        if self.histories:
            write_histories(self.folder, self.histories)
        print(f"{self._elapsed():.0f} s; results in {self.folder}")

    def _side_by_side(self, cases: list[Case]) -> None:
        """Cases that may share the GPU: what NVML says of the whole device then means nothing, and is left out."""
        with ThreadPoolExecutor(max_workers=self.jobs) as pool:
            futures = {pool.submit(self._measure, case, case.batch_size): case for case in cases}
            for future in as_completed(futures):
                self._add(replace(future.result(), **OF_THE_WHOLE_GPU, free=self.results.machine.free))

    def _batch_size(self, case: Case, pool: ThreadPoolExecutor) -> Future[Answer] | int:
        if self.device == "cpu":
            return 1
        if not case.fill:
            return case.batch_size
        machine, capability = self.results.machine, self.results.capability
        known = machine.multiprocessors or None
        return pool.submit(ask, worker.size_that_fills, case, machine.free, capability, known, limit=LONGEST_FILL)

    def _elapsed(self) -> float:
        return clock() - self.started

    def _measure(self, case: Case, size: Future[Answer] | int) -> Measured:
        expected = case.seconds * self.pace
        if self._elapsed() + expected > self.seconds:
            gone, needed = f"{self._elapsed():.0f} s gone", f"{expected:.0f} s needed"
            message = f"{self.seconds / 60:g} minutes do not suffice: {gone}, {needed}"
            return Measured(case=case, status="skipped", message=message)
        if not isinstance(size, int):
            try:
                chosen = size.result(max(0.0, self.seconds - self._elapsed() - expected))
            except TimeoutError:
                return Measured(case=case, status="skipped", message="the time was up before its batch size was chosen")
            if chosen.result is None:
                message = f"the batch size could not be chosen:\n{chosen.error}"
                return Measured(case=case, status="error", message=message, seconds=round(chosen.seconds, 2))
            size = int(chosen.result)
        answer = ask(
            worker.case_of,
            case,
            size,
            self.device,
            _used(self.device),
            limit=LONGEST_COMPILED if case.compiled else LONGEST_CASE,
            conf=case.allocator,
            fresh=self.device == "cuda",
        )
        if case.alone:
            self.pace += 0.2 * (answer.seconds / case.seconds - self.pace)
        seconds = round(answer.seconds, 2)
        if answer.result is None:
            status: Any = "timeout" if answer.timed_out else "error"
            return Measured(case=case, status=status, batch_size=size, message=answer.error, seconds=seconds)
        measured = Measured(case=case, seconds=seconds, **answer.result["measured"])
        return self._with_history(measured, answer.result["history"])

    def _with_history(self, measured: Measured, history: dict[str, Any] | None) -> Measured:
        if history is None:
            return measured
        packed = packed_size(history)
        if self.history_bytes + packed > LARGEST_HISTORIES:
            return replace(measured, has_history=False, message="history left out: the file would become too large")
        self.histories[measured.case.name] = history
        self.history_bytes += packed
        if len(self.histories) % HISTORIES_BETWEEN_WRITES == 0:  # all of them are packed anew, which takes seconds
            write_histories(self.folder, self.histories)
        return measured

    def _add(self, measured: Measured) -> None:
        self.results.measured.append(measured)
        self._write()
        sizes = f"{measured.peak_allocated / 2**20:9.0f} {measured.peak_reserved / 2**20:9.0f} MiB"
        print(f"{measured.status:14}{sizes}{measured.seconds:6.1f} s  {measured.case.name}", flush=True)
        if measured.status in ("error", "timeout"):
            print(measured.message, file=sys.stderr, flush=True)

    def _write(self) -> None:
        self.results = replace(self.results, minutes=round(self._elapsed() / 60, 2))
        write_results(self.folder, self.results)
