"""Predict, without a GPU, what ``measure`` measured on one; replay the allocator histories that it recorded.

    python -m benchmarks.gpu.compare [FOLDER ...] [--json FILE] [--only WORD ...] [--no-predictions]

A FOLDER holds ``results.json`` and perhaps ``histories.json.gz``; without any, all of ``benchmarks/gpu/results``.
Rows are predicted for the compute capability and the free memory of the results' GPU, through vram_guard's public
functions. A row that cannot be predicted is shown with its traceback and the rest goes on. The exit status is 1 where
there is such a row, 2 for a file that cannot be read.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.history import expanded
from benchmarks.gpu.margin import Prediction, margins, quantile
from benchmarks.gpu.records import HISTORIES, RESULTS, Measured, Results, read_histories, read_results
from vram_guard.allocator import AllocatorSettings, Recording, RecordingComparison, compare, read_recording, replay
from vram_guard.errors import InvalidInputError
from vram_guard.timeline import Estimate, Timeline

JSON_FORMAT = "vram_guard compared with a GPU"
MIB = 2**20

OWN_RESULTS = Path(__file__).parent / "results"

#: Requests below this many bytes are left out where sequences are compared: scalars of losses and scalers.
LEAST_REQUEST = 4096

#: Rows and kinds of requests that are listed as the worst.
MOST_LISTED = 8


@dataclass(frozen=True)
class Row:
    """One case beside its prediction. Sizes in bytes."""

    name: str
    batch_size: int
    network: str
    precision: str
    tier: str
    measured_allocated: int
    measured_reserved: int
    predicted_allocated: int
    predicted_reserved: int
    really_fits: bool
    said_to_fit: bool
    seconds: float
    """Of the prediction; 0 where a trace for another batch size served again."""

    @property
    def is_comparable(self) -> bool:
        """Whether the peaks are those of a whole step: a step that ran out of memory has none."""
        return self.really_fits

    @property
    def allocated_error(self) -> float:
        """Signed, relative to the measurement."""
        return self.predicted_allocated / self.measured_allocated - 1

    @property
    def reserved_error(self) -> float:
        """Signed, relative to the measurement."""
        return self.predicted_reserved / self.measured_reserved - 1

    @property
    def right_verdict(self) -> bool:
        """Whether it was said to fit where it did, and not to where it did not."""
        return self.really_fits == self.said_to_fit


@dataclass(frozen=True)
class HistoryRow:
    """One recorded history beside its replay. Sizes in bytes."""

    name: str
    same_segments: bool
    first_difference: str
    segments: int
    recorded_reserved: int
    followed_reserved: int
    """Peak where every release of the recorded run is followed."""
    replayed_reserved: int
    """Peak where the allocations alone are given to a fresh allocator."""
    requests: str = ""
    """How the predicted requests differ from the recorded ones; "" where they were not compared."""


@dataclass(frozen=True)
class Compared:
    """Everything that a results file gave."""

    rows: list[Row] = field(default_factory=list)
    histories: list[HistoryRow] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    """Name -> traceback."""
    not_measured: dict[str, str] = field(default_factory=dict)
    """Name -> why there is nothing to compare with."""


class Predictor:
    """Traces each distinct step once."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self.capability = capability
        self._timelines: dict[Any, Timeline] = {}

    def timeline(self, measured: Measured) -> Timeline:
        """The case's two steps, for every batch size."""
        from vram_guard.simulate import trace

        key = measured.case.same_step()
        if key not in self._timelines:
            self._timelines[key] = trace(measured.case.step(), compute_capability=self.capability)
        return self._timelines[key]

    def row(self, measured: Measured) -> Row:
        """The measured case and its prediction, under the memory that was free."""
        started = time.perf_counter()
        timeline = self.timeline(measured)
        settings = AllocatorSettings.from_conf(measured.case.allocator)
        found = timeline.at(measured.batch_size, capacity=measured.free, settings=settings)
        fits = found.out_of_memory is None and found.tier != "formula"
        if found.out_of_memory is not None and measured.status == "ok":
            found = timeline.at(measured.batch_size, settings=settings)  # how far off was the verdict?
        return _row(measured, found, fits, time.perf_counter() - started)


def _row(measured: Measured, found: Estimate, fits: bool, seconds: float) -> Row:
    return Row(
        name=measured.case.name,
        batch_size=measured.batch_size,
        network=measured.case.network,
        precision="tf32" if measured.case.tf32 else measured.case.precision,
        tier=found.tier,
        measured_allocated=measured.peak_allocated,
        measured_reserved=measured.peak_reserved,
        predicted_allocated=found.peak_allocated,
        predicted_reserved=found.peak_reserved,
        really_fits=measured.status == "ok",
        said_to_fit=fits,
        seconds=round(seconds, 3),
    )


