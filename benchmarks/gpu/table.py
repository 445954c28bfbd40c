"""The table of the comparison with a GPU: allocated and reserved peaks, verdicts, and what lies below them."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.harness.records import Results, Row
from benchmarks.harness.statistics import Errors, shortfalls

MIB = 2**20

#: Rows that are listed as the worst.
MOST_LISTED = 8

#: The margin that is printed holds for this share of the rows.
SURE = 0.99

HEAD = (
    f"{'case':58} {'batch':>6} {'alloc MiB':>9} {'predicted':>9} {'error':>8} {'reserved':>9} {'predicted':>9} "
    f"{'error':>8}  {'verdict':14} tier"
)


def allocated_error(row: Row) -> float:
    """Of the allocated peak, signed and relative to the measurement."""
    return float(row.details["predicted_allocated"] / row.details["allocated"] - 1)


def _pair(measured: int, predicted: int, error: float) -> str:
    return f"{measured / MIB:9.0f} {predicted / MIB:9.0f} {error:+8.2%}"


def told(row: Row) -> str:
    """One line for a row; one that ran out of memory has no peaks."""
    allocated = reserved = f"{'-':>9} {'-':>9} {'-':>8}"
    if row.has_peak:
        details = row.details
        allocated = _pair(details["allocated"], details["predicted_allocated"], allocated_error(row))
        reserved = _pair(row.measured or 0, row.predicted or 0, row.error)
    verdict = ("fits" if row.fits else "does not") + ("" if row.right_verdict else " WRONG")
    return f"{row.name[:58]:58} {row.details['batch_size']:>6} {allocated} {reserved}  {verdict:14} {row.tier}"


def summary(compared: Results) -> Iterator[str]:
    """The lines below the table."""
    rows = [row for row in compared.rows if row.predicted is not None]
    whole = [row for row in rows if row.has_peak]
    yield from _errors(whole)
    if rows:
        wrong = [row for row in rows if not row.right_verdict]
        yield f"\nverdicts: {len(rows) - len(wrong)} of {len(rows)} right"
        yield from (f"  wrong: {told(row)}" for row in wrong)
    if whole:
        yield "\nworst reserved:"
        worst = sorted(whole, key=lambda row: -abs(row.error))[:MOST_LISTED]
        yield from (f"  {row.error:+8.2%}  {row.name}" for row in worst)
        yield "\nmargin that 99 rows in 100 need:"
        for found in shortfalls(whole, SURE):
            yield f"  {found.tier}: {found.margin:.2%} ({found.rows} rows, {found.too_low} of them too low)"
    histories = [row.details["history"] for row in compared.rows if "history" in row.details]
    if histories:
        exact = sum(facts["same_segments"] for facts in histories)
        yield f"\nhistories: {exact} of {len(histories)} replayed segment by segment"
    yield from (f"\nnot compared: {name}: {why}" for name, why in compared.not_reproduced.items())
    yield from (f"\nFAILED: {name}\n{why}" for name, why in compared.failed.items())


def _errors(rows: list[Row]) -> Iterator[str]:
    """Errors of all rows, and by tier, precision and network where there are several."""
    if not rows:
        return
    head = f"{'median':>9}{'p90':>9}{'bias':>9}"
    yield f"\n{'':24}{'':>5}{'allocated':>27}{'reserved':>29}\n{'':24}{'rows':>5}{head}  {head}"
    yield _summed("all", rows)
    for kind in ("tier", "precision", "network"):
        kinds = [row.tier if kind == "tier" else row.details[kind] for row in rows]
        names = list(dict.fromkeys(kinds))
        for name in names if len(names) > 1 else ():
            group = [row for row, of_row in zip(rows, kinds, strict=True) if of_row == name]
            yield _summed(f"{kind} {name}", group)


def _summed(title: str, rows: list[Row]) -> str:
    allocated, reserved = Errors.of([allocated_error(row) for row in rows]), Errors.of([row.error for row in rows])
    return f"{title[:24]:24}{len(rows):>5}{allocated}  {reserved}"
