"""Settings that stand outside the code: a file, the environment, options; the later wins.

1. ``[tool.vram_guard]`` in ``pyproject.toml``, or ``vram_guard.toml`` (which wins, where both stand in one folder), of
   the current folder or the nearest one above it that has either.
2. ``VRAM_GUARD_<NAME>`` in the environment.
3. What is given: the command's options, the arguments of a callback, a config's ``vram_guard = dict(...)``.

The settings of a guard's ``advanced={...}`` stand in the file and the environment like the others.

``budget``, ``gpu`` and ``gpu_memory`` say the same thing in three ways: a later one replaces all three.
``VRAM_GUARD_DISABLE=1`` turns everything off: adapters ask :func:`disabled`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from vram_guard.config_file import load_toml
from vram_guard.errors import InvalidInputError
from vram_guard.language import _

PREFIX: Final = "VRAM_GUARD_"
OWN_FILE: Final = "vram_guard.toml"
PROJECT_FILE: Final = "pyproject.toml"
TABLE: Final = "vram_guard"

#: What each setting is; how the words of the environment are read.
KINDS: Final[Mapping[str, str]] = {
    "allow": "names",
    "blocks": "names",
    "budget": "amount",
    "compile_seconds": "number",
    "cudnn": "text",
    "disable": "switch",
    "gpu": "text",
    "gpu_memory": "amount",
    "grow": "switch",
    "host_budget": "amount",
    "lang": "text",
    "longest": "text",
    "longest_seconds": "number",
    "lr_rule": "text",
    "margin": "number",
    "mode": "text",
    "recover": "switch",
    "remember": "switch",
    "start_seconds": "number",
    "target_utilization": "number",
    "threshold": "number",
    "verbose": "switch",
    "whole_job": "switch",
}
#: Ways of saying how much memory there is.
AMOUNTS: Final = frozenset({"budget", "gpu", "gpu_memory"})

_ON, _OFF = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


class Setting(NamedTuple):
    """A value and where it comes from: a file's path, or the name of a variable."""

    value: Any
    source: str


def settings(
    environment: Mapping[str, str] | None = None, folder: str | os.PathLike[str] | None = None
) -> dict[str, Setting]:
    """The settings of the file and the environment, by name; settings that were not set are missing.

    Args:
        environment: None: the process's.
        folder: where the search for a file begins; None: the current folder.

    Raises:
        InvalidInputError: the file cannot be read, has an unknown key (the nearest is named), or a value there or in
            the environment is of another kind.
    """
    own = _of_environment(os.environ if environment is None else environment)
    return _over(_of_file(_here() if folder is None else str(Path(folder).absolute())), own)


