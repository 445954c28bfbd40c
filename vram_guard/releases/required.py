"""The releases that a file of the training asks for, compared with those that a prediction is for."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from vram_guard.config_file import load_toml, read_text
from vram_guard.errors import InvalidInputError
from vram_guard.language import _
from vram_guard.limits import LARGEST_LISTING
from vram_guard.releases.installed import PACKAGES, Releases

#: Canonical names of the packages that matter.
RELEVANT: Final = frozenset(canonicalize_name(name) for name in PACKAGES.values())

#: Files of other tools that could be meant, and are not read.
_OTHER_FILES: Final = frozenset(
    {"pyproject.toml", "Pipfile.lock", "pixi.lock", "environment.yml", "environment.yaml", "conda-lock.yml"}
)

#: The trainings that are predicted run on CUDA, which macOS has not: markers are read as on Linux there.
_MARKERS: Final[Mapping[str, str]] = {
    "extra": "",
    **(
        {"sys_platform": "linux", "platform_system": "Linux", "os_name": "posix", "platform_machine": "x86_64"}
        if sys.platform == "darwin"
        else {}
    ),
}

_INCLUDE: Final = re.compile(r"-r|-c|--requirement|--constraint")
_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class RequiredReleases:
    """The releases that a training asks for."""

    file: str = ""
    allowed: Mapping[str, tuple[SpecifierSet, ...]] = field(default_factory=dict)
    """Package -> the sets of releases that the file allows; one of them suffices."""

    @classmethod
    def read(cls, file: str | None) -> RequiredReleases:
        """Read the file that the user names.

        Args:
            file: requirements as pip reads them, or a lock of uv, Poetry or PDM or of the standard (``pylock.toml``);
                None: none, and nothing is compared.

        Raises:
            InvalidInputError: it cannot be read, is of another kind, or names a release that there cannot be.
        """
        if file is None:
            return cls()
        path = Path(file).expanduser()
        if path.name in _OTHER_FILES:
            raise _of_another_kind(file)
        is_lock = path.suffix in (".lock", ".toml")
        return cls(str(path), _locked(path) if is_lock else _requirements(path))

    def remarks(self, predicted: Releases) -> list[str]:
        """A sentence for the reader of a prediction; none where its releases are those that are asked for."""
        found = [
            _(
                "it is for {package} {release}, {file} asks for {wanted}",
                package=name,
                release=release,
                file=self.file,
                wanted=" | ".join(str(one).removeprefix("==") for one in wanted),
            )
            for name, release in predicted.packages
            if (wanted := self.allowed.get(canonicalize_name(name))) is not None and not _allows(wanted, release)
        ]
        if not found:
            return []
        return [
            _(
                "this prediction is for other releases than the training's: {differences}. Predict in the training's "
                "environment",
                differences="; ".join(found),
            )
        ]


def _of_another_kind(file: str | Path) -> InvalidInputError:
    return InvalidInputError(
        _(
            "--releases: {path} is neither requirements nor a lock of uv, Poetry or PDM: write what it asks "
            "for to a file as pip reads it (pip freeze > requirements.txt, in the training's environment)",
            path=file,
        )
    )


def _allows(wanted: tuple[SpecifierSet, ...], release: str) -> bool:
    """True if a release is in one of the sets, whatever it was built for; or if it cannot be compared."""
    try:
        version = Version(Version(release).public)
    except InvalidVersion:
        return True
    return any(one.contains(version, prereleases=True) for one in wanted)


def _locked(path: Path) -> dict[str, tuple[SpecifierSet, ...]]:
    """The releases of a lock, in which a package may stand once for each platform."""
    table = load_toml(path, LARGEST_LISTING)
    entries: Any = table.get("packages", table.get("package"))
    if not isinstance(entries, list) or not all(isinstance(one, Mapping) for one in entries):
        raise InvalidInputError(_("{path} holds no list of packages", path=path))
    found: dict[str, tuple[SpecifierSet, ...]] = {}
    for entry in entries:
        name = canonicalize_name(str(entry.get("name")))
        if name not in RELEVANT or "version" not in entry:  # a package of the project's own has no release
            continue
        try:
            release = SpecifierSet(f"=={Version(str(entry['version'])).public}")
        except InvalidVersion:
            raise InvalidInputError(
                _("{path}: {package} has no release {version}", path=path, package=name, version=repr(entry["version"]))
            ) from None
        found[name] = tuple(dict.fromkeys((*found.get(name, ()), release)))
    return found


def _requirements(path: Path) -> dict[str, tuple[SpecifierSet, ...]]:
    """The releases that a file in pip's format allows; all requirements of a package have to be met.

    Raises:
        InvalidInputError: it includes other files, or a line is no requirement.
    """
    found: dict[str, SpecifierSet] = {}
    lines = re.sub(r"\\\r?\n", " ", read_text(path, LARGEST_LISTING)).splitlines()
    for text in (re.sub(r"(^|\s)#.*", "", line).strip() for line in lines):
        if _INCLUDE.match(text):
            raise _of_another_kind(path)
        named = _NAME.match(text)
        name = "" if named is None else canonicalize_name(named[0])
        if name not in RELEVANT:
            continue
        try:
            asked = Requirement(re.sub(r"\s--.*", "", text))
        except InvalidRequirement as error:
            reason = str(error).partition("\n")[0]  # below it, packaging draws where the error is
            raise InvalidInputError(
                _("{where}: {text} is no requirement: {problem}", where=path, text=repr(text)[:60], problem=reason)
            ) from None
        if asked.url is None and (asked.marker is None or asked.marker.evaluate(dict(_MARKERS))):
            # How it was built, the local part of a version (2.4.1+cu121), is no part of the release.
            public = SpecifierSet(re.sub(r"\+[\w.]+", "", str(asked.specifier)))
            found[name] = found.get(name, SpecifierSet()) & public
    return {name: (allowed,) for name, allowed in found.items()}
