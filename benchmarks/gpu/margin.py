"""How far predictions fall short, and the safety margin that follows from it.

    python -m benchmarks.gpu.margin [--write] FILE [FILE ...]

Each FILE is a ``results.json`` of this suite (predicted anew, which takes a while), what ``compare --json`` wrote, or
what ``benchmarks/published --json`` wrote. Of the published rows those count that measured what a budget is about: the
reserved bytes of whole training steps, or what the device used. Where that was NVML's figure, the margin also covers
what CUDA's libraries take beside the allocator.

--write makes ``vram_guard/budget/margins.json``, which the default margin is read from.

A margin m keeps the fraction m of the available memory A free: a step is said to fit where its prediction P is at most
(1 - m) A, and really fits where its measured peak M is at most A. So no step that is said to fit runs out of memory as
long as m >= 1 - P / M: that number, and 0 where the prediction was not too low, is a row's shortfall. The margin that
holds for 99 rows in 100 is the shortfalls' 99th percentile, by the tier that answered: a bound that is less sure needs
more room.

With few rows the percentile is the largest shortfall seen, and says little about the next row: "confidence" is the
probability that n rows drawn alike would show at least one beyond the true percentile (1 - 0.99 ** n).

The default margin is the 90th percentile (:data:`DEFAULT_QUANTILE`), not the 99th: the published shortfalls are a crowd
below 4% and a tail of a few rows from 8% to 22% that have causes of their own (workspaces of cuDNN and cuFFT, inputs
that a source does not give), so that the percentiles above jump from 3% to 12% and would take an eighth of every card
for them. All of them are written beside it. A tier with fewer rows than make that percentile sure (44) takes the margin
of all tiers.
"""

from __future__ import annotations

import argparse
import datetime as dt
import importlib
import json
import math
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vram_guard.errors import InvalidInputError

QUANTILE = 0.99

#: What the default margin is, and how sure a tier's rows must be about it.
DEFAULT_QUANTILE = 0.9
CONFIDENCE = 0.99

#: The tiers that may promise that a step fits. "formula" is a lower bound and never does.
PROMISING = ("symbolic", "partly symbolic")

#: Published sources whose rows are whole steps, measured in reserved bytes or the device's use, with a stated recipe.
COUNTED = (
    "xMem's runs, transformers",
    "xMem's runs, CNNs",
    "peft's methods, Llama-3.2-3B",
    "peft's methods, FLUX.2-klein-4B",
)

PUBLISHED = Path(__file__).parents[1] / "published"
PUBLISHED_FORMAT = "vram_guard published rows"

WRITTEN = Path(__file__).parents[2] / "vram_guard" / "budget" / "margins.json"

#: For rows of a file that does not say which tier answered.
UNTOLD = "tier not told"


class Prediction(NamedTuple):
    """One row: what was predicted and what was measured, in bytes of the same quantity."""

    predicted: int
    measured: int
    tier: str
    source: str = ""
    """Where the row comes from."""

    @property
    def shortfall(self) -> float:
        """The least margin under which this row's verdict could not have been a wrong "fits"."""
        return max(0.0, 1 - self.predicted / self.measured)


class Margin(NamedTuple):
    """The shortfalls of one tier."""

    tier: str
    rows: int
    too_low: int
    """Rows whose prediction was below the measurement."""
    median: float
    margin: float
    """The 99th percentile of the shortfall: a fraction."""
    largest: float
    confidence: float


def quantile(values: Iterable[float], share: float) -> float:
    """The nearest-rank quantile: the least value that at least ``share`` of them do not exceed.

    Raises:
        InvalidInputError: where there are no values.
    """
    ordered = sorted(values)
    if not ordered:
        raise InvalidInputError("no rows to take a quantile of: measure first")
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def margins(predictions: Sequence[Prediction], share: float = QUANTILE) -> list[Margin]:
    """One row for each tier, and one for all of them where there are several."""
    tiers = list(dict.fromkeys(each.tier for each in predictions))
    groups = [(tier, [each for each in predictions if each.tier == tier]) for tier in tiers]
    if len(groups) > 1:
        groups.append(("all", list(predictions)))
    return [_margin(tier, [each.shortfall for each in rows], share) for tier, rows in groups]


def _margin(tier: str, shortfalls: list[float], share: float) -> Margin:
    return Margin(
        tier=tier,
        rows=len(shortfalls),
        too_low=sum(each > 0 for each in shortfalls),
        median=quantile(shortfalls, 0.5),
        margin=quantile(shortfalls, share),
        largest=max(shortfalls),
        confidence=1 - share ** len(shortfalls),
    )


