"""One row of any benchmark, and the document that carries the rows of a run from one program to the next."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness import checked
from vram_guard.errors import InvalidInputError

#: The name that files have had since only published measurements were kept in them.
FORMAT = "vram_guard published rows"

#: Raised by one whenever a field changes its meaning; files of another version are refused.
VERSION = 1


class NotReproducible(Exception):  # noqa: N818 - it is not an error of the row
    """This row cannot be run here; the message is the reason."""


@dataclass(frozen=True)
class Row:
    """One thing that was run, what was measured and what was predicted for it. Sizes in bytes."""

    source: str
    """The group of the table that it belongs to: where a measurement was published, a card, a tool, a training."""
    name: str
    measured: int | None
    """None: nothing was measured, or only whether it ran."""
    predicted: int | None
    """None: there is no answer; ``reason`` says why."""
    tier: str
    """The tier of our answer: "symbolic", "partly symbolic" or "formula"; "" where the answer is not ours."""
    seconds: float | None
    """That the answer took."""
    ran: bool | None = None
    """The step ran on that card; None: unknown. False: ``measured`` is not a peak."""
    fits: bool | None = None
    """Our verdict; None where there is none to give."""
    tools: dict[str, int] = field(default_factory=dict)
    """Another tool -> its prediction for the same run."""
    verdicts: dict[str, bool] = field(default_factory=dict)
    """Another tool -> whether it says that the step fits."""
    judged: bool = True
    """False: shown, but counted in no figure, because an input of the step was inferred from this row."""
    network: str | None = None
    """The kind of network, by the trace's operators (:data:`vram_guard.budget.margins.Network`); None: not known."""
    upper: int | None = None
    """The prediction with the most that workspaces of unknown size may take; None where none is unknown."""
    reason: str = ""
    """The reason why there is no prediction."""
    details: dict[str, Any] = field(default_factory=dict)
    """Further facts that the benchmark's own table shows."""

    @property
    def has_peak(self) -> bool:
        """True where the peak of a whole step was measured, and counts."""
        return bool(self.measured and self.predicted) and self.ran is not False and self.judged

    @property
    def error(self) -> float:
        """Signed, relative to the measurement; nan where one of the two is missing."""
        return self.error_of(self.predicted)

    def error_of(self, predicted: int | None) -> float:
        """The same of another prediction for this row."""
        return predicted / self.measured - 1 if predicted is not None and self.measured else float("nan")

    @property
    def right_verdict(self) -> bool | None:
        """True where our verdict is that of the run; None where one of them is not known."""
        return None if self.fits is None or self.ran is None else self.fits == self.ran


@dataclass
class Results:
    """The rows of one or several sources, and what is missing among them."""

    rows: list[Row] = field(default_factory=list)
    not_reproduced: dict[str, str] = field(default_factory=dict)
    """Row or group of rows -> the reason."""
    failed: dict[str, str] = field(default_factory=dict)
    """Row -> traceback."""
    made_with: dict[str, dict[str, str]] = field(default_factory=dict)
    """Source -> library -> version."""
    environment: dict[str, Any] = field(default_factory=dict)
    """Python, torch and cores of the machine; GPU and driver where there was one."""

    def add(self, other: Results) -> None:
        """Take over the rows of another run."""
        self.rows += other.rows
        for name in ("not_reproduced", "failed", "made_with", "environment"):
            getattr(self, name).update(getattr(other, name))

    def by_source(self) -> Iterator[tuple[str, list[Row]]]:
        """(source, its rows), in order of appearance."""
        for source in dict.fromkeys(row.source for row in self.rows):
            yield source, [row for row in self.rows if row.source == source]


def write(results: Results, path: Path) -> None:
    """Write everything as JSON."""
    checked.write_json(path, {"format": FORMAT, "version": VERSION, **asdict(results)})


def read(path: Path) -> Results:
    """Read a file that :func:`write` wrote.

    Raises:
        InvalidInputError: truncated, of another version, or with a field that is unknown, missing or of the wrong
            type; the message names the file and the field.
    """
    results = checked.read(Results, path, VERSION, FORMAT)
    for number, row in enumerate(results.rows):
        for name in ("measured", "predicted"):
            size = getattr(row, name)
            if size is not None and size <= 0:
                raise InvalidInputError(f"{path}: rows[{number}]: {name}: expected bytes above 0, found {size!r}")
    return results
