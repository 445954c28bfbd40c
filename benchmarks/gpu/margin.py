"""How far predictions fall short, and the safety margin that follows from it.

    python -m benchmarks.gpu.margin FILE [FILE ...]

Each FILE is a ``results.json`` of this suite (predicted anew, which takes a while), what ``compare --json`` wrote, or
what ``benchmarks/published/xmem.py --json`` wrote. That one's measurements are NVML's, of the whole device: the margin
also covers what CUDA's libraries take beside the allocator.

A margin m keeps the fraction m of the available memory A free: a step is said to fit where its prediction P is at most
(1 - m) A, and really fits where its measured peak M is at most A. So no step that is said to fit runs out of memory as
long as m >= 1 - P / M: that number, and 0 where the prediction was not too low, is a row's shortfall. The margin that
holds for 99 rows in 100 is the shortfalls' 99th percentile, by the tier that answered: a bound that is less sure needs
more room.

With few rows the percentile is the largest shortfall seen, and says little about the next row: "confidence" is the
probability that n rows drawn alike would show at least one beyond the true percentile (1 - 0.99 ** n).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vram_guard.errors import InvalidInputError

QUANTILE = 0.99

#: For rows of a file that does not say which tier answered.
UNTOLD = "tier not told"


class Prediction(NamedTuple):
    """One row: what was predicted and what was measured, in bytes of the same quantity."""

    predicted: int
    measured: int
    tier: str

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
    if isinstance(data, dict) and data.get("format") == JSON_FORMAT:
        rows = data.get("rows")
        return _from_rows(rows, f"{path}: rows", "measured_reserved", "predicted_reserved")
    return _from_rows(data, f"{path}", "measured", "predicted")


def _from_results(path: Path) -> list[Prediction]:
    from benchmarks.gpu.compare import compare_results
    from benchmarks.gpu.records import read_results

    rows = compare_results(read_results(path)).rows
    return [Prediction(row.predicted_reserved, row.measured_reserved, row.tier) for row in rows if row.is_comparable]


def _from_rows(rows: Any, where: str, measured: str, predicted: str) -> list[Prediction]:
    if not isinstance(rows, list):
        raise InvalidInputError(f"{where}: expected a list of rows, found {type(rows).__name__}")
    found = []
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise InvalidInputError(f"{where}[{number}]: expected an object, found {type(row).__name__}")
        if row.get("comparable", True) and not row.get("real_oom", False):  # where memory ran out, no peak was seen
            sizes = (_size(row, predicted, f"{where}[{number}]"), _size(row, measured, f"{where}[{number}]"))
            found.append(Prediction(*sizes, str(row.get("tier", UNTOLD))))
    return found


def _size(row: dict[str, Any], name: str, where: str) -> int:
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 2**63:
        raise InvalidInputError(f"{where}: field {name!r} must be bytes above 0, found {value!r}")
    return int(value)


def main(arguments: list[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="benchmarks.gpu.margin", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    try:
        predictions = [each for path in options.files for each in read_predictions(path)]
        found = margins(predictions) if predictions else []
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
