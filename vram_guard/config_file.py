"""Configs from users, read so that no file can do harm: YAML without tags, bombs or surprises."""

from __future__ import annotations

import codecs
import json
import os
import stat
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vram_guard.errors import InvalidInputError
from vram_guard.language import _
from vram_guard.limits import CONFIG_NODES, LARGEST_CONFIG

if TYPE_CHECKING:
    import yaml


def load_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A YAML (or JSON) file's entries.

    PyYAML's safe loader, and besides: at most 1 MB, aliases only as far as they stay small when written out, no key
    twice in one mapping. References to other entries (``${data.batch_size}``) stay text.
    Nothing is run.

    Args:
        path: of the file.

    Raises:
        InvalidInputError: there is no such file, it is too large, no UTF-8, no YAML, or no mapping; it names a tag
            that is not a plain value; its aliases multiply; a key stands twice. A file that is Python: no YAML, the
            message says what reads it.
    """
    import yaml

    if str(path).endswith(".py") and Path(path).exists():
        raise InvalidInputError(
            _(
                "{path} is Python, not YAML. A model or a step in it is named after a colon: vram-guard plan "
                "{path}:NAME. An OpenMMLab config is read by: vram-guard mmengine compare {path}. A training script is "
                "followed by: vram-guard launch --dry-run {path}",
                path=path,
            )
        )
    text = read_text(path, LARGEST_CONFIG)
    try:
        loader = yaml.SafeLoader(text)  # the one in Python: deep nesting ends in an exception, not in a crash
        try:
            node = loader.get_single_node()
            if node is not None:
                _check_nodes(str(path), node)
            loaded = None if node is None else loader.construct_document(node)
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        raise InvalidInputError(_("{path} cannot be read: {reason}", path=path, reason=_problem(error))) from None
    except RecursionError:
        raise InvalidInputError(_("{path}: nested too deeply for a config", path=path)) from None
    except InvalidInputError:
        raise  # a ValueError that names the file already
    except (ValueError, TypeError, OverflowError) as error:  # a date that is none, an unhashable key
        raise InvalidInputError(_("{path} cannot be read: {reason}", path=path, reason=error)) from None
    if not isinstance(loaded, dict):
        raise InvalidInputError(_("{path} is not a config: it must be a mapping of names to values", path=path))
    return {str(key): value for key, value in loaded.items()}


def load_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A TOML file's table.

    Raises:
        InvalidInputError: it cannot be read, is too large for a config, or no TOML.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        table: dict[str, Any] = tomllib.loads(read_text(path, LARGEST_CONFIG))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InvalidInputError(_("{path} is not valid TOML: {problem}", path=path, problem=error)) from None
    return table


def load_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A JSON file's object.

    Raises:
        InvalidInputError: it cannot be read, is too large for a config, or no JSON object.
    """
    text = read_text(path, LARGEST_CONFIG)
    try:
        loaded = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(_("{path} is not valid JSON: {problem}", path=path, problem=error)) from None
    if not isinstance(loaded, dict):
        raise InvalidInputError(_("{path} is not a config: it must be a mapping of names to values", path=path))
    return loaded


def read_text(path: str | os.PathLike[str], largest: int) -> str:
    """A small text file: UTF-8, or UTF-16 with its byte-order mark, which Windows PowerShell's ``>`` writes.

    Raises:
        InvalidInputError: it is not there, no ordinary file, larger than ``largest`` bytes, or no UTF-8.
    """
    try:
        # Not blocking: a pipe without a writer gets its own message.
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with os.fdopen(handle, "rb") as file:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise InvalidInputError(_("{path} is not a regular file", path=path))
            data = file.read(largest + 1)
    except IsADirectoryError:
        raise InvalidInputError(_("{path} is a folder, not a file", path=path)) from None
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        reason = getattr(error, "strerror", None) or error
        raise InvalidInputError(_("{path} cannot be read: {reason}", path=path, reason=reason)) from None
    if len(data) > largest:
        limit = f"{largest / 2**20:g} MiB"
        raise InvalidInputError(_("{path} is larger than {limit}: too large for a config", path=path, limit=limit))
    try:
        return data.decode("utf-16" if data[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidInputError(_("{path} is not UTF-8 text (byte {byte})", path=path, byte=error.start)) from None


def leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of every entry; a list is a value of its own."""
    for key, value in config.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from leaves(value, f"{path}.")
        else:
            yield path, value


def _check_nodes(path: str, root: yaml.Node) -> None:
    """Refuse aliases that contain themselves, that multiply, and keys that stand twice."""
    import yaml

    counted: dict[int, int] = {}
    open_nodes: set[int] = set()

    def count(node: yaml.Node) -> int:
        if id(node) in counted:
            return counted[id(node)]
        if id(node) in open_nodes:
            raise InvalidInputError(_("{path}: an alias contains itself", path=path))
        open_nodes.add(id(node))
        inner: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            _check_keys(path, node)
            inner = [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            inner = node.value
        total = 1 + sum(count(part) for part in inner)
        if total > CONFIG_NODES:
            raise InvalidInputError(
                _("{path}: more than {most} entries with its aliases written out", path=path, most=CONFIG_NODES)
            )
        open_nodes.discard(id(node))
        counted[id(node)] = total
        return total

    count(root)


def _check_keys(path: str, node: yaml.MappingNode) -> None:
    seen: set[str] = set()
    for key, _value in node.value:
        name = str(key.value) if isinstance(key.value, str) else ""
        if name and name != "<<" and name in seen:
            line = key.start_mark.line + 1
            raise InvalidInputError(_("{path}, line {line}: duplicate key {key}", path=path, line=line, key=name))
        seen.add(name)


def _problem(error: yaml.YAMLError) -> str:
    """The problem and its line, in one line."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    if "'\\t' that cannot start any token" in problem:
        problem = _("a tab, which YAML does not allow there: indent by spaces")
    return problem if mark is None else _("line {line}: {problem}", line=mark.line + 1, problem=problem)
