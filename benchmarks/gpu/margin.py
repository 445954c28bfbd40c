"""The shortfall of predictions, and the safety margin that follows from it.

    python -m benchmarks margin [--write] FILE [FILE ...]

Each FILE is a ``results.json`` of this suite (predicted anew, which takes a while), or rows as ``gpu-compare --json``
and ``published --json`` write them; those of peft's and rasbt's runs lie in ``benchmarks/published/results``. Of the
published rows those count that measured what a budget is about: the reserved bytes of whole training steps, or what
the device used. Where that was NVML's figure, the margin also covers what CUDA's libraries take beside the allocator.

--write makes ``vram_guard/budget/margins.json``, which the default margin is read from, and fills in its table on
docs/lab/accuracy.md.

A margin m keeps the fraction m of the available memory A free: a step is said to fit where its prediction P is at most
(1 - m) A, and really fits where its measured peak M is at most A. So no step that is said to fit runs out of memory as
long as m >= 1 - P / M: that number, and 0 where the prediction was not too low, is a row's shortfall. The margin is the
shortfalls' 90th percentile, by the tier that answered and the kind of network; docs/lab/accuracy.md says why.

Rows that repeat another one count once (:func:`distinct`). Fewer than 22 rows are too few: among that many, drawn
alike, the chance is nine in ten that at least one lies beyond the true 90th percentile. Where a tier has fewer of a
kind, that kind's rows of all tiers count; where those are too few, the tier's rows of all kinds; and last all rows.
"""

from __future__ import annotations

import datetime as dt
import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.compare import compare_results
from benchmarks.gpu.records import FORMAT, read_results
from benchmarks.harness import records
from benchmarks.harness.checked import content, parsed, without_head, write_json
from benchmarks.harness.command import arguments_of
from benchmarks.harness.pages import DOCS, fill
from benchmarks.harness.records import Row
from benchmarks.harness.statistics import quantile, shortfall
from vram_guard.budget.margins import ALL_NETWORKS, ALL_ROWS, NETWORKS
from vram_guard.errors import InvalidInputError

#: What the default margin is, and how sure a group's rows must be about it.
DEFAULT_QUANTILE = 0.9
CONFIDENCE = 0.9

#: The tiers that may promise that a step fits. "formula" is a lower bound and never does.
PROMISING = ("symbolic", "partly symbolic")

#: Published sources whose rows are whole steps, measured in reserved bytes or the device's use, with a stated recipe.
COUNTED = (
    "xMem's runs, transformers",
    "xMem's runs, CNNs",
    "peft's methods, Llama-3.2-3B",
    "peft's methods, FLUX.2-klein-4B",
    "rasbt's ViT-L/16",
)

WRITTEN = Path(__file__).parents[2] / "vram_guard" / "budget" / "margins.json"


def read_rows(path: Path) -> list[Row]:
    """The rows of one file that a margin can be taken from: measured by this suite, or of a source that counts.

    Raises:
        InvalidInputError: the message names the file and the field.
    """
    data = parsed(content(path), path)
    without_head(data, path, records.VERSION, FORMAT, records.FORMAT)
    results = compare_results(read_results(path)) if data["format"] == FORMAT else records.read(path)
    return [row for row in results.rows if row.has_peak and (row.source in COUNTED or "allocated" in row.details)]


def distinct(rows: Sequence[Row]) -> list[Row]:
    """The rows without repetitions: one source's rows with the same peak and the same prediction are one measurement.

    Some were published twice, and one was taken over from another (benchmarks/published/data/SOURCES.md): what is
    counted twice would be drawn once.
    """
    found: dict[tuple[str, int | None, int | None], Row] = {}
    for row in rows:
        found.setdefault((row.source, row.measured, row.predicted), row)
    return list(found.values())


def is_sure(rows: int) -> bool:
    """True where so many rows, drawn alike, would show one beyond the true percentile."""
    return 1 - DEFAULT_QUANTILE**rows >= CONFIDENCE


def as_json(rows: Sequence[Row], made: str) -> dict[str, Any]:
    """The contents of ``margins.json``; ``made`` is the date.

    Raises:
        InvalidInputError: too few rows.
    """
    promised = distinct([row for row in rows if row.tier in PROMISING])
    if not is_sure(len(promised)):
        raise InvalidInputError(f"{len(promised)} rows are too few for a margin: measure more")
    found = []
    for tier in PROMISING:
        of_tier = [row for row in promised if row.tier == tier]
        for network in (None, *NETWORKS):
            own = of_tier if network is None else [row for row in of_tier if row.network == network]
            of_kind = [row for row in promised if row.network == network]
            groups = [] if network is None else [(network, own), (network, of_kind)]
            groups += [(ALL_NETWORKS, of_tier), (ALL_ROWS, promised)]
            group, meant = next(pair for pair in groups if is_sure(len(pair[1])))
            found.append({"tier": tier, "network": network, "group": group, "own_rows": len(own), **_entry(meant)})
    counts = Counter(row.source for row in promised)
    return {"format": "vram_guard margins", "version": 2, "made": made, "sources": dict(counts), "margins": found}


def _entry(rows: Sequence[Row]) -> dict[str, Any]:
    values = [shortfall(row) for row in rows]
    return {
        "rows": len(rows),
        "too_low": sum(each > 0 for each in values),
        "quantile": DEFAULT_QUANTILE,
        # Rounded up to a tenth of a percent.
        "margin": math.ceil(quantile(values, DEFAULT_QUANTILE) * 1000) / 1000,
        "shortfalls": {f"{each:g}": round(quantile(values, each), 4) for each in (0.5, 0.75, 0.9, 0.95, 0.99)},
        "largest": round(max(values), 4),
    }


def write_page(made: dict[str, Any], docs: Path = DOCS) -> None:
    """Fill in the table of the contents of ``margins.json``."""
    sources = "; ".join(f"{name}: {count}" for name, count in made["sources"].items())
    note = f"Made on {made['made']} from these rows: {sources}."
    fill("accuracy.md", {"margin": _cells(made["margins"])}, docs, note)


def _cells(entries: Sequence[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    for entry in entries:
        network, own, rows = entry["network"] or "all networks", entry["own_rows"], entry["rows"]
        taken = (entry["group"], own) == (network, rows)
        told = [f"{entry['shortfalls'][share]:.1%}" for share in ("0.5", "0.75", "0.95", "0.99")]
        told.insert(2, f"**{entry['margin']:.1%}**")
        count = str(own) if taken else f"{own}; {rows} are taken: {entry['group']}"
        yield (f"{entry['tier']}: {network}", count, *told, f"{entry['largest']:.1%}")


def main(arguments: list[str] | None = None) -> int:
    """Print the table."""
    parser = arguments_of("margin", __doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--write", action="store_true", help=f"also make {WRITTEN.name} of the default margins")
    options = parser.parse_args(arguments)
    try:
        rows = [row for path in options.files for row in read_rows(path)]
        made = as_json(rows, dt.datetime.now(tz=dt.timezone.utc).date().isoformat())
    except InvalidInputError as error:
        print(error, file=sys.stderr)
        return 2
    for cells in _cells(made["margins"]):
        print(" | ".join(cells))
    if options.write:
        write_json(WRITTEN, made)
        write_page(made)
    return 0