def compare_results(
    results: Results,
    histories: dict[str, Any] | None = None,
    *,
    where: str = "histories",
    only: Sequence[str] = (),
    predict: bool = True,
    tell: Callable[[str], None] = lambda _: None,
) -> Compared:
    """Predict every measured case, and follow every history.

    Args:
        results: what was measured.
        histories: case name -> columns.
        where: the histories' file, for messages.
        only: words; a case is taken whose name contains one of them. None: all.
        predict: False: only the histories.
        tell: is given a line about each case as it is done.
    """
    compared = Compared()
    predictor = Predictor((results.machine.compute_capability[0], results.machine.compute_capability[1]))
    for measured in results.measured:
        name = measured.case.name
        if only and not any(word in name for word in only):
            continue
        if measured.status not in ("ok", "out of memory"):
            compared.not_measured[name] = f"{measured.status}: {measured.message}"
            continue
        if measured.status == "ok" and not (measured.peak_allocated and measured.peak_reserved):
            compared.not_measured[name] = "no memory was measured (a run with --device cpu?)"
            continue
        if predict:
            with _reported(name, compared):
                compared.rows.append(predictor.row(measured))
                tell(_told(compared.rows[-1]))
        if histories and name in histories:
            with _reported(f"history of {name}", compared):
                history = expanded(histories[name], f"{where}: {name}")
                compared.histories.append(_history_row(measured, history, predictor if predict else None))
                tell(_told_history(compared.histories[-1]))
    return compared


class _reported:  # noqa: N801 - read as a word, after "with"
    """A failure inside becomes an entry of ``failed``; Ctrl-C passes."""

    def __init__(self, name: str, compared: Compared) -> None:
        self.name, self.compared = name, compared

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> bool:
        if not isinstance(error, Exception):
            return False
        self.compared.failed[self.name] = "".join(traceback.format_exception(error))
        return True


# --- histories ------------------------------------------------------------------------------------------------


def _history_row(measured: Measured, snapshot: dict[str, Any], predictor: Predictor | None) -> HistoryRow:
    recording = read_recording(snapshot)
    settings = AllocatorSettings.from_conf(measured.case.allocator)
    followed = compare(recording, settings)
    replayed = replay(recording.events, recording.sizes, settings=settings, streams=recording.streams)
    return HistoryRow(
        name=measured.case.name,
        same_segments=followed.same_segments,
        first_difference=_difference(followed),
        segments=len(recording.final),
        recorded_reserved=followed.recorded_peak_reserved,
        followed_reserved=followed.simulated_peak_reserved,
        replayed_reserved=replayed.peak_reserved,
        requests=_requests(measured, recording, predictor) if predictor is not None else "",
    )


def _difference(followed: RecordingComparison) -> str:
    found = followed.first_difference
    if found is not None:
        return f"at entry {found.event}: recorded {found.recorded}, simulated {found.simulated}"
    wrong = [count for count in followed.counts if count.recorded != count.simulated]
    return "; ".join(
        f"{each.recorded} segments of {each.total_size} bytes ({each.segment_type}), simulated {each.simulated}"
        for each in wrong
    )


def _requests(measured: Measured, recording: Recording, predictor: Predictor) -> str:
    """Where the predicted requests of the first two updates leave the recorded ones, and which are too many."""
    if measured.status != "ok" or len(measured.peaks) < 2 or measured.skipped_updates:
        return "not comparable"
    timeline = predictor.timeline(measured).exact(measured.batch_size)
    sizes = timeline.sizes(measured.batch_size)
    predicted = [sizes[event] for event in timeline.events if event >= 0 and sizes[event] >= LEAST_REQUEST]
    until = measured.peaks[1][2]
    allocations = [recording.sizes[event] for event in recording.events if event >= 0][:until]
    recorded = [size for size in allocations if size >= LEAST_REQUEST]
    same = _common_length(predicted, recorded)
    if same == len(predicted) == len(recorded):
        return f"all {same} the same"
    missed, invented = Counter(recorded) - Counter(predicted), Counter(predicted) - Counter(recorded)
    return (
        f"the first {same} of {len(recorded)} the same; not predicted: {_listed(missed)}; "
        f"only predicted: {_listed(invented)}"
    )


def _common_length(one: Sequence[int], other: Sequence[int]) -> int:
    for position, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return position
    return min(len(one), len(other))


def _listed(sizes: Counter[int]) -> str:
    """The kinds that weigh most."""
    if not sizes:
        return "none"
    heaviest = sorted(sizes.items(), key=lambda item: -item[0] * item[1])
    told = ", ".join(f"{count} x {size}" for size, count in heaviest[:MOST_LISTED])
    return told + (f" and {len(heaviest) - MOST_LISTED} kinds more" if len(heaviest) > MOST_LISTED else "")


# --- tables ---------------------------------------------------------------------------------------------------


def _pair(measured: int, predicted: int, error: float) -> str:
    return f"{measured / MIB:9.0f} {predicted / MIB:9.0f} {error:+8.2%}"


def _told(row: Row) -> str:
    if row.is_comparable:
        allocated = _pair(row.measured_allocated, row.predicted_allocated, row.allocated_error)
        reserved = _pair(row.measured_reserved, row.predicted_reserved, row.reserved_error)
    else:
        allocated = reserved = f"{'-':>9} {'-':>9} {'-':>8}"
    verdict = ("fits" if row.said_to_fit else "does not") + ("" if row.right_verdict else " WRONG")
    return f"{row.name[:58]:58} {row.batch_size:>6} {allocated} {reserved}  {verdict:14} {row.tier}"


