"""Requirements as pip, conda and pyproject.toml write them: which releases of the packages that matter they allow."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

from vram_guard.config_file import LARGEST_CONFIG, read_text
from vram_guard.errors import InvalidInputError
from vram_guard.language import _
from vram_guard.releases.installed import PACKAGES

#: Canonical names of the packages that matter.
RELEVANT: Final = frozenset(canonicalize_name(name) for name in PACKAGES.values())

#: Package -> the sets of releases that a file allows; one of them suffices.
Allowed = dict[str, tuple[SpecifierSet, ...]]

#: The trainings that are predicted run on CUDA, which macOS has not: markers are read as on Linux there.
_MARKERS: Final[Mapping[str, str]] = {
    "extra": "",
    **(
        {"sys_platform": "linux", "platform_system": "Linux", "os_name": "posix", "platform_machine": "x86_64"}
        if sys.platform == "darwin"
        else {}
    ),
}

#: conda's names of packages that PyPI has under another.
CONDA_NAMES: Final = {"pytorch": "torch", "pytorch-gpu": "torch", "pytorch-cpu": "torch"}

_INCLUDE: Final = re.compile(r"(?:-r|-c|--requirement|--constraint)(?:\s+|=|(?=[^-\s]))(\S.*)")
_WHEEL: Final = re.compile(r"([^/\s]+\.whl)(?:[?#]\S*)?(?:\s+(;.*))?$")
_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*")


def requirements_file(path: Path, seen: frozenset[Path] = frozenset()) -> Allowed:
    """The requirements of a file in pip's format, with the files that it includes by ``-r`` and ``-c``.

    Raises:
        InvalidInputError: a file cannot be read, or a requirement is malformed or impossible.
    """
    return requirement_lines(_lines(path, read_text(path, LARGEST_CONFIG)), path, seen | {path.resolve()})


def _lines(path: Path, text: str) -> Iterator[tuple[str, str]]:
    """(where, requirement): a line that ends with a backslash goes on in the next one."""
    begun = ""
    for number, line in enumerate(text.splitlines(), 1):
        begun += line
        if begun.endswith("\\"):
            begun = begun[:-1]
            continue
        yield _("{path}, line {line}", path=path, line=number), begun
        begun = ""
    yield str(path), begun


def requirement_lines(lines: Iterable[tuple[str, object]], path: Path, seen: frozenset[Path] = frozenset()) -> Allowed:
    """Requirements in pip's format, all of which have to be met.

    Args:
        lines: where each of them stands, and its text.
        path: of the file.
        seen: files that include this one.

    Raises:
        InvalidInputError: as :func:`requirements_file`.
    """
    found: Allowed = {}
    for where, line in lines:
        text = re.sub(r"(^|\s)#.*", "", str(line)).strip()
        for name, allowed in _of_line(text, path, where, seen):
            (before,) = found.get(name, (SpecifierSet(),))
            found[name] = (checked(name, before & allowed, where),)
    return found


def _of_line(text: str, path: Path, where: str, seen: frozenset[Path]) -> Iterator[tuple[str, SpecifierSet]]:
    include = _INCLUDE.match(text)
    if include is not None:
        other = path.parent / include[1].strip("\"'")
        if "://" not in include[1] and other.resolve() not in seen:
            yield from ((name, allowed) for name, (allowed,) in requirements_file(other, seen).items())
    elif (found := _requirement(text, where)) is not None:
        yield found


def _requirement(text: str, where: str) -> tuple[str, SpecifierSet] | None:
    """The package of a requirement and the releases that it allows; None where it does not matter, or not here."""
    wheel = _WHEEL.search(text)
    if wheel is not None:
        try:
            package, version, _build, _tags = parse_wheel_filename(unquote(wheel[1]))
        except InvalidWheelFilename:
            return None
        text = f"{package}=={version.public} {wheel[2] or ''}"
    named = _NAME.match(text)
    name = "" if named is None else canonicalize_name(named[0])
    if name not in RELEVANT:
        return None
    try:
        found = Requirement(re.sub(r"\s--.*", "", text))
    except InvalidRequirement as error:
        raise InvalidInputError(
            _("{where}: {text} is no requirement: {problem}", where=where, text=repr(text)[:60], problem=_first(error))
        ) from None
    if found.url is not None or (found.marker is not None and not found.marker.evaluate(dict(_MARKERS))):
        return None
    return name, found.specifier


def conda_requirements(entries: Iterable[object], path: Path) -> Allowed:
    """The requirements of an environment.yml: conda's own, and those of pip in it.

    Raises:
        InvalidInputError: one of them is malformed or impossible.
    """
    found: Allowed = {}
    for entry in entries:
        if isinstance(entry, Mapping):
            found |= requirement_lines([(str(path), one) for one in texts(path, entry.get("pip") or [])], path)
            continue
        named = re.match(r"(?:[^\s:]+::)?([A-Za-z0-9][\w.-]*)\s*([^\[\s]*(?:\s*,[^\[\s]*)*)", str(entry).strip())
        name = "" if named is None else canonicalize_name(named[1])
        name = CONDA_NAMES.get(name, name)
        if named is None or name not in RELEVANT:
            continue
        try:
            allowed = tuple(map(_of_conda, named[2].split("|")))
        except InvalidSpecifier as error:
            raise InvalidInputError(
                _(
                    "{where}: {text} is no requirement: {problem}",
                    where=path,
                    text=str(entry)[:60],
                    problem=_first(error),
                )
            ) from None
        found[name] = tuple(checked(name, one, str(path)) for one in allowed)
    return found


def _of_conda(text: str) -> SpecifierSet:
    """``=2.1`` and ``2.1`` are conda's for ``==2.1.*``; a build after a second ``=`` is left out."""
    exact = re.match(r"(==?|(?=\d))([^=<>!~,]+)(?:=.*)?$", text)
    if exact is None:
        return SpecifierSet(text)
    operator, version = exact[1], exact[2].strip().removesuffix("*").removesuffix(".")
    return SpecifierSet(f"=={version}" if operator == "==" else f"=={version}.*")


