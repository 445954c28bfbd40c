"""Dataclasses and named tuples as JSON text, and back: for values that travel between processes or are kept in files.

Reading is directed by annotations, so that tuples, nested classes and unions come back as what they were. Known are
None, bool, int, float, str, ``Literal``, tuples, lists, mappings with text keys, dataclasses, named tuples, messages,
and unions of these; ``object`` and ``Any`` stand for plain JSON values.
"""

from __future__ import annotations

import contextlib
import json
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from vram_guard.language import Message

T = TypeVar("T")

#: The annotations of a class: reading them compiles each.
_hints_of = cache(get_type_hints)


def to_json(value: object) -> str:
    """The value as JSON text; :func:`from_json` reads it back."""
    return json.dumps(to_plain(value))


def from_json(kind: type[T], text: str | bytes) -> T:
    """A value of this class from :func:`to_json`.

    Raises:
        ValueError: the text is not JSON, or no value of this class.
    """
    return from_plain(kind, json.loads(text))


def to_plain(value: object) -> Any:
    """The value as dicts, lists, strings and numbers."""
    if isinstance(value, Message):
        return {"text": value.text, "values": {name: _shown(one) for name, one in value.values}}
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {name: to_plain(part) for name, part in zip(value._fields, value, strict=True)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(part) for part in value]
    return value


def _shown(value: object) -> object:
    """A value of a message; all but plain ones as the message shows them."""
    return value if type(value) in (bool, int, float, str) else str(value)


def from_plain(kind: type[T], value: Any, where: str = "the value") -> T:
    """A value of this class from :func:`to_plain`.

    Args:
        kind: the class.
        value: dicts, lists, strings and numbers.
        where: the value's name in messages, such as the path of its file.

    Raises:
        ValueError: it is not a value of this class; the message names the part that is not.
    """
    try:
        return cast("T", _read(kind, value))
    except ValueError as error:
        raise ValueError(f"{where}{error}") from None


def _read(kind: Any, value: Any) -> Any:
    """The value; a message about a part of it begins with the way from here to there, as in "[3]: size: ..."."""
    origin, parts = get_origin(kind), get_args(kind)
    if kind in (Any, object):
        return value
    if origin in (Union, types.UnionType):
        return _read_union(parts, value)
    if origin is Literal:
        if value not in parts:
            raise ValueError(f": {value!r:.60} is not one of {', '.join(map(repr, parts))}")
        return value
    if origin in (tuple, list):
        _check(isinstance(value, list), "a list", value)
        kinds = _of_each(parts, len(value)) if origin is tuple else parts * len(value)
        return origin(_part(f"[{at}]", one, part) for at, (one, part) in enumerate(zip(kinds, value, strict=True)))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        _check(isinstance(value, dict), "an object", value)
        return {key: _part(f": {key}", parts[1], one) for key, one in value.items()}
    if isinstance(kind, type) and issubclass(kind, Message):
        _check(isinstance(value, dict), "an object", value)
        return kind.of(value["text"], value["values"])
    if isinstance(kind, type) and _fields_of(kind) is not None:
        _check(isinstance(value, dict), "an object", value)
        return _read_fields(kind, value)
    if kind is type(None) and value is None:
        return None
    if kind is float and type(value) is int:
        return float(value)
    _check(isinstance(kind, type) and type(value) is kind, getattr(kind, "__name__", str(kind)), value)
    return value


def _check(right: bool, wanted: str, value: Any) -> None:
    if not right:
        raise ValueError(f": expected {wanted}, found {type(value).__name__}")


def _part(name: str, kind: Any, value: Any) -> Any:
    try:
        return _read(kind, value)
    except ValueError as error:
        raise ValueError(f"{name}{error}") from None


def _read_union(kinds: tuple[Any, ...], value: Any) -> Any:
    """The first of the classes that the value is one of."""
    others = [kind for kind in kinds if kind is not type(None)]
    if len(others) == 1:
        return None if value is None else _read(others[0], value)
    for kind in kinds:
        with contextlib.suppress(ValueError):
            return _read(kind, value)
    raise ValueError(f": {value!r:.60} is none of {kinds}")


def _read_fields(kind: type, value: dict[str, Any]) -> Any:
    required = _fields_of(kind) or {}
    for name in value.keys() - required.keys():
        raise ValueError(f": unknown field {name!r}")
    for name, needed in required.items():
        if needed and name not in value:
            raise ValueError(f": missing field {name!r}")
    hints = _hints_of(kind)
    return kind(**{name: _part(f": {name}", hints[name], one) for name, one in value.items()})


@cache
def _fields_of(kind: type) -> Mapping[str, bool] | None:
    """The fields of a class, and whether each has to be given; None where it is neither of the known kinds."""
    if is_dataclass(kind):
        return {
            field.name: field.default is MISSING and field.default_factory is MISSING
            for field in fields(kind)
            if field.init
        }
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        defaults: Mapping[str, Any] = getattr(kind, "_field_defaults", {})
        return {name: name not in defaults for name in kind._fields}
    return None


def _of_each(parts: tuple[Any, ...], count: int) -> tuple[Any, ...]:
    """The classes of a tuple's items.

    Raises:
        ValueError: it has another number of them.
    """
    if len(parts) == 2 and parts[1] is Ellipsis:
        return parts[:1] * count
    if parts == ((),):  # Python 3.10: tuple[()]
        parts = ()
    if len(parts) != count:
        raise ValueError(f": expected {len(parts)} items, found {count}")
    return parts
