"""Predict, without a GPU, what ``measure`` measured on one; replay the allocator histories that it recorded.

    python -m benchmarks gpu-compare [FOLDER ...] [--json FILE] [--only WORD ...] [--write]

A FOLDER holds ``results.json`` and perhaps ``histories.json.gz``; without any, all of ``benchmarks/gpu/results``.
Rows are predicted for the compute capability and the free memory of the results' GPU, through vram_guard's public
functions, under the flags for TF32 that were measured; an installed cuDNN of the measured release is asked for
workspaces. A row that cannot be predicted is shown with its traceback, and the others are still predicted. The exit
status is 1 where there is such a row, 2 for a file that cannot be read. --write fills in docs/lab/measured.md.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.cases import allow_tf32
from benchmarks.gpu.history import expanded
from benchmarks.gpu.pages import write_page
from benchmarks.gpu.records import HISTORIES, RESULTS, Measured, read_histories, read_results
from benchmarks.gpu.records import Results as MeasuredResults
from benchmarks.gpu.replays import history_facts, told_history
from benchmarks.gpu.table import HEAD, summary, told
from benchmarks.harness.command import arguments_of, is_chosen
from benchmarks.harness.environment import Machine
from benchmarks.harness.records import Results, Row, write
from vram_guard import AllocatorSettings, Timeline, TrainingStep, trace
from vram_guard.errors import InvalidInputError
from vram_guard.simulate.compiled import Compiler, NotCompiledError
from vram_guard.simulate.operators.cudnn_choice import checked_choice, under
from vram_guard.simulate.operators.cudnn_library import Library, installed
from vram_guard.simulate.tracing.run import run_step

OWN_RESULTS = Path(__file__).parent / "results"

#: Seconds that one compilation may take.
LONGEST_COMPILED = 600.0


class Predictor:
    """Traces each distinct step once; code under ``torch.compile`` as compiled, in a copy of this process.

    The runs were on native Linux, where CUDA puts new segments below the earlier ones.
    """

    def __init__(
        self, source: str, capability: tuple[int, int], multiprocessors: int | None = None, cudnn: str = "off"
    ) -> None:
        self.source = source
        self.capability = capability
        self.multiprocessors = multiprocessors
        self.cudnn = cudnn
        self._timelines: dict[Any, Timeline] = {}

    def timeline(self, measured: Measured) -> Timeline:
        """The case's two steps, for every batch size; those of compiled code for the measured one alone.

        Raises:
            NotCompiledError: the compiled step could not be followed.
        """
        case, size = measured.case, measured.batch_size
        key = (case.same_step(), size if case.compiled else None)
        if key not in self._timelines:
            self._timelines[key] = self._compiled(case.step(), size) if case.compiled else self._traced(case.step())
        return self._timelines[key]

    def _traced(self, step: TrainingStep) -> Timeline:
        known: dict[str, Any] = {"compute_capability": self.capability, "multiprocessors": self.multiprocessors}
        return trace(step, **known, placement="below", cudnn=self.cudnn)

    def _compiled(self, step: TrainingStep, size: int) -> Timeline:
        def followed(asked: int) -> Timeline:
            return run_step(step, asked, self.capability, compiled=True)

        chosen = under(checked_choice(self.cudnn), followed)
        return Compiler(chosen, LONGEST_COMPILED)(size).on(self.multiprocessors, "below")

    def row(self, measured: Measured) -> Row:
        """The measured case and its prediction, under the memory that was free."""
        started = time.perf_counter()
        case, size = measured.case, measured.batch_size
        timeline = self.timeline(measured)
        settings = AllocatorSettings.from_conf(case.allocator)
        found = timeline.at(size, capacity=measured.free, settings=settings)
        fits = found.out_of_memory is None and found.tier != "formula"
        if found.out_of_memory is not None and measured.status == "ok":
            found = timeline.at(size, settings=settings)  # how far off was the verdict?
        return Row(
            source=self.source,
            name=case.name,
            measured=measured.peak_reserved or None,
            predicted=found.peak_reserved,
            tier=found.tier,
            network=found.network,
            seconds=round(time.perf_counter() - started, 3),
            ran=measured.status == "ok",
            fits=fits,
            details={
                "batch_size": size,
                "network": case.network,
                "group": case.group,
                "precision": "tf32" if case.tf32 else case.precision,
                "allocated": measured.peak_allocated,
                "predicted_allocated": found.peak_allocated,
            },
        )


def compare_results(
    results: MeasuredResults,
    histories: Mapping[str, Any] | None = None,
    *,
    where: str = "histories",
    only: Sequence[str] = (),
    tell: Callable[[str], None] = lambda _: None,
) -> Results:
    """Predict every measured case, and follow every history.

    Args:
        results: what was measured.
        histories: case name -> columns.
        where: the histories' file, for messages.
        only: words; a case is taken whose name contains one of them. None: all.
        tell: is given a line about each case as it is done.

    Returns:
        A row for each case; its ``details`` have the history's facts under "history".
    """
    machine = results.machine
    source = f"{machine.gpu}, torch {machine.torch}"
    environment = {"gpu": machine.gpu, "driver": machine.driver, "torch": machine.torch, "python": machine.python}
    compared = Results(environment=environment)
    predictor = Predictor(source, results.capability, machine.multiprocessors or None, _cudnn_of(machine))
    for measured in results.measured:
        name = measured.case.name
        if not is_chosen(name, only):
            continue
        reason = _not_measured(measured)
        if reason:
            compared.not_reproduced[name] = reason
            continue
        row = None
        with _reported(name, compared), _tf32(measured.case.tf32):
            row = predictor.row(measured)
            tell(told(row))
        if row is None:
            continue
        compared.rows.append(row)
        if histories and name in histories:
            with _reported(f"history of {name}", compared), _tf32(measured.case.tf32):
                snapshot = expanded(histories[name], f"{where}: {name}")
                row.details["history"] = history_facts(measured, snapshot, predictor.timeline(measured))
                tell(told_history(row.details["history"]))
    return compared


def _not_measured(measured: Measured) -> str:
    """The reason why there is nothing to compare with; "" where there is something."""
    if measured.status not in ("ok", "out of memory"):
        return f"{measured.status}: {measured.message}"
    if measured.status == "ok" and not (measured.peak_allocated and measured.peak_reserved):
        return "no memory was measured (a run with --device cpu?)"
    return ""


def _cudnn_of(machine: Machine) -> str:
    """The setting ``cudnn`` of the predictions: the installed one is asked where it is the release that was measured.

    Others choose other kernels, and another release's answers are no better than none (docs/lab/accuracy.md).
    """
    path = installed()
    try:
        return "ask" if path is not None and Library(path).version == machine.cudnn else "off"
    except OSError:  # a release that cannot be asked without a GPU
        return "off"


@contextmanager
def _tf32(allowed: bool) -> Iterator[None]:
    """The flags that the measuring process had (``worker``): the trace reads them from torch, as a training does."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    allow_tf32(allowed)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


