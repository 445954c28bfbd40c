"""Rows of published measurements beside our predictions, and the file that carries them from one run to the next."""

from __future__ import annotations

import dataclasses
import json
import platform
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vram_guard.errors import InvalidInputError

FORMAT = "vram_guard published rows"

#: Raised by one whenever a field changes its meaning; files of another version are refused.
VERSION = 1

#: Libraries whose releases change what a step takes.
LIBRARIES = ("torch", "transformers", "torchvision", "timm", "peft", "diffusers")


class NotReproducible(Exception):  # noqa: N818 - it is no fault of the row's
    """This row cannot be run here; the message is the reason."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One published measurement and what was predicted for it. Sizes in bytes."""

    source: str
    """Title of the source, as in the table."""
    name: str
    measured: int | None
    """None: the source says only whether it ran."""
    predicted: int
    tier: str
    """How our answer came about: "symbolic", "partly symbolic" or "formula"."""
    seconds: float
    """That our prediction took."""
    ran: bool | None = None
    """Whether the step ran on that card; None: nothing was said about it. False: ``measured`` is no peak."""
    fits: bool | None = None
    """Our verdict; None where there is none to give."""
    tools: dict[str, int] = dataclasses.field(default_factory=dict)
    """Another tool -> its prediction for the same run."""
    verdicts: dict[str, bool] = dataclasses.field(default_factory=dict)
    """Another tool -> whether it says that the step fits."""
    judged: bool = True
    """False: shown, but counted in no figure, because an input of the step was inferred from this row."""

    @property
    def has_peak(self) -> bool:
        """Whether the peak of a whole step was measured, and counts."""
        return self.measured is not None and self.ran is not False and self.judged

    @property
    def error(self) -> float:
        """Signed, relative to the measurement; only where there is one."""
        assert self.measured is not None
        return self.predicted / self.measured - 1


@dataclasses.dataclass
class Results:
    """What one or several sources gave."""

    rows: list[Row] = dataclasses.field(default_factory=list)
    not_reproduced: dict[str, str] = dataclasses.field(default_factory=dict)
    """Row or group of rows -> the reason."""
    failed: dict[str, str] = dataclasses.field(default_factory=dict)
    """Row -> traceback."""
    made_with: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)
    """Source -> library -> version."""

    def add(self, other: Results) -> None:
        """Take over what another run gave."""
        self.rows += other.rows
        self.not_reproduced.update(other.not_reproduced)
        self.failed.update(other.failed)
        self.made_with.update(other.made_with)


def libraries() -> dict[str, str]:
    """Python's version and those of the installed libraries that matter."""
    from importlib import metadata

    def version(name: str) -> str | None:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return None

    versions = {name: version(name) for name in LIBRARIES}
    return {"python": platform.python_version(), **{name: each for name, each in versions.items() if each}}


def write(results: Results, path: Path) -> None:
    """Write everything as JSON."""
    rows = [dataclasses.asdict(row) for row in results.rows]
    data = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(results), "rows": rows}
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def read(path: Path) -> Results:
    """Read what :func:`write` wrote.

    Raises:
        InvalidInputError: truncated, of another version, or with a field that is unknown, missing or of the wrong
            type; the message names the file and the field.
    """
    try:
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise InvalidInputError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise InvalidInputError(f"{path} is truncated or no JSON ({error}): make it again") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise InvalidInputError(f"{path}: field 'format' must be {FORMAT!r}: this is another kind of file")
    if data.get("version") != VERSION:
        raise InvalidInputError(
            f"{path}: field 'version' is {data.get('version')!r} and this release reads {VERSION}: make it again"
        )
    rows = data.get("rows")
    if not isinstance(rows, list):
        raise InvalidInputError(f"{path}: field 'rows' must be a list, found {type(rows).__name__}")
    others = {name: value for name, value in data.items() if name not in ("format", "version", "rows")}
    found = Results(**_checked(others, Results, str(path), without="rows"))
    for number, row in enumerate(rows):
        where = f"{path}: rows[{number}]"
        if not isinstance(row, dict):
            raise InvalidInputError(f"{where}: expected an object, found {type(row).__name__}")
        found.rows.append(Row(**_checked(row, Row, where)))
    return found


def _checked(given: dict[str, Any], kind: Any, where: str, without: str = "") -> dict[str, Any]:
    wanted = {name: hint for name, hint in typing.get_type_hints(kind).items() if name != without}
    for name in given:
        if name not in wanted:
            raise InvalidInputError(f"{where}: unknown field {name!r}: the file is of another release, make it again")
    for name, hint in wanted.items():
        if name not in given:
            raise InvalidInputError(f"{where}: field {name!r} is missing: make the file again")
        if not _is_a(given[name], hint):
            told = getattr(hint, "__name__", str(hint))
            raise InvalidInputError(f"{where}: field {name!r} must be {told}, found {given[name]!r}"[:300])
        if name in ("measured", "predicted") and given[name] is not None and given[name] <= 0:
            raise InvalidInputError(f"{where}: field {name!r} must be bytes above 0, found {given[name]!r}")
    return given


def _is_a(value: Any, hint: Any) -> bool:
    """Whether a value read from JSON is of the type that a field is declared with."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_is_a(value, each) for each in arguments)
    if origin is dict:
        return isinstance(value, dict) and all(_is_a(v, arguments[1]) for v in value.values())
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def of_source(rows: list[Row]) -> Iterator[tuple[str, list[Row]]]:
    """(source, its rows), in order of appearance."""
    for source in dict.fromkeys(row.source for row in rows):
        yield source, [row for row in rows if row.source == source]
