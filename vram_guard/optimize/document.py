"""A YAML (or JSON) config whose single values are changed in its text: every other byte stays as the person wrote it.

A parser that writes the whole file again keeps comments at best; indentation, quotes, line ends and the spelling of
numbers are then the parser's own. So values are replaced where PyYAML's node marks say that they stand, new entries
get a line of their own behind a neighbour, and the result is read again and compared before anybody sees it.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vram_guard.config_file import load_config, read_text
from vram_guard.errors import InvalidInputError
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

    @property
    def name(self) -> str:
        """The last key."""
        return self.place[-1]

    @property
    def path(self) -> str:
        """As people write it: "train.batch_size"."""
        return ".".join(self.place)


class ConfigChange(NamedTuple):
    """One value to be written, and why."""

    setting: str
    place: Place
    old: Any
    new: Any
    reason: str = ""
    behind: Place | None = None
    """Set where the entry is new: the neighbour that it comes behind."""

    @property
    def path(self) -> str:
        """As people write it: "train.batch_size"."""
        return ".".join(self.place)


class _Spot(NamedTuple):
    """The position of a value in the text."""

    key: yaml.Node
    value: yaml.Node
    shared: bool
    """An anchor makes it, or a mapping around it, stand in several places."""
    braces: bool
    """It stands inside braces, with others in its line."""


class Document:
    """A config as text, with its values and where they stand.

    Raises:
        InvalidInputError: whatever :func:`vram_guard.config_file.load_config` refuses.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        import yaml

        self.path = str(path)
        self.values = load_config(path)  # refuses bombs, tags and nonsense first
        self.text = read_text(path, LARGEST_CONFIG)
        with Path(path).open("rb") as file:
            self.mark = "\ufeff" if file.read(3) == b"\xef\xbb\xbf" else ""
        root = yaml.compose(self.text, Loader=yaml.SafeLoader)
        self._spots: dict[Place, _Spot] = {}
        if isinstance(root, yaml.MappingNode):
            self._walk(root, (), Counter(_nodes(root, set())), shared=False)

    def entries(self) -> list[Entry]:
        """Every value that is not a mapping, in the order of the file."""
        return [self._entry(place, spot) for place, spot in self._spots.items()]

    def can_add_behind(self, place: Place) -> bool:
        """True where a new entry may get a line of its own behind this one."""
        return not self._spots[place].braces

    def rewritten(self, changes: Iterable[ConfigChange]) -> str:
        """The text with these values changed or added.

        Raises:
            InvalidInputError: the file is written so that this cannot be done safely.
        """
        import yaml

        edits: list[tuple[int, int, str]] = []
        wanted = yaml.safe_load(self.text)
        for change in changes:
            spot = self._spots[change.behind or change.place]
            start, end = spot.value.start_mark.index, spot.value.end_mark.index
            new = written(change.new, "" if change.behind else self.text[start:end])
            _set(wanted, change.place, yaml.safe_load(new))
            if change.behind is None:
                edits.append((start, end, f" {new}" if start == end else new))  # "key:" with nothing behind it
                continue
            newline = "\r\n" if "\r\n" in self.text else "\n"
            line_end = self.text.find(newline, end)
            at = len(self.text) if line_end < 0 else line_end
            edits.append((at, at, f"{newline}{' ' * spot.key.start_mark.column}{change.place[-1]}: {new}"))
        text, at = "", 0
        for start, end, new in sorted(edits, key=lambda edit: edit[0]):
            text, at = text + self.text[at:start] + new, end
        text += self.text[at:]
        if yaml.safe_load(text) != wanted:
            raise InvalidInputError(
                _("{path} is written so that it cannot be changed safely: change it by hand", path=self.path)
            )
        return self.mark + text

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
                self._spots[inner] = _Spot(key, value, shared or visits[id(value)] > 1, bool(node.flow_style))

    def _entry(self, place: Place, spot: _Spot) -> Entry:
        import yaml

        value: Any = self.values
        for key in place:
            value = next((inner for name, inner in value.items() if str(name) == key), None)
        raw = self.text[spot.value.start_mark.index : spot.value.end_mark.index]
        plain = isinstance(spot.value, yaml.ScalarNode) and not raw.startswith(("&", "!", "|", ">"))
        return Entry(place, value, spot.key.start_mark.line + 1, plain and not spot.shared and "${" not in raw)


def _nodes(node: yaml.Node, seen: set[int]) -> Iterable[int]:
    """Each node as often as it is reached: more than once where an alias or a merge stands for it."""
    yield id(node)
    if id(node) in seen or not isinstance(node.value, list):
        return
    seen.add(id(node))
    for part in node.value:
        for inner in part if isinstance(part, tuple) else (part,):
            yield from _nodes(inner, seen)


def written(value: Any, like: str) -> str:
    """A value as YAML text, quoted where the old text was; numbers in plain digits, which every YAML reads as numbers.

    (PyYAML, YAML 1.1, reads "1e-4" as text.)
    """
    import yaml

    if isinstance(value, int):
        return str(value).lower()  # also of True and False
    if isinstance(value, float):
        digits = format(Decimal(f"{value:.12g}"), "f")
        value = digits if "." in digits else f"{digits}.0"
    elif isinstance(value, str) and yaml.safe_load(value) != value:  # "no" would be a bool
        return json.dumps(value)
    quote = like[:1] if like[:1] in "'\"" else ""
    return f"{quote}{value}{quote}"


def _set(values: Any, place: Place, value: Any) -> None:
    for key in place[:-1]:
        values = next(inner for name, inner in values.items() if str(name) == key)
    values[next((name for name in values if str(name) == place[-1]), place[-1])] = value
