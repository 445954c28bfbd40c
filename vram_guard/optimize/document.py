"""A YAML (or JSON) config whose single values are changed in its text: every other byte stays as the person wrote it.

A parser that writes the whole file again keeps comments at best; indentation, quotes, line ends and the spelling of
numbers are then the parser's own. So values are replaced where PyYAML's node marks say that they stand, new entries
get a line of their own behind a neighbour, and the result is read again and compared before anybody sees it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from copy import deepcopy
from math import isclose, isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vram_guard.config_file import load_config, read_text
from vram_guard.errors import InvalidInputError
from vram_guard.interpolation import referred
from vram_guard.language import _
from vram_guard.limits import LARGEST_CONFIG

if TYPE_CHECKING:
    import yaml

Place = tuple[str, ...]
"""Keys from the top of the file down to a value."""


class Entry(NamedTuple):
    """One value of the config: a leaf of its mappings."""

    place: Place
    value: Any
    line: int
    """From 1."""
    editable: bool
    """True where the text can be replaced: a plain value that stands once, without anchor, alias, tag or reference."""
    holder: Place = ()
    """The entry that this one refers to as a whole, where its text is ``${data.batch_size}``; else its own place."""

    @property
    def name(self) -> str:
        """The last key."""
        return self.place[-1]

    @property
    def path(self) -> str:
        """As people write it: "train.batch_size"."""
        return ".".join(self.place)


class _Spot(NamedTuple):
    """The position of a value in the text."""

    key: yaml.Node
    value: yaml.Node
    flow: bool
    """Inside braces."""
    shared: bool
    """An anchor makes it, or a mapping around it, stand in several places."""


class Document:
    """A config as text, with its values and where they stand.

    Raises:
        InvalidInputError: whatever :func:`vram_guard.config_file.load_config` refuses.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        import yaml

        self.path = str(path)
        self.values = load_config(path)  # refuses bombs, tags and nonsense first
        self._written = load_config(path, resolve=False)
        self.text = read_text(path, LARGEST_CONFIG)
        with Path(path).open("rb") as file:
            self.mark = "\ufeff" if file.read(3) == b"\xef\xbb\xbf" else ""
        root = yaml.compose(self.text, Loader=yaml.SafeLoader)
        self._spots: dict[Place, _Spot] = {}
        if isinstance(root, yaml.MappingNode):
            self._walk(root, (), _visits(root), shared=False)

    def entries(self) -> list[Entry]:
        """Every value that is not a mapping, in the order of the file."""
        return [self._entry(place, spot) for place, spot in self._spots.items()]

    def rewritten(self, changes: Mapping[Place, Any], additions: Sequence[tuple[Place, str, Any]] = ()) -> str:
        """The text with these values changed and these entries added.

        Args:
            changes: place -> the new value (bool, int, float or str).
            additions: (place of the neighbour that it comes behind, key, value), in order.

        Raises:
            InvalidInputError: the file is written so that this cannot be done safely.
        """
        edits = [self._replacement(place, value) for place, value in changes.items()]
        behind: dict[Place, list[str]] = {}
        for neighbour, key, value in additions:
            behind.setdefault(neighbour, []).append(self._added(self._spots[neighbour], key, value))
        for neighbour, lines in behind.items():
            at = self._end_of(self._spots[neighbour])
            edits.append((at, at, "".join(lines)))
        text = self.text
        for start, end, new in sorted(edits, reverse=True):
            text = text[:start] + new + text[end:]
        self._check(text, changes, additions)
        return self.mark + text

    # --- reading ----------------------------------------------------------------------------------------------------

    def _walk(self, node: yaml.MappingNode, place: Place, visits: Mapping[int, int], *, shared: bool) -> None:
        import yaml

        shared = shared or visits[id(node)] > 1
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            inner = (*place, str(key.value))
            if isinstance(value, yaml.MappingNode):
                self._walk(value, inner, visits, shared=shared)
            else:
                self._spots[inner] = _Spot(key, value, bool(node.flow_style), shared or visits[id(value)] > 1)

    def _entry(self, place: Place, spot: _Spot) -> Entry:
        import yaml

        value: Any = self.values
        for key in place:
            value = _get(value, key)
        raw = self.text[spot.value.start_mark.index : spot.value.end_mark.index]
        plain = isinstance(spot.value, yaml.ScalarNode) and not raw.startswith(("&", "!", "|", ">"))
        editable = plain and not spot.shared and "${" not in raw
        return Entry(place, value, spot.key.start_mark.line + 1, editable, referred(self._written, place))

    # --- writing ----------------------------------------------------------------------------------------------------

    def _replacement(self, place: Place, value: Any) -> tuple[int, int, str]:
        spot = self._spots[place]
        start, end = spot.value.start_mark.index, spot.value.end_mark.index
        old = self.text[start:end]
        new = written(value, old)
        if start == end:  # "key:" with nothing behind it
            new = f" {new}"
        return start, end, new

    def _added(self, neighbour: _Spot, key: str, value: Any) -> str:
        quoted = self.text[neighbour.key.start_mark.index] == '"'
        if neighbour.flow:
            name = json.dumps(key) if quoted else key
            return f", {name}: {json.dumps(value) if quoted else written(value, '')}"
        indent = " " * neighbour.key.start_mark.column
        return f"{self._newline()}{indent}{key}: {written(value, '')}"

    def _end_of(self, spot: _Spot) -> int:
        """The position for an addition behind a value: the end of its line, or right behind it inside braces."""
        end: int = spot.value.end_mark.index
        if spot.flow:
            return end
        line_end = self.text.find("\n", end)
        if line_end < 0:
            return len(self.text)
        return line_end - 1 if self.text[line_end - 1] == "\r" else line_end

    def _newline(self) -> str:
        return "\r\n" if "\r\n" in self.text else "\n"

    def _check(self, text: str, changes: Mapping[Place, Any], additions: Sequence[tuple[Place, str, Any]]) -> None:
        """The text says what was meant, and nothing else changed."""
        import yaml

        wanted = deepcopy(self._written)
        for place, value in changes.items():
            _set(wanted, place, value)
        for neighbour, key, value in additions:
            _set(wanted, (*neighbour[:-1], key), value)
        try:
            found = yaml.safe_load(text)
        except yaml.YAMLError:
            found = None
        if not _same(found, wanted):
            raise InvalidInputError(
                _("{path} is written so that it cannot be changed safely: change it by hand", path=self.path)
            )


