"""The table of the comparison with a GPU: allocated and reserved peaks, verdicts, and what lies below them."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.harness.pages import MIB
from benchmarks.harness.records import Results, Row
from benchmarks.harness.statistics import Errors

#: Rows that are listed as the worst.
MOST_LISTED = 8

#: Groups of cases, and what the summary calls them.
GROUPS = {
    "steps": "steps as written",
    "techniques": "techniques",
    "compiled": "compiled",
    "ranks": "one rank of several",
}

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
    if whole:
        yield f"\n{'median and 90th percentile of errors':50}{'rows':>5}{'allocated':>16}{'reserved':>16}{'lowest':>9}"
        yield from (f"{title:50}{count:>5}{a:>16}{r:>16}{low:>9}" for title, count, a, r, low in sums(whole))
    if rows:
        wrong = [row for row in rows if not row.right_verdict]
        yield f"\nverdicts: {len(rows) - len(wrong)} of {len(rows)} right"
        yield from (f"  wrong: {told(row)}" for row in wrong)
        worst = sorted(whole, key=lambda row: -abs(row.error))[:MOST_LISTED]
        yield from ("\nworst reserved:", *(f"  {row.error:+8.2%}  {row.name}" for row in worst))
    histories = [row.details["history"] for row in compared.rows if "history" in row.details]
    if histories:
        exact = sum(facts["same_segments"] for facts in histories)
        yield f"\nhistories: {exact} of {len(histories)} replayed segment by segment"
    yield from (f"\nnot compared: {name}: {why}" for name, why in compared.not_reproduced.items())
    yield from (f"\nFAILED: {name}\n{why}" for name, why in compared.failed.items())


def sums(rows: list[Row]) -> Iterator[tuple[str, ...]]:
    """Of all rows, of each card, group of cases and kind of network: number, errors' median and p90, lowest error."""
    chosen = {"all": rows}
    cards = dict.fromkeys(map(card_of, rows))
    chosen |= {card: [row for row in rows if card_of(row) == card] for card in cards if len(cards) > 1}
    chosen |= {title: [row for row in rows if row.details["group"] == group] for group, title in GROUPS.items()}
    kinds = sorted({row.network for row in rows if row.network})
    chosen |= {kind: [row for row in rows if row.network == kind] for kind in kinds}
    for title, found in chosen.items():
        errors = Errors.of([allocated_error(row) for row in found]), Errors.of([row.error for row in found])
        told_errors = [f"{one.median:.2%}, {one.p90:.1%}" for one in errors if one is not None]
        if found:
            yield title, str(len(found)), *told_errors, f"{min(row.error for row in found):+.1%}"


def card_of(row: Row) -> str:
    """The GPU that it was measured on."""
    return row.source.partition(",")[0]
