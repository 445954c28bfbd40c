"""References between entries as OmegaConf and Hydra write them, resolved without running anything.

``${data.batch_size}`` counts from the top of the file, ``${.width}`` from the section that it stands in.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from vram_guard.errors import InvalidInputError
from vram_guard.language import _
from vram_guard.limits import LONGEST_TEXT

#: A reference to another entry; resolvers (``${oc.env:HOME}``) and references inside references are none.
REFERENCE: Final = re.compile(r"(?<!\\)\$\{(\.*)([A-Za-z_]\w*(?:\.\w+|\[\w+\])*)\}")

Place = tuple[str, ...]
_MISSING: Final = object()


def resolved(path: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """A config with references to plain values replaced by them; every other text stays as it is.

    Args:
        path: of the file, for messages.
        config: its entries.

    Raises:
        InvalidInputError: references go round in a circle, or make text without end.

    Example:
        >>> resolved("c.yaml", {"size": 8, "data": {"batch_size": "${size}"}})
        {'size': 8, 'data': {'batch_size': 8}}
    """
    return _Resolver(path, config).mapping(config, ())


class _Resolver:
    def __init__(self, path: str, config: Mapping[str, Any]) -> None:
        self._path, self._config = path, config
        self._known: dict[Place, Any] = {}
        self._open: list[Place] = []

    def mapping(self, section: Mapping[Any, Any], place: Place) -> dict[Any, Any]:
        """A section with its references replaced."""
        made: dict[Any, Any] = {}
        for key, value in section.items():
            inner = (*place, str(key))
            made[key] = self.mapping(value, inner) if isinstance(value, Mapping) else self._value(inner, value)
        return made

    def _value(self, place: Place, value: Any) -> Any:
        if not isinstance(value, str) or "${" not in value:
            return value
        if place in self._known:
            return self._known[place]
        if place in self._open:
            raise InvalidInputError(
                _("{path}: the interpolation of {entry} contains itself", path=self._path, entry=".".join(place))
            )
        self._open.append(place)
        whole = REFERENCE.fullmatch(value)
        if whole:
            made = self._referred(whole, place)
        else:
            made = REFERENCE.sub(lambda one: str(self._referred(one, place)), value)
        if isinstance(made, str) and len(made) > LONGEST_TEXT:
            raise InvalidInputError(
                _("{path}: the interpolation of {entry} is too long", path=self._path, entry=".".join(place))
            )
        self._open.pop()
        self._known[place] = made
        return made

    def _referred(self, match: re.Match[str], place: Place) -> Any:
        """The value that a reference stands for; its own text where that is not a plain value."""
        target = _target(match, place)
        value = _MISSING if target is None else _value_at(self._config, target)
        if target is None or value is _MISSING or isinstance(value, (Mapping, list)):
            return match[0]
        return self._value(target, value)


def _target(match: re.Match[str], place: Place) -> Place | None:
    """The place that a reference at ``place`` names; None: above the top."""
    dots, name = match.groups()
    keys = tuple(name.replace("[", ".").replace("]", "").split("."))
    if not dots:
        return keys
    up = len(place) - len(dots)
    return None if up < 0 else (*place[:up], *keys)


def _value_at(config: Any, place: Place) -> Any:
    for key in place:
        if isinstance(config, list) and key.isdecimal() and int(key) < len(config):
            config = config[int(key)]
        elif isinstance(config, Mapping):
            config = next((value for name, value in config.items() if str(name) == key), _MISSING)
        else:
            return _MISSING
    return config
