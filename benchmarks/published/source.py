"""A source of published rows: how they are read, named and predicted, one by one, and its command line."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from records import NotReproducible, Results, Row, libraries, write
from table import print_table

#: Rows that are named where many cannot be reproduced for one reason.
MOST_NAMED = 3


@dataclasses.dataclass(frozen=True)
class Source:
    """One kind of rows."""

    title: str
    rows: Callable[[], Sequence[Any]]
    """Every row of the source's file."""
    name: Callable[[Any], str]
    predict: Callable[[Any], list[Row]]
    """Raises NotReproducible where the row cannot be run here."""


def run(source: Source, *, only: Sequence[str] = (), tell: Callable[[str], None] = lambda _: None) -> Results:
    """Predict every row; a row that fails is kept with its traceback, and the rest goes on.

    Args:
        source: whose rows.
        only: words; rows whose names contain one of them. None: all.
        tell: is given a line about each row as it is done.
    """
    found = Results(made_with={source.title: libraries()})
    reasons: dict[str, list[str]] = {}
    for record in source.rows():
        name = source.name(record)
        if only and not any(word in name for word in only):
            continue
        try:
            predicted = source.predict(record)
        except NotReproducible as reason:
            reasons.setdefault(str(reason), []).append(name)
            continue
        except Exception:  # noqa: BLE001 - one row must not stop the others
            found.failed[f"{source.title}: {name}"] = traceback.format_exc()
            tell(f"{name[:60]:60} FAILED")
            continue
        found.rows += predicted
        for row in predicted:
            tell(told(row))
    for reason, names in reasons.items():
        found.not_reproduced[f"{source.title}: {_listed(names)}"] = reason
    return found


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:MOST_NAMED]) + (", ..." if len(names) > MOST_NAMED else "")
    return shown if len(names) == 1 else f"{len(names)} rows ({shown})"


def told(row: Row) -> str:
    """One line for a row."""
    measured = f"{row.measured / 2**20:11.2f}" if row.measured is not None and row.ran is not False else f"{'-':>11}"
    error = f"{row.error:+9.3%}" if row.measured is not None and row.ran is not False else f"{'':9}"
    verdict = ""
    if row.fits is not None:
        verdict = ("fits" if row.fits else "does not fit") + (
            "" if row.ran is None or row.fits == row.ran else " WRONG"
        )
    kept = "" if row.judged else " (not judged)"
    return (
        f"{row.name[:60]:60} {measured} {row.predicted / 2**20:11.2f} MiB {error} {verdict:18} {row.seconds:6.2f} s"
        f"  {row.tier}{kept}"
    )


def main(arguments: Sequence[str] | None = None, **sources: Source) -> int:
    """The command line of a module and its sources, by kind; the exit status is 1 where a row failed."""
    parser = argparse.ArgumentParser(description=(sys.modules["__main__"].__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="only rows whose names contain a WORD")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every row to FILE")
    parser.add_argument("--kind", choices=list(sources), help="only this source")
    options = parser.parse_args(arguments)
    results = Results()
    for kind, source in sources.items():
        if options.kind in (None, kind):
            results.add(run(source, only=options.only, tell=lambda line: print(line, flush=True)))
    print_table(results)
    if options.json:
        write(results, options.json)
    return int(bool(results.failed))
