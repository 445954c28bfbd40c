"""Modules that hold memory at the peak: equal ones of a repeated part in one row."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from vram_guard.language import _
from vram_guard.module_names import kind_of, with_class
from vram_guard.printable import printable
from vram_guard.units import format_bytes

#: A name without one of its numbers: what stands before it, what stands after it, its class, and its bytes as shown.
_Place = tuple[tuple[str, ...], tuple[str, ...], str, str]


class Row(NamedTuple):
    """One module, or several that differ in a number of their names alone."""

    name: str
    equal: int
    total: int
    """Bytes of all of them."""

    def size(self) -> str:
        """The bytes as they are shown."""
        each = format_bytes(self.total // self.equal)
        return each if self.equal == 1 else _("{amount} each", amount=each)


def module_rows(held: Mapping[str, int]) -> list[Row]:
    """The modules and their bytes, those that hold most first."""
    groups = defaultdict[_Place, list[str]](list)
    for name, size in held.items():
        for place in _places(name, size):
            groups[place].append(name)
    taken, rows = Counter[str](), list[Row]()
    for (before, after, _kind, _size), names in sorted(groups.items(), key=lambda group: -len(group[1])):
        left = [name for name in names if not taken[name]]
        if len(left) < 2:
            continue
        taken.update(left)
        numbers = sorted(int(name.split(".")[len(before)]) for name in left)
        shown = ".".join([*before, _runs(numbers), *after])
        rows.append(Row(_shown(left[0], shown), len(left), sum(held[name] for name in left)))
    rows += [Row(_shown(name, name), 1, size) for name, size in held.items() if size and not taken[name]]
    return sorted(rows, key=lambda row: -row.total)


def _places(name: str, size: int) -> list[_Place]:
    """The name without each of its numbers."""
    parts = tuple(name.split("."))
    return [
        (parts[:at], parts[at + 1 :], kind_of(name), format_bytes(size))
        for at, part in enumerate(parts)
        if size and part.isdecimal() and part.isascii()
    ]


def _runs(numbers: list[int]) -> str:
    """Numbers in words: "0-10", "0-3+7"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return "+".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _shown(name: str, shown: str) -> str:
    return printable(with_class(name, shown), lines=False) or _("(outside any module)")
