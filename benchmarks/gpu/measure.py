"""Measure the suite on the GPU of this machine, each case in a fresh process.

    python -m benchmarks.gpu.measure [--out DIR] [--minutes N] [--only WORD ...]

Run from the root of the repository; needs torch and transformers, and nothing of this project installed
(``PYTHONPATH=.:integrations``). Writes ``results.json`` and ``histories.json.gz`` into DIR/<gpu>-<torch>/, anew after
every case: a run that is cut short keeps what it has. Cases that the minutes do not suffice for, that fail or that run
out of memory are recorded as that, and the rest goes on.

A fresh process here is a fork of a server that has imported torch and transformers and never touched CUDA: each has
a context, an allocator and library handles of its own, and no case waits for the imports. Cases with allocator
settings of their own start from nothing, because torch reads those when it is loaded.

``--device cpu`` tries every case's code with one sample where there is no GPU, and measures nothing.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError  # noqa: A004 - the built-in one from 3.11 on
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.gpu import worker
from benchmarks.gpu.cases import Case, find_cases
from benchmarks.gpu.facts import device_used, folder_name
from benchmarks.gpu.records import (
    LARGEST_HISTORIES,
    Machine,
    Measured,
    Results,
    write_histories,
    write_results,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

DEFAULT_OUT = Path(__file__).parent / "results"

#: Seconds after which a case is given up.
LONGEST_CASE = 90.0
LONGEST_PROBES = 60.0
#: Of a trace that chooses a batch size; these run beside the measurements, on the CPU.
LONGEST_FILL = 120.0

#: Imported once, by the server that all cases are forked from.
PRELOADED = [
    "torch",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.bert.modeling_bert",
    "transformers.models.llama.modeling_llama",
    "transformers.models.vit.modeling_vit",
    "benchmarks.gpu.networks",
]


#: For every child. The first keeps torch.cuda.is_available() from opening CUDA in the server, which could not be
#: forked afterwards; nothing is downloaded; warnings about ways of training say nothing about memory.
ENVIRONMENT = {
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "PYTHONWARNINGS": "ignore",
}
CONF = "PYTORCH_CUDA_ALLOC_CONF"


class Answer(NamedTuple):
    """What a child said."""

    result: Any
    error: str
    """Its traceback, or how it ended without a word."""
    seconds: float
    timed_out: bool = False


def main(arguments: list[str] | None = None) -> int:
    """Measure; the exit status is 1 where a case failed."""
    options = _options(arguments)
    cases = find_cases(options.only)
    if not cases:
        print(f"no case contains {' or '.join(map(repr, options.only))}", file=sys.stderr)
        return 2
    started = worker.clock()
    os.environ.update(ENVIRONMENT)
    used_before = device_used() if options.device == "cuda" else None
    told = run_child("machine", (options.device, used_before), LONGEST_CASE)
    if told.result is None:
        print(f"this GPU cannot be used:\n{told.error}", file=sys.stderr)
        return 1
    suite = Suite(Machine(**told.result), options, started)
    suite.run(cases)
    return int(any(each.status in ("error", "timeout") for each in suite.results.measured))


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu.measure", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, metavar="DIR", help="where the results go")
    parser.add_argument("--minutes", type=float, default=7.5, help="start no case that would end later than this")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="only cases whose names contain a WORD")
    parser.add_argument("--no-probes", action="store_true", help="leave out the probes of single operators")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    return parser.parse_args(arguments)


class Suite:
    """A run of the suite: what was measured so far, and its files."""

    def __init__(self, machine: Machine, options: argparse.Namespace, started: float) -> None:
        self.results = Results(machine=machine)
        self.histories: dict[str, Any] = {}
        self.device: str = options.device
        self.probes = not options.no_probes and options.device == "cuda"
        self.seconds = 60 * options.minutes
        self.started = started
        self.folder = options.out / folder_name(machine)
        #: Measured seconds over expected ones: the table's were guessed for one kind of GPU.
        self.pace = 1.0

    def run(self, cases: list[Case]) -> None:
        """Every case in turn; batch sizes that the card decides are worked out meanwhile."""
        print(f"{self.results.machine.gpu}, torch {self.results.machine.torch}: {len(cases)} cases", flush=True)
        with ThreadPoolExecutor(max_workers=max(1, min(4, (os.cpu_count() or 2) - 1))) as pool:
            waiting = deque((case, self._batch_size(case, pool)) for case in cases)
            if self.probes:
                self._run_probes()
            while waiting:
                case, size = waiting.popleft()
                self._add(self._measure(case, size))
        self._write()
        print(f"{self._elapsed():.0f} s; results in {self.folder}")

    def _batch_size(self, case: Case, pool: ThreadPoolExecutor) -> Future[Answer] | int:
        if self.device == "cpu":
            return 1
        if not case.fill:
            return case.batch_size
        machine = self.results.machine
        capability = (machine.compute_capability[0], machine.compute_capability[1])
        return pool.submit(run_child, "fill", (case, machine.free, capability), LONGEST_FILL)

    def _elapsed(self) -> float:
        return worker.clock() - self.started

    def _measure(self, case: Case, size: Future[Answer] | int) -> Measured:
        expected = case.seconds * self.pace
        if self._elapsed() + expected > self.seconds:
            message = (
                f"{self.seconds / 60:g} minutes do not suffice: {self._elapsed():.0f} s gone, {expected:.0f} s needed"
            )
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
        used_before = device_used() if self.device == "cuda" else None
        answer = run_child("case", (case, size, self.device, used_before), LONGEST_CASE, conf=case.allocator)
        self.pace += 0.2 * (answer.seconds / case.seconds - self.pace)
        if answer.result is None:
            status: Any = "timeout" if answer.timed_out else "error"
            seconds = round(answer.seconds, 2)
            return Measured(case=case, status=status, batch_size=size, message=answer.error, seconds=seconds)
        measured = worker.measured_from(case, answer.result["measured"], answer.seconds)
        return self._with_history(measured, answer.result["history"])

    def _with_history(self, measured: Measured, history: dict[str, Any] | None) -> Measured:
        if history is None:
            return measured
        self.histories[measured.case.name] = history
        write_histories(self.folder, self.histories)
        if _histories_size(self.folder) <= LARGEST_HISTORIES:
            return measured
        del self.histories[measured.case.name]
        write_histories(self.folder, self.histories)
        return replace(measured, has_history=False, message="history left out: the file would become too large")

    def _run_probes(self) -> None:
        answer = run_child("probes", (), LONGEST_PROBES)
        found = answer.result if answer.result is not None else [{"probe": "all", "error": answer.error}]
        self.results.probes.extend(found)
        print(f"{len(found)} probes of single operators, {answer.seconds:.0f} s", flush=True)

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


def _histories_size(folder: Path) -> int:
    from benchmarks.gpu.records import HISTORIES

    return (folder / HISTORIES).stat().st_size


# --- children -------------------------------------------------------------------------------------------------


def run_child(job: str, arguments: tuple[Any, ...], limit: float, *, conf: str = "") -> Answer:
    """Run one of worker.serve's jobs in a fresh process.

    Args:
        job: one of worker.serve's.
        arguments: the job's.
        limit: seconds; a child that takes longer is ended.
        conf: PYTORCH_CUDA_ALLOC_CONF; such a child starts a new interpreter. Main thread only.
    """
    began = worker.clock()
    multiprocessing.set_forkserver_preload(PRELOADED)
    context: Any = multiprocessing.get_context("spawn" if conf else "forkserver")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=worker.serve, args=(sender, job, arguments), daemon=True)
    with _allocator_conf(conf):
        child.start()
    sender.close()
    answer = _heard(receiver, limit)
    if answer is None:
        child.terminate()
        child.join(10)
        child.kill()
    child.join(60)
    seconds = worker.clock() - began
    if answer is None:
        return Answer(None, f"gave no answer within {limit:.0f} s and was ended", seconds, timed_out=True)
    if not answer:
        return Answer(None, f"the process died without a word, exit code {child.exitcode}", seconds)
    result, error = json.loads(answer)
    return Answer(result, error or "", seconds)


def _heard(receiver: Connection, limit: float) -> bytes | None:
    """What the child sent; b"" where it died first, None where it took too long."""
    try:
        return receiver.recv_bytes() if receiver.poll(limit) else None
    except EOFError:
        return b""
    finally:
        receiver.close()


@contextmanager
def _allocator_conf(conf: str) -> Iterator[None]:
    """A child's environment is its parent's at the moment of its start."""
    if not conf:
        yield
        return
    before = os.environ.get(CONF)
    os.environ[CONF] = conf
    try:
        yield
    finally:
        if before is None:
            del os.environ[CONF]
        else:
            os.environ[CONF] = before


if __name__ == "__main__":
    raise SystemExit(main())