def exactly(version: Version) -> SpecifierSet:
    """The set that allows one release."""
    return SpecifierSet(f"=={version.public}")


def checked(name: str, allowed: SpecifierSet, where: str) -> SpecifierSet:
    """The set of releases, without the local parts of their versions (``2.4.1+cu121``): they say how it was built.

    Raises:
        InvalidInputError: no release can be in the set.
    """
    allowed = SpecifierSet(re.sub(r"\+[\w.]+", "", str(allowed)))
    # Sets have no holes between their bounds: one with a release has a bound, one just beside, or the next number.
    bounds = [Version(one.version.removesuffix(".*")) for one in allowed if one.operator != "==="]
    around = [Version("0"), *bounds, *(Version(text) for bound in bounds for text in _beside(bound))]
    if bounds and not any(allowed.contains(one, prereleases=True) for one in around):
        raise InvalidInputError(
            _("{where}: no release of {package} can be {wanted}", where=where, package=name, wanted=allowed)
        )
    return allowed


def _beside(bound: Version) -> tuple[str, str, str]:
    """1.2.dev0, 1.2.0.0.1 and 1.3 of 1.2."""
    *first, last = bound.release
    return (
        f"{bound.epoch}!{'.'.join(map(str, bound.release))}.dev0",
        f"{bound.epoch}!{'.'.join(map(str, bound.release))}.0.0.1",
        f"{bound.epoch}!{'.'.join(map(str, [*first, last + 1]))}",
    )


def texts(path: Path, entries: object) -> list[Any]:
    """The entries of a list in a file.

    Raises:
        InvalidInputError: it is none.
    """
    if not isinstance(entries, list):
        raise InvalidInputError(_("{path} holds no list of packages", path=path))
    return entries


def _first(error: Exception) -> str:
    """The first line of a message: packaging draws below it where the error is."""
    return next(iter(str(error).splitlines()), "")