def filled(given: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The given values, and settings for those of ``names`` that are not given.

    Args:
        given: what the user wrote in the code, a config or an option; it wins.
        names: what may be filled in.

    Raises:
        InvalidInputError: as :func:`settings`.
    """
    if disabled():
        return dict(given)
    amount_given = not AMOUNTS.isdisjoint(given)
    wanted = set(names) - given.keys() - (AMOUNTS if amount_given else frozenset())
    return {**given, **{name: one.value for name, one in settings().items() if name in wanted}}


def disabled() -> bool:
    """True if vram_guard is switched off: ``VRAM_GUARD_DISABLE=1``, or ``disable = true`` in the file.

    A word in the variable that is neither yes nor no switches off: nobody sets it to keep something on. A file that
    cannot be read switches nothing off; who reads the settings proper says what is wrong with it.
    """
    word = os.environ.get(f"{PREFIX}DISABLE", "").strip().lower()
    if word:
        return word not in _OFF
    try:
        own = _of_file(_here()).get("disable")
    except InvalidInputError:
        return False
    return own is not None and bool(own.value)


def unknown_variables(environment: Mapping[str, str], known: Iterable[str] = ()) -> dict[str, str]:
    """Variables that begin like ours and mean nothing -> the setting that may be meant ("" for none).

    Args:
        environment: variables.
        known: those that mean something without being a setting.
    """
    names = [f"{PREFIX}{name.upper()}" for name in KINDS]
    odd = [name for name in environment if name.startswith(PREFIX) and name not in {*names, *known}]
    return {name: next(iter(get_close_matches(name, names, n=1)), "") for name in sorted(odd)}


def forget() -> None:
    """Read files anew when they are asked for next."""
    _of_file.cache_clear()


def _over(earlier: Mapping[str, Setting], later: Mapping[str, Setting]) -> dict[str, Setting]:
    """The later ones win; one amount of memory replaces every other."""
    amounts = AMOUNTS if not AMOUNTS.isdisjoint(later) else frozenset()
    return {**{name: one for name, one in earlier.items() if name not in amounts}, **later}


def _here() -> str:
    try:
        return os.getcwd()  # noqa: PTH109 - asked for at every message
    except FileNotFoundError:  # the current folder was removed
        return os.sep


@cache
def _of_file(folder: str) -> Mapping[str, Setting]:
    """The settings of the nearest file, from a folder upwards."""
    for place in (Path(folder), *Path(folder).parents):
        project, own = place / PROJECT_FILE, place / OWN_FILE
        table: dict[str, Setting] = {}
        if project.is_file():
            tool = load_toml(project).get("tool")
            table |= _checked_table(project, tool.get(TABLE) if isinstance(tool, dict) else None)
        if own.is_file():
            table = _over(table, _checked_table(own, load_toml(own)))
        if table or own.is_file():
            return table
    return {}


def _checked_table(path: Path, table: object) -> dict[str, Setting]:
    if table is None:
        return {}
    if not isinstance(table, dict):
        raise InvalidInputError(_("{path}: [tool.vram_guard] must be a table", path=path))
    return {name: Setting(_checked(str(path), name, value), str(path)) for name, value in table.items()}


def _of_environment(environment: Mapping[str, str]) -> dict[str, Setting]:
    found: dict[str, Setting] = {}
    for name, kind in KINDS.items():
        variable = PREFIX + name.upper()
        word = environment.get(variable, "").strip()
        if word:
            found[name] = Setting(_checked(variable, name, _read(kind, word)), variable)
    return found


def read(name: str, word: str, source: str) -> Any:
    """A setting's value from a word, as of an option.

    Raises:
        InvalidInputError: it is of another kind, or there is no such setting.
    """
    return _checked(source, name, _read(KINDS.get(name, "text"), word))


def _read(kind: str, word: str) -> Any:
    """A word of the environment as a value of its kind; as it is where it is none."""
    if kind == "switch" and word.lower() in (*_ON, *_OFF):
        return word.lower() in _ON
    if kind == "names":
        return [part.strip() for part in word.split(",") if part.strip()]
    if kind == "number":
        try:
            return float(word)
        except ValueError:
            return word
    return word


def _checked(source: str, name: str, value: Any) -> Any:
    """A value of the kind that the setting has.

    Raises:
        InvalidInputError: it is of another kind, or there is no such setting.
    """
    if name not in KINDS:
        near = get_close_matches(name, KINDS, n=1)
        meant = near[0] if near else ", ".join(KINDS)
        raise InvalidInputError(
            _("{source}: unknown setting {name}; did you mean {near}?", source=source, name=name, near=meant)
        )
    kind = KINDS[name]
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    right = {
        "switch": isinstance(value, bool),
        "number": number,
        "amount": isinstance(value, str) or (number and (isinstance(value, int) or name == "gpu_memory")),
        "text": isinstance(value, str),
        "names": isinstance(value, str) or (isinstance(value, list) and all(isinstance(one, str) for one in value)),
    }[kind]
    if not right:
        raise InvalidInputError(
            _(
                "{source}: {name} cannot be {value}: {advice}",
                source=source,
                name=name,
                value=repr(value)[:60],
                advice=_advice(kind),
            )
        )
    if kind == "names":
        return tuple(part.strip() for part in (value.split(",") if isinstance(value, str) else value))
    return value


def _advice(kind: str) -> str:
    return {
        "switch": _("write true or false"),
        "number": _("write a number"),
        "amount": _('write an amount such as "24GiB"'),
        "text": _("write text in quotes"),
        "names": _("write a list of names"),
    }[kind]
