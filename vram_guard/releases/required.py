"""The releases that the training's own files ask for, compared with those that a prediction is for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from vram_guard.errors import InvalidInputError
from vram_guard.language import _, marked
from vram_guard.releases._lock_files import files_in, releases_of
from vram_guard.releases.installed import Releases

#: Releases of torch -> what was different in them, and is traced as the installed release has it. Sources, in PyTorch's
#: repository: torch/optim/adam.py and adamw.py, whose ``denom = _foreach_add(...)`` became ``_foreach_add_``;
#: tools/autograd/derivatives.yaml, where ``_softmax_backward_data`` took ``self`` and now takes its type;
#: aten/src/ATen/TensorIndexing.h, where ``length == stop`` became ``length <= stop`` (seen: 2.4.1 and 2.6 make a
#: SliceBackward of ``x[:, 0]``, 2.13 does not).
TORCH_RULES: Final[Mapping[str, str]] = {
    "<2.2": marked("foreach Adam and AdamW make a second list of temporaries as large as the parameters"),
    "<1.11": marked("softmax keeps its input for the backward pass"),
    "<2.7": marked("a full slice before another index, as in x[:, 0], has a backward of its own"),
}


class Asked(NamedTuple):
    """The releases of a package that a file allows."""

    allowed: tuple[SpecifierSet, ...]
    """One of them suffices."""
    file: str

    def allows(self, release: str) -> bool:
        """True if a release is one of them, whatever it was built for; or if it cannot be compared."""
        try:
            version = Version(Version(release).public)
        except InvalidVersion:
            return True
        return any(one.contains(version, prereleases=True) for one in self.allowed)

    @property
    def exact(self) -> Version | None:
        """The one release that is allowed; None where there are others."""
        found = re.fullmatch(r"==([^*,]+)", str(self.allowed[0])) if len(self.allowed) == 1 else None
        return None if found is None else Version(found[1])

    def __str__(self) -> str:
        return " | ".join(str(one).removeprefix("==") for one in self.allowed)


@dataclass(frozen=True)
class RequiredReleases:
    """The releases that a training asks for."""

    asked: Mapping[str, Asked] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    """Files that were found and cannot be read, each in a sentence."""

    @classmethod
    def find(cls, file: str | None = None, *, ignore: bool = False, folder: str | Path = ".") -> RequiredReleases:
        """Read the file that the user names, or those that lie in a folder.

        Args:
            file: see :func:`vram_guard.releases._lock_files.releases_of`; None: those in the folder.
            ignore: read nothing, whatever the rest says.
            folder: the training's.

        Raises:
            InvalidInputError: the named file cannot be read, or names a release that there cannot be.
        """
        asked: dict[str, Asked] = {}
        problems = []
        for path in () if ignore else files_in(Path(folder)) if file is None else (Path(file).expanduser(),):
            try:
                found = releases_of(path)
            except InvalidInputError as error:
                if file is not None:
                    raise InvalidInputError(
                        _("{problem} (correct it, or name another file with --releases)", problem=error)
                    ) from None
                problems.append(
                    _(
                        "the releases of this prediction are not compared with those of {file}: {problem}. Correct it, "
                        "name another file (--releases FILE), or ignore it (--ignore-releases)",
                        file=path,
                        problem=error,
                    )
                )
                continue
            for name, allowed in found.items():
                asked.setdefault(name, Asked(allowed, str(path)))
        return cls(asked, tuple(problems))

    def remarks(self, predicted: Releases) -> list[str]:
        """Sentences for the reader of a prediction; none where its releases are those that are asked for."""
        return [*self.problems, *self._differences(predicted), *self._torch(predicted)]

    def _differing(self, predicted: Releases) -> Iterator[tuple[str, str, Asked]]:
        for name, release in predicted.packages:
            asked = self.asked.get(canonicalize_name(name))
            if asked is not None and not asked.allows(release):
                yield name, release, asked

    def _differences(self, predicted: Releases) -> Iterator[str]:
        found = [
            _(
                "{package} {release} is installed, {file} asks for {wanted}",
                package=name,
                release=release,
                file=asked.file,
                wanted=asked,
            )
            for name, release, asked in self._differing(predicted)
        ]
        if found:
            yield _(
                "this prediction is for other releases than the training's: {differences}. Predict in the training's "
                "environment (vram-guard --python PATH), name another file (--releases FILE), or ignore it "
                "(--ignore-releases)",
                differences="; ".join(found),
            )

    def _torch(self, predicted: Releases) -> Iterator[str]:
        for name, release, asked in self._differing(predicted):
            if name != "torch":
                continue
            said = _("the trace follows the installed torch {release}, not {wanted}", release=release, wanted=asked)
            known = [_(what) for older, what in TORCH_RULES.items() if _parts(older, release, asked.exact)]
            if known:
                said += _("; known of the older of the two: {known}", known="; ".join(known))
            yield said


def _parts(older: str, release: str, wanted: Version | None) -> bool:
    """True if one of two releases is in the set and the other is not."""
    releases = SpecifierSet(older, prereleases=True)
    return wanted is not None and releases.contains(wanted) != releases.contains(release)
