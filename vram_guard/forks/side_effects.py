"""Writes of user code in a copied process: they go to files that are thrown away, and are read back from there.

What cannot be redirected so is refused: an error that names it ends the look at the training before it is written.
"""

from __future__ import annotations

import builtins
import io
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from vram_guard.errors import UnsupportedStepError
from vram_guard.language import _
from vram_guard.patching import replace_attributes

#: Functions that change the file system; nothing of a step depends on what they do.
CHANGES = {
    os: (
        *("makedirs", "mkdir", "remove", "unlink", "rename", "replace"),
        *("rmdir", "removedirs", "symlink", "link", "utime"),
    ),
    shutil: ("rmtree", "copy", "copy2", "copyfile", "copytree", "move", "make_archive"),
}

#: Flags of ``os.open`` with which something may be written.
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

#: Files of the system that hold nothing of the user's.
_SYSTEM = ("/dev/", "/proc/")


_discarded: _Discarded | None = None


class _Discarded:
    """Files that were opened for writing, by path: what is written is read back, and gone with the process."""

    def __init__(self) -> None:
        self._files: dict[str, int] = {}
        self.opened: Counter[str] = Counter()
        """How often each file was opened for writing."""
        self._open, self._os_open = io.open, os.open

    def open(self, file: Any, mode: Any = "r", *args: Any, **kwargs: Any) -> Any:
        """In place of ``open``."""
        path = _path(file)
        if path is None or not isinstance(mode, str) or kwargs.get("opener") is not None:
            return self._open(file, mode, *args, **kwargs)
        if any(sign in mode for sign in "wax+"):
            if "x" in mode and (path in self._files or Path(path).exists()):
                raise FileExistsError(path)
            self.opened[path] += 1
            return self._open(self._instead(path, keep="w" not in mode), mode.replace("x", "w"), *args, **kwargs)
        if path in self._files:
            return self._open(self._instead(path, keep=True), mode, *args, **kwargs)
        return self._open(file, mode, *args, **kwargs)

    def os_open(self, file: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        """In place of ``os.open``."""
        path = _path(file)
        if path is None or _is_temporary(path, flags):
            return self._os_open(file, flags, *args, **kwargs)
        if flags & WRITING:
            self.opened[path] += 1
            instead = self._instead(path, keep=not flags & os.O_TRUNC)
            return self._os_open(instead, flags & ~(os.O_CREAT | os.O_EXCL), *args)
        return self._os_open(self._instead(path, keep=True) if path in self._files else file, flags, *args, **kwargs)

    def save(self, original: Callable[..., Any], thing: Any, file: Any, *args: Any, **kwargs: Any) -> Any:
        """In place of ``torch.save``, which opens files itself."""
        if _path(file) is None:
            return original(thing, file, *args, **kwargs)
        with self.open(file, "wb") as opened:
            return original(thing, opened, *args, **kwargs)

    def _instead(self, path: str, *, keep: bool) -> str:
        """The file in place of the one at ``path``; with its content so far, if that is kept."""
        if path not in self._files:
            self._files[path] = os.memfd_create("discarded")
            if keep and Path(path).exists():
                with self._open(path, "rb") as before, self._open(self._files[path], "wb", closefd=False) as mine:
                    shutil.copyfileobj(before, mine)
        return f"/proc/self/fd/{self._files[path]}"

    def audit(self, event: str, values: tuple[Any, ...]) -> None:
        """Refuse what got past the functions above (names that were imported before, libraries in C)."""
        if event == "open":
            path, flags = _path(values[0]), values[2]
            if path is not None and isinstance(flags, int) and flags & WRITING and not _is_temporary(path, flags):
                _refuse(path)
        elif event == "sqlite3.connect" and (path := _path(values[0])) is not None and ":memory:" not in path:
            _refuse(path)


def discard_writes() -> None:
    """From now on, until this process ends, no file is written, made, moved or removed."""
    global _discarded  # noqa: PLW0603 - one for the process
    import torch

    tempfile.gettempdir()  # it tries the folder out the first time
    discarded = _discarded = _Discarded()
    save = torch.save
    for module, names in CHANGES.items():
        replace_attributes(module, dict.fromkeys((name for name in names if hasattr(module, name)), _nothing))
    replace_attributes(os, {"open": discarded.os_open})
    replace_attributes(io, {"open": discarded.open})
    replace_attributes(builtins, {"open": discarded.open})
    replace_attributes(torch, {"save": lambda *args, **kwargs: discarded.save(save, *args, **kwargs)})
    for library in ("safetensors", "safetensors.torch", "safetensors.numpy"):
        if (loaded := sys.modules.get(library)) is not None and hasattr(loaded, "serialize_file"):
            replace_attributes(loaded, {"serialize_file": _nothing})
    sys.addaudithook(discarded.audit)


def opened_for_writing() -> Counter[str]:
    """How often this process, a copy, has opened each file for writing so far."""
    return Counter() if _discarded is None else _discarded.opened.copy()


def refuse_connections() -> None:
    """From now on, until this process ends, connecting to another one is an error."""

    def audit(event: str, values: tuple[Any, ...]) -> None:
        if event == "socket.connect":
            raise UnsupportedStepError(_("it connects to {address}", address=repr(values[1])))

    sys.addaudithook(audit)


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    """In place of a function that changes the file system."""


def _path(file: Any) -> str | None:
    """The whole path of a file of the user's; None for what is none: a descriptor, a device."""
    if not isinstance(file, (str, bytes, os.PathLike)):
        return None
    path = os.path.realpath(os.fsdecode(file))
    return None if path.startswith(_SYSTEM) or "/proc/self/fd/" in os.fsdecode(file) else path


def _is_temporary(path: str, flags: int) -> bool:
    """True for a new file of ``tempfile``'s, whose name nobody knows beforehand."""
    new = os.O_CREAT | os.O_EXCL
    tmpfile = getattr(os, "O_TMPFILE", 0)
    is_new = flags & new == new or (tmpfile and flags & tmpfile == tmpfile)
    return bool(is_new) and path.startswith(os.path.realpath(tempfile.gettempdir()))


def _refuse(path: str) -> NoReturn:
    raise UnsupportedStepError(
        _("the training step opens {path} for writing, which cannot be undone after a look at it", path=path)
    )
