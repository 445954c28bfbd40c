"""Timelines of trainings that were traced here before, by what was asked and by the content of all that was read.

A file of the cache folder holds what one question was answered with. It is read only where everything that the trace
had read is as it was, and where it is this user's; a file that is damaged counts as none.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import lzma
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from vram_guard import __version__
from vram_guard.cache import cache_folder, forget_oldest
from vram_guard.codec import to_plain
from vram_guard.errors import InvalidInputError
from vram_guard.files import write_atomically
from vram_guard.known.form import packed, unpacked
from vram_guard.known.inputs import Inputs, InputsRead, reading
from vram_guard.limits import FILES_KEPT
from vram_guard.settings import filled
from vram_guard.timeline import Timeline

#: Compression that takes milliseconds.
_FAST: Final = 0


@dataclass
class Answer:
    """What a question was answered with.

    Attributes:
        timelines: of the step as written, for every batch size, each for a class of cards.
        about: plain values that a reader of the answer is told.
    """

    timelines: list[Timeline]
    about: Any


class Question:
    """What a trace is asked for, in plain values, with what decides over it besides the files that it reads.

    Args:
        asked: plain values that describe the step and how it is traced.
    """

    def __init__(self, asked: Mapping[str, Any]) -> None:
        place = {"cwd": os.getcwd(), "path": sys.path, "python": sys.version, "executable": sys.executable}  # noqa: PTH109
        text = repr((asked, place, list(sys.flags), __version__))
        self._name = hashlib.sha256(text.encode()).hexdigest()

    @property
    def _path(self) -> Path | None:
        folder = cache_folder()
        return None if folder is None else folder / "timelines" / f"{self._name}.xz"

    def answer(self) -> Answer | None:
        """What answered it before; None where nothing did, or something has changed since."""
        kept = self._kept() if _remembers() else None
        if kept is None or not kept[0].hold():
            return None
        with contextlib.suppress(ValueError):
            return Answer([one for text in kept[1] if (one := unpacked(text, 0))], kept[2])
        return None

    @contextlib.contextmanager
    def answered(self) -> Iterator[Answer]:
        """What is put into the answer inside the block is kept for the next time, with what it has read."""
        made = Answer([], None)
        with reading() as seen:
            yield made
        if made.timelines and _remembers():
            self._keep(made, seen)

    def _keep(self, made: Answer, seen: InputsRead) -> None:
        path, texts = self._path, [text for one in made.timelines if (text := packed({0: one}))]
        inputs = seen.inputs() if path is not None and texts else None
        if path is None or inputs is None:
            return
        before = self._kept()
        if before is not None and before[0].hold():
            texts = list(dict.fromkeys([*before[1], *texts]))[-FILES_KEPT:]
            inputs = inputs.with_those_of(before[0])
        content = json.dumps({"inputs": to_plain(inputs), "texts": texts, "about": made.about}).encode()
        with contextlib.suppress(InvalidInputError):  # an answer that cannot be kept is still an answer
            write_atomically(path, lzma.compress(content, preset=_FAST))
            path.chmod(0o600)  # others could write it otherwise, where a group shares its files
            forget_oldest(path.parent, FILES_KEPT, ("*.xz",))

    def _kept(self) -> tuple[Inputs, list[str], Any] | None:
        path = self._path
        try:
            if path is None or not _is_own(path):
                return None
            content = json.loads(lzma.decompress(path.read_bytes()))
            return Inputs(**content["inputs"]), list(content["texts"]), content["about"]
        except (OSError, EOFError, ValueError, KeyError, TypeError, lzma.LZMAError):
            return None


def _remembers() -> bool:
    """What the setting ``remember`` says."""
    return bool(filled({}, ("remember",)).get("remember", True))


def _is_own(path: Path) -> bool:
    """True for a file that nobody but this user could have written."""
    if not hasattr(os, "getuid"):
        return True
    state = path.stat()
    return state.st_uid == os.getuid() and not state.st_mode & 0o022
