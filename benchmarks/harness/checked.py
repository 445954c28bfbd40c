"""JSON files of this project: written whole or not at all, and read with every field checked."""

from __future__ import annotations

import json
import types
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from vram_guard.errors import InvalidInputError

T = TypeVar("T")


def replace_file(path: Path, content: bytes) -> None:
    """Write the file whole: a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(content)
    partial.replace(path)


def write_json(path: Path, data: Any) -> None:
    """Write ``data`` as JSON, whole."""
    replace_file(path, (json.dumps(data, indent=1) + "\n").encode())


def content(path: Path) -> bytes:
    """The bytes of a file.

    Raises:
        InvalidInputError: it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidInputError(f"cannot read {path}: {error.strerror}") from error


def parsed(text: bytes, path: Path) -> Any:
    """The JSON of a file.

    Raises:
        InvalidInputError: it is none.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"{path} is truncated or no JSON ({error}): make it again, or copy it again") from error


def without_head(data: Any, path: Path, version: int, *formats: str) -> dict[str, Any]:
    """The fields that follow ``format`` and ``version``.

    Raises:
        InvalidInputError: another kind of file, or another version.
    """
    found = data.get("format") if isinstance(data, dict) else None
    if found not in formats:
        raise InvalidInputError(f"{path}: field 'format' is {found!r}; expected {' or '.join(map(repr, formats))}")
    if data.get("version") != version:
        raise InvalidInputError(
            f"{path}: field 'version' is {data.get('version')!r}, this program reads {version}: make the file again, "
            "or read it with the release that wrote it"
        )
    return {name: value for name, value in data.items() if name not in ("format", "version")}


def built(kind: type[T], data: Any, where: str) -> T:
    """A dataclass from parsed JSON.

    Raises:
        InvalidInputError: a field is missing, unknown or of the wrong kind; the message names file and field.
    """
    if not isinstance(data, dict):
        raise InvalidInputError(f"{where}: expected an object, found {type(data).__name__}")
    known = {each.name: each for each in fields(kind)}  # type: ignore[arg-type]
    hints = get_type_hints(kind)
    for name in data:
        if name not in known:
            raise InvalidInputError(f"{where}: unknown field {name!r}")
    values = {}
    for name, each in known.items():
        if name in data:
            values[name] = _value(hints[name], data[name], f"{where}: {name}")
        elif each.default is MISSING and each.default_factory is MISSING:
            raise InvalidInputError(f"{where}: missing field {name!r}")
    return kind(**values)


def _value(hint: Any, value: Any, where: str) -> Any:
    """``value`` where it is what the annotation says."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        return None if value is None else _value(next(a for a in arguments if a is not type(None)), value, where)
    if origin is Literal:
        if value not in arguments:
            raise InvalidInputError(f"{where}: {value!r} is not one of {', '.join(map(repr, arguments))}")
        return value
    if origin is list:
        _check_kind(isinstance(value, list), "a list", value, where)
        return [_value(arguments[0], item, f"{where}[{number}]") for number, item in enumerate(value)]
    if origin is dict:
        _check_kind(isinstance(value, dict), "an object", value, where)
        return {name: _value(arguments[1], item, f"{where}: {name}") for name, item in value.items()}
    if hasattr(hint, "__dataclass_fields__"):
        return built(hint, value, where)
    numbers = (int, float) if hint is float else (hint,)
    fits = isinstance(value, numbers) and (hint is bool or not isinstance(value, bool))
    _check_kind(fits, hint.__name__, value, where)
    return value


def _check_kind(fits: bool, wanted: str, value: Any, where: str) -> None:
    if not fits:
        raise InvalidInputError(f"{where}: expected {wanted}, found {type(value).__name__}")