def _visits(root: yaml.Node) -> dict[int, int]:
    """Number of times each node is reached: more than once where an alias or a merge stands for it."""
    import yaml

    counts: dict[int, int] = {}
    pending = [root]
    while pending:
        node = pending.pop()
        counts[id(node)] = counts.get(id(node), 0) + 1
        if counts[id(node)] > 1:
            continue
        if isinstance(node, yaml.MappingNode):
            pending += [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            pending += node.value
    return counts


def written(value: Any, like: str) -> str:
    """A value as YAML text, in the style of the old text: text quoted like it, and numbers in its notation."""
    quote = like[:1] if like[:1] in "'\"" and like else ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        text = _number(value, like.strip("'\""))
        return f"{quote}{text}{quote}"
    if isinstance(value, int):
        return str(value)
    return f"{quote}{value}{quote}" if quote else _plain(str(value))


def _plain(text: str) -> str:
    """Without quotes only where YAML reads the same text back ("no" would be a bool)."""
    import yaml

    return text if yaml.safe_load(text) == text else json.dumps(text)


def _number(value: float, like: str) -> str:
    """1e-4 becomes 2e-4, 1.0e-4 becomes 2.0e-4, 0.0001 becomes 0.0002.

    PyYAML (YAML 1.1) reads "1e-4" as text and "1.0e-4" as a number: programs that read a config expect what was there.
    """
    digits = f"{value:.12g}"
    mantissa, e, exponent = f"{value:.11e}".partition("e")
    mantissa = mantissa.rstrip("0").rstrip(".")
    if "e" in like.lower():
        if "." in like and "." not in mantissa:
            mantissa += ".0"
        return f"{mantissa}e{int(exponent)}"
    if e in digits:  # %g chose the exponent by itself
        from decimal import Decimal

        return format(Decimal(digits), "f")
    return digits if "." in digits else f"{digits}.0"


def _get(value: Any, key: str) -> Any:
    """The entry whose key reads like this: keys may be numbers."""
    if not isinstance(value, Mapping):
        return None
    return next((inner for name, inner in value.items() if str(name) == key), None)


def _set(values: Any, place: Place, value: Any) -> None:
    for key in place[:-1]:
        values = _get(values, key)
    if isinstance(values, dict):
        name = next((name for name in values if str(name) == place[-1]), place[-1])
        values[name] = value


def _same(found: Any, wanted: Any) -> bool:
    """Equal; a number may stand as text (PyYAML's 1e-4), as it did before, and keys are compared as text."""
    if isinstance(found, Mapping) and isinstance(wanted, Mapping):
        mine, theirs = ({str(key): value for key, value in one.items()} for one in (found, wanted))
        return mine.keys() == theirs.keys() and all(_same(mine[key], theirs[key]) for key in mine)
    if isinstance(wanted, float) and isinstance(found, str | float):
        try:
            return isclose(float(found), wanted, rel_tol=1e-9) or (isnan(float(found)) and isnan(wanted))
        except ValueError:
            return False
    if isinstance(found, list) and isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(_same, found, wanted))
    return type(found) is type(wanted) and bool(found == wanted)
