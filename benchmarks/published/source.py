"""A source of published rows: how they are read, named and predicted, one by one."""

from __future__ import annotations

import csv
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.command import is_chosen
from benchmarks.harness.environment import environment, libraries
from benchmarks.harness.pages import MIB
from benchmarks.harness.records import NotReproducible, Results, Row
from vram_guard import Timeline, TrainingStep
from vram_guard.budget.catalogue import find_gpu
from vram_guard.simulate import trace_at

DATA = Path(__file__).parent / "data"

#: Rows that are named where many cannot be reproduced for one reason.
MOST_NAMED = 3

Record = dict[str, str]


@dataclass(frozen=True)
class Source:
    """One kind of rows."""

    title: str
    rows: Callable[[], Sequence[Any]]
    """Every row of the source's file."""
    name: Callable[[Any], str]
    """A row's name in the table."""
    predict: Callable[[Any], list[Row]]
    """Raises NotReproducible where the row cannot be run here."""
    libraries: str = ""
    """Folder under --libraries that goes before the installed packages."""
    environment: str = ""
    """Environment under --libraries whose Python runs it, where it is there."""


def records_of(file: str | Path) -> list[Record]:
    """All records of a file of ``data``, in its order."""
    with (DATA / file).open(encoding="utf-8", newline="") as opened:
        return list(csv.DictReader(opened))


def predicted(
    step: TrainingStep,
    size: int,
    card: str,
    answer: Callable[[Timeline], dict[str, Any]],
    **published: Any,
) -> Row:
    """Trace the step at one batch size and take the row's answer from it.

    Args:
        step: what is trained.
        size: the batch size.
        card: the published run's GPU, by its name in the catalogue.
        answer: timeline -> the row's fields that are predicted.
        published: its other fields.
    """
    start = time.perf_counter()
    gpu = find_gpu(card)
    timeline = trace_at(step, size, compute_capability=gpu.compute_capability).on(gpu.multiprocessors, gpu.placement)
    fields = answer(timeline)
    seconds = time.perf_counter() - start
    upper = timeline.at(size).peak_upper or None
    return Row(tier=timeline.tier, network=timeline.network, upper=upper, seconds=seconds, **published, **fields)


def run(source: Source, only: Sequence[str] = (), tell: Callable[[str], None] = lambda _: None) -> Results:
    """Predict every row; a row that fails is kept with its traceback, and the others are still predicted.

    Args:
        source: whose rows.
        only: words; rows whose names contain one of them. None: all.
        tell: is given a line about each row as it is done.
    """
    found = Results(made_with={source.title: libraries()}, environment=environment())
    reasons: dict[str, list[str]] = {}
    for record in source.rows():
        name = source.name(record)
        if not is_chosen(name, only):
            continue
        try:
            rows = source.predict(record)
        except NotReproducible as reason:
            reasons.setdefault(str(reason), []).append(name)
        except Exception:  # noqa: BLE001 - one row must not stop the others
            found.failed[f"{source.title}: {name}"] = traceback.format_exc()
            tell(f"{name[:60]:60} FAILED")
        else:
            found.rows += rows
            for row in rows:
                tell(told(row))
    for why, names in reasons.items():
        shown = ", ".join(names[:MOST_NAMED]) + (", ..." if len(names) > MOST_NAMED else "")
        listed = shown if len(names) == 1 else f"{len(names)} rows ({shown})"
        found.not_reproduced[f"{source.title}: {listed}"] = why
    return found


def told(row: Row) -> str:
    """One line for a row."""
    peak = row.measured is not None and row.ran is not False
    measured = f"{(row.measured or 0) / MIB:11.2f}" if peak else f"{'-':>11}"
    error = f"{row.error:+9.3%}" if peak else f"{'':9}"
    verdict = "" if row.fits is None else "fits" if row.fits else "does not fit"
    verdict += " WRONG" if row.right_verdict is False else ""
    kept = "" if row.judged else " (not judged)"
    answer = f"{(row.predicted or 0) / MIB:11.2f} MiB {error} {verdict:18} {row.seconds:6.2f} s"
    return f"{row.name[:60]:60} {measured} {answer}  {row.tier}{kept}"