def read_predictions(path: Path) -> list[Prediction]:
    """The rows of one file, whichever of the three kinds it is.

    Raises:
        InvalidInputError: the message names the file and the field.
    """
    from benchmarks.gpu.compare import JSON_FORMAT
    from benchmarks.gpu.records import FORMAT

    try:
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise InvalidInputError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise InvalidInputError(f"{path} is truncated or no JSON ({error}): make it again") from error
    if isinstance(data, dict) and data.get("format") == FORMAT:
        return _from_results(path)
    if isinstance(data, dict) and data.get("format") == PUBLISHED_FORMAT:
        return _from_published(path)
    if isinstance(data, dict) and data.get("format") == JSON_FORMAT:
        rows = data.get("rows")
        return _from_rows(rows, f"{path}: rows", "measured_reserved", "predicted_reserved")
    raise InvalidInputError(
        f"{path}: field 'format' is {data.get('format') if isinstance(data, dict) else None!r}; expected one of "
        f"{FORMAT!r}, {JSON_FORMAT!r}, {PUBLISHED_FORMAT!r}"
    )


def _from_published(path: Path) -> list[Prediction]:
    if str(PUBLISHED) not in sys.path:
        sys.path.append(str(PUBLISHED))  # its modules are scripts beside each other, not a package
    rows = importlib.import_module("records").read(path).rows
    return [
        Prediction(row.predicted, row.measured, row.tier, row.source)
        for row in rows
        if row.has_peak and row.source in COUNTED
    ]


def _from_results(path: Path) -> list[Prediction]:
    from benchmarks.gpu.compare import compare_results
    from benchmarks.gpu.records import read_results

    rows = compare_results(read_results(path)).rows
    return [
        Prediction(row.predicted_reserved, row.measured_reserved, row.tier, str(path.parent.name))
        for row in rows
        if row.is_comparable
    ]


def _from_rows(rows: Any, where: str, measured: str, predicted: str) -> list[Prediction]:
    if not isinstance(rows, list):
        raise InvalidInputError(f"{where}: expected a list of rows, found {type(rows).__name__}")
    found = []
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise InvalidInputError(f"{where}[{number}]: expected an object, found {type(row).__name__}")
        if row.get("comparable", True) and not row.get("real_oom", False):  # where memory ran out, no peak was seen
            sizes = (_size(row, predicted, f"{where}[{number}]"), _size(row, measured, f"{where}[{number}]"))
            found.append(Prediction(*sizes, str(row.get("tier", UNTOLD)), "this suite"))
    return found


def _size(row: dict[str, Any], name: str, where: str) -> int:
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 2**63:
        raise InvalidInputError(f"{where}: field {name!r} must be bytes above 0, found {value!r}")
    return int(value)


def is_sure(rows: int) -> bool:
    """Whether so many rows would show one beyond the true percentile, if they were drawn alike."""
    return 1 - DEFAULT_QUANTILE**rows >= CONFIDENCE


def as_json(predictions: Sequence[Prediction], made: str) -> dict[str, Any]:
    """What ``margins.json`` holds; ``made`` is the date.

    Raises:
        InvalidInputError: too few rows.
    """
    promised = [each for each in predictions if each.tier in PROMISING]
    if not is_sure(len(promised)):
        raise InvalidInputError(f"{len(promised)} rows are too few for a margin: measure more")
    tiers = {}
    for tier in PROMISING:
        own = [each for each in promised if each.tier == tier]
        meant = own if is_sure(len(own)) else promised
        shortfalls = [each.shortfall for each in meant]
        tiers[tier] = {
            "tier": tier if meant is own else "all tiers",
            "rows": len(meant),
            "own_rows": len(own),
            "too_low": sum(each > 0 for each in shortfalls),
            "quantile": DEFAULT_QUANTILE,
            # Rounded up to a tenth of a percent.
            "margin": math.ceil(quantile(shortfalls, DEFAULT_QUANTILE) * 1000) / 1000,
            "shortfalls": {f"{each:g}": round(quantile(shortfalls, each), 4) for each in (0.5, 0.75, 0.9, 0.95, 0.99)},
            "largest": round(max(shortfalls), 4),
        }
    counts = Counter(each.source for each in promised)
    return {"format": "vram_guard margins", "version": 1, "made": made, "sources": dict(counts), "tiers": tiers}


def main(arguments: list[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="benchmarks.gpu.margin", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--write", action="store_true", help=f"also make {WRITTEN.name} of the default margins")
    options = parser.parse_args(arguments)
    try:
        predictions = [each for path in options.files for each in read_predictions(path)]
        found = margins(predictions) if predictions else []
        if options.write and predictions:
            made = dt.datetime.now(tz=dt.timezone.utc).date().isoformat()
            WRITTEN.write_text(json.dumps(as_json(predictions, made), indent=1) + "\n", encoding="utf-8")
    except InvalidInputError as error:
        print(error, file=sys.stderr)
        return 2
    if not found:
        print("the files hold no rows with both a prediction and a measurement", file=sys.stderr)
        return 2
    head = ("tier", "rows", "too low", "median", f"p{100 * QUANTILE:g}", "largest", "confidence")
    print(f"{head[0]:20}{head[1]:>6}{head[2]:>9}{head[3]:>9}{head[4]:>9}{head[5]:>9}{head[6]:>12}")
    for row in found:
        print(
            f"{row.tier:20}{row.rows:>6}{row.too_low:>9}{row.median:>9.2%}{row.margin:>9.2%}{row.largest:>9.2%}"
            f"{row.confidence:>12.0%}"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
