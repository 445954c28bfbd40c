"""Lock files and other files that say which releases a training runs with."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from vram_guard.config_file import load_config, load_json, load_toml, read_text
from vram_guard.errors import InvalidInputError
from vram_guard.language import _
from vram_guard.releases._requirements import (
    CONDA_NAMES,
    RELEVANT,
    Allowed,
    conda_requirements,
    exactly,
    requirement_lines,
    requirements_file,
    texts,
)

#: Locks name every package with its hashes: those of large projects have some MB.
LARGEST_LOCK: Final = 2**25

#: The files that are looked for in a folder. Where two name a package, the first counts: what was resolved comes before
#: what was asked for.
PATTERNS: Final = (
    *("uv.lock", "poetry.lock", "pdm.lock", "pylock.toml", "Pipfile.lock", "pixi.lock"),
    *("requirements.txt", "requirements*.txt", "environment.yml", "environment.yaml", "pyproject.toml"),
)

_PIXI_PACKAGE: Final = re.compile(r"^\s*- (?:conda|pypi): (\S+)\s*$", re.MULTILINE)
_WHEEL_FILE: Final = re.compile(r"([^-]+)-([^-]+)-.*\.whl$")
#: ``name-version-build.conda``: conda's names may have hyphens, its versions and builds have none.
_CONDA_FILE: Final = re.compile(r"(.+)-([^-]+)-[^-]+\.(?:conda|tar\.bz2)$")


def files_in(folder: Path) -> Iterator[Path]:
    """The files of a folder that say which releases are wanted, in the order in which they count."""
    found = (path for pattern in PATTERNS for path in sorted(folder.glob(pattern)) if path.is_file())
    return iter(dict.fromkeys(found))


def releases_of(path: Path) -> Allowed:
    """The releases that a file allows.

    Args:
        path: a lock of uv, Poetry, PDM, Pipenv or pixi, a ``pylock.toml``, a ``pyproject.toml``, conda's
            ``environment.yml``; everything else is read as pip reads requirements.

    Raises:
        InvalidInputError: it cannot be read, or names a release that there cannot be.
    """
    return _reader(path)(path)


def _reader(path: Path) -> Callable[[Path], Allowed]:
    if path.name == "pyproject.toml":
        return _pyproject
    if path.name == "Pipfile.lock":
        return _pipfile
    if path.name == "pixi.lock":
        return _pixi
    if path.suffix == ".lock" or (path.name.startswith("pylock.") and path.suffix == ".toml"):
        return _lock
    return _conda if path.suffix in (".yml", ".yaml") else requirements_file


def _lock(path: Path) -> Allowed:
    """A lock of uv, Poetry or PDM, or of the standard (PEP 751); a package may stand there once for each platform."""
    table = load_toml(path, LARGEST_LOCK)
    entries = _entries(path, table.get("packages", table.get("package", [])))
    # A package of the project's own has no release.
    return _pinned(path, [(str(one.get("name")), one["version"]) for one in entries if "version" in one])


def _pixi(path: Path) -> Allowed:
    """A ``pixi.lock``: YAML of some MB, whose packages are named by the addresses of their files."""
    found = []
    for address in _PIXI_PACKAGE.findall(read_text(path, LARGEST_LOCK)):
        file = unquote(address.rpartition("/")[2].partition("#")[0])
        package = _WHEEL_FILE.match(file) or _CONDA_FILE.match(file)
        if package is not None:
            found.append((CONDA_NAMES.get(package[1], package[1]), package[2]))
    return _pinned(path, found)


def _pinned(path: Path, packages: Iterable[tuple[str, object]]) -> Allowed:
    """Releases, one of which suffices where a package has several."""
    found: Allowed = {}
    for given, version in packages:
        name = canonicalize_name(given)
        if name not in RELEVANT:
            continue
        try:
            # Builds of one release for several platforms stand there by themselves.
            found[name] = tuple(dict.fromkeys((*found.get(name, ()), exactly(Version(str(version))))))
        except InvalidVersion:
            raise InvalidInputError(
                _("{path}: {package} has no release {version}", path=path, package=name, version=repr(version))
            ) from None
    return found


def _pipfile(path: Path) -> Allowed:
    entries = load_json(path, LARGEST_LOCK).get("default", {})
    if not isinstance(entries, dict):
        raise InvalidInputError(_("{path} holds no list of packages", path=path))
    pinned = {
        name: entry["version"] for name, entry in entries.items() if isinstance(entry, dict) and "version" in entry
    }
    return requirement_lines([(str(path), f"{name} {version}") for name, version in pinned.items()], path)


def _pyproject(path: Path) -> Allowed:
    project = load_toml(path).get("project", {})
    wanted = texts(path, project.get("dependencies", []) if isinstance(project, dict) else [])
    return requirement_lines([(str(path), one) for one in wanted], path)


def _conda(path: Path) -> Allowed:
    return conda_requirements(texts(path, load_config(path).get("dependencies") or []), path)


def _entries(path: Path, entries: object) -> list[Mapping[str, Any]]:
    return [entry for entry in texts(path, entries) if isinstance(entry, Mapping)]