HEAD = (
    f"{'case':58} {'batch':>6} {'alloc MiB':>9} {'predicted':>9} {'error':>8} {'reserved':>9} {'predicted':>9} "
    f"{'error':>8}  {'verdict':14} tier"
)


def _told_history(row: HistoryRow) -> str:
    verdict = "segments the same" if row.same_segments else f"segments DIFFER {row.first_difference}"
    replayed = f"peak {row.recorded_reserved}, followed {row.followed_reserved}, replayed {row.replayed_reserved}"
    return f"  history: {row.segments} {verdict}; {replayed}; requests: {row.requests or 'not compared'}"


def summary(compared: Compared) -> Iterator[str]:
    """The lines below the table."""
    whole = [row for row in compared.rows if row.is_comparable]
    if whole:
        spread = f"{'p95':>8}{'bias':>8}"
        yield f"\n{'':24}{'rows':>5}{'alloc median':>14}{spread}{'reserved median':>17}{spread}"
        yield _summed("all", whole)
        for kind in ("tier", "precision", "network"):
            names = list(dict.fromkeys(getattr(row, kind) for row in whole))
            for name in names if len(names) > 1 else ():
                yield _summed(f"{kind} {name}", [row for row in whole if getattr(row, kind) == name])
    if compared.rows:
        wrong = [row for row in compared.rows if not row.right_verdict]
        yield f"\nverdicts: {len(compared.rows) - len(wrong)} of {len(compared.rows)} right"
        yield from (f"  wrong: {_told(row)}" for row in wrong)
    if whole:
        yield "\nworst reserved:"
        worst = sorted(whole, key=lambda row: -abs(row.reserved_error))[:MOST_LISTED]
        yield from (f"  {row.reserved_error:+8.2%}  {row.name}" for row in worst)
        yield "\nmargin that 99 rows in 100 need:"
        predictions = [Prediction(row.predicted_reserved, row.measured_reserved, row.tier) for row in whole]
        for margin in margins(predictions):
            yield f"  {margin.tier}: {margin.margin:.2%} ({margin.rows} rows, {margin.too_low} of them too low)"
    if compared.histories:
        exact = sum(row.same_segments for row in compared.histories)
        yield f"\nhistories: {exact} of {len(compared.histories)} replayed segment by segment"
    yield from (f"\nnot compared: {name}: {why}" for name, why in compared.not_measured.items())
    yield from (f"\nFAILED: {name}\n{why}" for name, why in compared.failed.items())


def _summed(title: str, rows: list[Row]) -> str:
    allocated, reserved = [row.allocated_error for row in rows], [row.reserved_error for row in rows]
    return f"{title[:24]:24}{len(rows):>5}{_errors(allocated):>30}{_errors(reserved):>33}"


def _errors(errors: list[float]) -> str:
    absolute = [abs(error) for error in errors]
    return f"{quantile(absolute, 0.5):.2%}{quantile(absolute, 0.95):>8.2%}{quantile(errors, 0.5):>+8.2%}"


def as_json(compared: Compared) -> dict[str, Any]:
    """Everything, for other programs."""
    rows = [
        {**asdict(row), "comparable": row.is_comparable, "right_verdict": row.right_verdict} for row in compared.rows
    ]
    return {"format": JSON_FORMAT, **asdict(compared), "rows": rows}


def main(arguments: list[str] | None = None) -> int:
    """Compare and print."""
    parser = argparse.ArgumentParser(prog="benchmarks.gpu.compare", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything to FILE")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="only cases whose names contain a WORD")
    parser.add_argument("--no-predictions", action="store_true", help="only replay the histories: quick")
    options = parser.parse_args(arguments)
    folders = options.folders or sorted(path.parent for path in OWN_RESULTS.glob(f"*/{RESULTS}"))
    if not folders:
        print(f"{OWN_RESULTS} holds no results: run benchmarks.gpu.measure on a machine with a GPU", file=sys.stderr)
        return 2
    every = Compared()
    for folder in folders:
        try:
            results = read_results(folder / RESULTS)
            path = folder / HISTORIES
            histories = read_histories(path) if path.exists() else {}
        except InvalidInputError as error:
            print(error, file=sys.stderr)
            return 2
        machine = results.machine
        print(f"{machine.gpu}, torch {machine.torch}, CUDA {machine.cuda}, cuDNN {machine.cudnn}\n{HEAD}")
        found = compare_results(
            results,
            histories,
            where=str(path),
            only=options.only,
            predict=not options.no_predictions,
            tell=lambda line: print(line, flush=True),
        )
        for name in ("rows", "histories"):
            getattr(every, name).extend(getattr(found, name))
        every.failed.update(found.failed)
        every.not_measured.update(found.not_measured)
    for line in summary(every):
        print(line)
    if options.json:
        options.json.write_text(json.dumps(as_json(every), indent=1) + "\n", encoding="utf-8")
    return int(bool(every.failed))


if __name__ == "__main__":
    raise SystemExit(main())