@contextmanager
def _reported(name: str, compared: Results) -> Iterator[None]:
    """A failure inside becomes an entry of ``failed``, or of ``not_reproduced`` where code could not be compiled."""
    try:
        yield
    except NotCompiledError as error:
        compared.not_reproduced[name] = f"not compiled: {error}"
    except Exception:  # noqa: BLE001 - one row must not stop the others
        compared.failed[name] = traceback.format_exc()


def main(arguments: list[str] | None = None) -> int:
    """Compare and print."""
    parser = arguments_of("gpu-compare", __doc__, only="cases", json="everything")
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER")
    parser.add_argument("--write", action="store_true", help="fill in docs/lab/measured.md")
    options = parser.parse_args(arguments)
    folders = options.folders or sorted(path.parent for path in OWN_RESULTS.glob(f"*/{RESULTS}"))
    if not folders:
        print(f"{OWN_RESULTS} holds no results: run gpu-measure on a machine with a GPU", file=sys.stderr)
        return 2
    every = Results()
    for folder in folders:
        path = folder / HISTORIES
        try:
            results = read_results(folder / RESULTS)
            histories = read_histories(path) if path.exists() else {}
        except InvalidInputError as error:
            print(error, file=sys.stderr)
            return 2
        machine = results.machine
        asked = "asked for workspaces" if _cudnn_of(machine) == "ask" else "not installed here, or another: not asked"
        print(f"{machine.gpu}, torch {machine.torch}, CUDA {machine.cuda}, cuDNN {machine.cudnn} ({asked})\n{HEAD}")
        every.add(
            compare_results(
                results,
                histories,
                where=str(path),
                only=options.only,
                tell=lambda line: print(line, flush=True),
            )
        )
    for line in summary(every):
        print(line)
    if options.json:
        write(every, options.json)
    if options.write:
        write_page(every)
    return int(bool(every.failed))
