"""JSON files of this project: written whole or not at all, and read with every field checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

from vram_guard.codec import from_plain
from vram_guard.errors import InvalidInputError
from vram_guard.files import write_atomically

T = TypeVar("T")


def write_json(path: Path, data: Any) -> None:
    """Write ``data`` as JSON, whole."""
    write_atomically(path, json.dumps(data, indent=1) + "\n")


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
    try:
        return from_plain(kind, data, where)
    except ValueError as error:
        raise InvalidInputError(str(error)) from None


def read(kind: type[T], path: Path, version: int, file_format: str, text: bytes | None = None) -> T:
    """The dataclass that a file holds behind its format and version; ``text``: the file's contents, where unpacked.

    Raises:
        InvalidInputError: it is missing, truncated, of another format or version, or has a field that is missing,
            unknown or of the wrong kind; the message names the file and the field.
    """
    found = parsed(content(path) if text is None else text, path)
    return built(kind, without_head(found, path, version, file_format), str(path))
