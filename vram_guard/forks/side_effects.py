"""Writes of user code in a process whose work is to leave nothing behind: they are read back there, and gone with it.

Where Linux gives the process an overlay (:mod:`vram_guard.forks._overlay`), that is all. Elsewhere the files that
Python opens are kept in memory; what gets past that, libraries in C and programs, finds a disk that is
read-only (Landlock). Where there is none either, what Python hears of is refused with an error that names it.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import functools
import io
import os
import shutil
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, NoReturn

from vram_guard.errors import UnsupportedStepError
from vram_guard.forks import _landlock, _overlay
from vram_guard.language import _
from vram_guard.patching import replace_attributes

#: A variable that tests set: the best of the ways that may be taken, "overlay", "landlock" or "python".
BEST_WAY: Final = "VRAM_GUARD_FILES"

#: Functions that change the file system; without an overlay they do nothing.
CHANGES = {
    os: (
        *("makedirs", "mkdir", "remove", "unlink", "rename", "replace"),
        *("rmdir", "removedirs", "symlink", "link", "utime", "truncate", "mkfifo", "mknod"),
        *("chmod", "lchmod", "chown", "lchown", "setxattr", "removexattr"),
    ),
    shutil: ("rmtree", "copy", "copy2", "copyfile", "copytree", "move", "make_archive"),
}

#: Flags of ``os.open`` with which something may be written.
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

#: Files of the system that hold nothing of the user's.
_SYSTEM = ("/dev/", "/proc/")

#: The same of a file that must not be there before.
_NEW = os.O_CREAT | os.O_EXCL
_TMPFILE = getattr(os, "O_TMPFILE", 0)

#: Audit events of other changes of the file system, and which of their values is the path.
_CHANGED = {
    **dict.fromkeys(("os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.utime", "os.chmod"), 0),
    **dict.fromkeys(("os.rename", "os.link", "os.symlink"), 1),
}

_written: _Written | None = None


class _Written:
    """How often this process has opened each file for writing."""

    def __init__(self) -> None:
        self._opened: Counter[str] = Counter()
        self._passing: set[str] = set()
        """New files of ``tempfile``'s, whose names nobody knows beforehand."""
        self._temporary = os.path.realpath(tempfile.gettempdir())  # asked now: it takes a lock, in which it opens files

    def hear(self, path: str, flags: int) -> None:
        """A file is opened for writing."""
        is_new = flags & _NEW == _NEW or (_TMPFILE and flags & _TMPFILE == _TMPFILE)
        if is_new and path.startswith(self._temporary):
            self._passing.add(path)
        else:
            self._opened[path] += 1

    def audit(self, event: str, values: tuple[Any, ...]) -> None:
        """Where there is an overlay, Python's audit events tell."""
        if event == "open" and isinstance(values[2], int) and values[2] & WRITING:
            path = _path(values[0])
            if path is not None:
                self.hear(path, values[2])
        elif event in _CHANGED and (path := _path(values[_CHANGED[event]])) is not None:
            self._opened[path] += 1

    def so_far(self) -> Counter[str]:
        """The counts; files that a library has written by itself are told apart by what they hold now."""
        found = self._opened.copy()
        for path, held in _overlay.changed():
            if path not in found and path not in self._passing:
                found[f"{path} [{_checksum(held):08x}]"] = 1
        return found


class _InMemory(_Written):
    """Files that were opened for writing, by path: what is written is read back, and gone with the process.

    Args:
        kept: folders that are written to for real.
    """

    def __init__(self, kept: Iterable[Path]) -> None:
        super().__init__()
        self._kept = tuple(os.path.realpath(folder) + os.sep for folder in kept)
        self._files: dict[str, str] = {}
        self._open, self._os_open = io.open, os.open
        self.read_only = False
        """What is not kept in memory finds a disk that cannot be written to."""

    def _path(self, file: Any) -> str | None:
        path = _path(file)
        return None if path is None or path.startswith(self._kept) else path

    def open(self, file: Any, mode: Any = "r", *args: Any, **kwargs: Any) -> Any:
        """In place of ``open``."""
        path = self._path(file)
        if path is None or not isinstance(mode, str) or kwargs.get("opener") is not None:
            return self._open(file, mode, *args, **kwargs)
        if any(sign in mode for sign in "wax+"):
            if "x" in mode and (path in self._files or Path(path).exists()):
                raise FileExistsError(path)
            self.hear(path, 0)
            return self._open(self._instead(path, keep="w" not in mode), mode.replace("x", "w"), *args, **kwargs)
        if path in self._files:
            return self._open(self._instead(path, keep=True), mode, *args, **kwargs)
        return self._open(file, mode, *args, **kwargs)

    def os_open(self, file: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        """In place of ``os.open``."""
        path = self._path(file)
        if path is None or kwargs.get("dir_fd") is not None:
            return self._os_open(file, flags, *args, **kwargs)
        if _TMPFILE and flags & _TMPFILE == _TMPFILE:
            return os.memfd_create("discarded")
        if flags & WRITING:
            if flags & os.O_EXCL and (path in self._files or Path(path).exists()):
                raise FileExistsError(path)
            self.hear(path, flags)
            instead = self._instead(path, keep=not flags & os.O_TRUNC)
            return self._os_open(instead, flags & ~(os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW), *args)
        return self._os_open(self._instead(path, keep=True) if path in self._files else file, flags, *args, **kwargs)

    def save(self, original: Callable[..., Any], thing: Any, file: Any, *args: Any, **kwargs: Any) -> Any:
        """In place of ``torch.save``, which opens files itself."""
        if self._path(file) is None:
            return original(thing, file, *args, **kwargs)
        with self.open(file, "wb") as opened:
            return original(thing, opened, *args, **kwargs)

    def change(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """In place of a function that changes the file system: it does so in folders that are kept only."""
        paths = [value for value in (*args, *kwargs.values()) if isinstance(value, (str, bytes, os.PathLike))]
        inside = kwargs.get("dir_fd") is not None  # a step of rmtree, which was allowed itself
        if inside or (paths and all(self._path(path) is None for path in paths)):
            return original(*args, **kwargs)
        self._opened.update(path for path in map(self._path, paths) if path is not None)
        return None

    def _instead(self, path: str, *, keep: bool) -> str:
        """The file in place of the one at ``path``; with its content so far, if that is kept."""
        if path not in self._files:
            if hasattr(os, "memfd_create"):
                self._files[path] = f"/proc/self/fd/{os.memfd_create('discarded')}"
            else:
                self._files[path] = f"{self._kept[0]}written_{len(self._files)}"
            with self._open(self._files[path], "wb") as mine:
                if keep and Path(path).exists():
                    with self._open(path, "rb") as before:
                        shutil.copyfileobj(before, mine)
        return self._files[path]

    def audit(self, event: str, values: tuple[Any, ...]) -> None:
        """Refuse what got past the functions above (names that were imported before, libraries in C)."""
        if event == "open":
            path, flags = self._path(values[0]), values[2]
            if path is not None and isinstance(flags, int) and flags & WRITING:
                _refuse(path)
        elif event == "sqlite3.connect" and (path := self._path(values[0])) is not None and ":memory:" not in path:
            _refuse(path)

    def install(self) -> None:
        """From now on, until this process ends."""
        import torch

        save = torch.save
        for module, names in CHANGES.items():
            for name in names:
                if hasattr(module, name):
                    replace_attributes(module, {name: functools.partial(self.change, getattr(module, name))})
        replace_attributes(os, {"open": self.os_open})
        replace_attributes(io, {"open": self.open})
        replace_attributes(builtins, {"open": self.open})
        replace_attributes(torch, {"save": lambda *args, **kwargs: self.save(save, *args, **kwargs)})


def discard_writes(kept: Iterable[Path] = (), words: Iterable[str] = ()) -> None:
    """From now on, until this process ends, no file is written, made, moved or removed.

    In a copy of a process that has done so, done again, nothing of what it writes is seen by its original.

    Args:
        kept: folders that are written to for real, of those that are there.
        words: a command that is run in this process; it names folders.
    """
    global _written  # noqa: PLW0603 - one for the process
    if _overlay.is_entered():
        _overlay.enter()
        return
    if _written is not None:
        return
    kept, best = tuple(kept), os.environ.get(BEST_WAY, "overlay")
    if best == "overlay" and _enters_overlay(kept, words):
        _written = _Written()
        listen(("open", *_CHANGED), _written.audit)
        return
    _written = _InMemory(kept)
    _written.install()
    if best != "python":
        with contextlib.suppress(OSError):
            _landlock.restrict((*kept, *map(Path, _SYSTEM)))
            _written.read_only = True
    listen(("open", "sqlite3.connect"), _written.audit)


_told: dict[str, list[Callable[[str, tuple[Any, ...]], None]]] = {}
"""Functions that are told of audit events, by the event."""


def listen(events: Iterable[str], told: Callable[[str, tuple[Any, ...]], None]) -> None:
    """Have a function told of Python's audit events of these names, until this process ends.

    Args:
        events: their names.
        told: given the event's name and values; what it raises ends what the event tells of.
    """
    if not _told:
        sys.addaudithook(_hear)
    for event in events:
        _told.setdefault(event, []).append(told)


def _hear(event: str, values: tuple[Any, ...]) -> None:
    """Tell of an event: there is one for each call of ``id``, and Python calls a method four times as slowly."""
    for told in _told.get(event, ()):
        told(event, values)


def _enters_overlay(kept: Iterable[Path], words: Iterable[str]) -> bool:
    if sys.platform != "linux":
        return False
    try:
        _overlay.enter(kept, words)
    except OSError:
        return False
    return True


def way() -> str:
    """How this process writes: "overlay", "landlock", "python"; "" if as any other."""
    if isinstance(_written, _InMemory):
        return "landlock" if _written.read_only else "python"
    return "overlay" if _overlay.is_entered() else ""


def why_not_written(error: BaseException) -> str:
    """What an error has to do with the way in which this process writes; "" where it has nothing to do with it."""
    words, number = str(error), getattr(error, "errno", None)
    if way() == "overlay" and number == errno.ENOSPC:
        return _("what is written in a dry run is kept in memory, up to half of what the machine has")
    if way() == "overlay" and number in (errno.EXDEV, errno.EOVERFLOW, errno.EROFS):
        return _(
            "what is written in a dry run lies in an overlay, in which a user who is not root can neither "
            "move a folder that was there nor change a file of another group"
        )
    denied = number in (errno.EACCES, errno.EPERM) or os.strerror(errno.EACCES) in words
    if way() == "landlock" and denied:
        return _(
            "this system gives a dry run no overlay over the disk, so that only Python itself can write, to memory: "
            "files that programs and other libraries write are refused"
        )
    return ""


def opened_for_writing() -> Counter[str]:
    """How often this process has opened each file for writing so far, where that leaves nothing behind."""
    return Counter() if _written is None else _written.so_far()


def _checksum(file: Path) -> int:
    """Of what a file holds; of a link, of where it leads to."""
    if file.is_symlink():
        return zlib.crc32(os.fsencode(file.readlink()))
    found = 0
    if file.is_file():
        with file.open("rb") as opened:
            while block := opened.read(2**20):
                found = zlib.crc32(block, found)
    return found


def _path(file: Any) -> str | None:
    """The whole path of a file of the user's; None for what is none: a descriptor, a device."""
    if not isinstance(file, (str, bytes, os.PathLike)):
        return None
    path = os.path.realpath(os.fsdecode(file))
    return None if path.startswith(_SYSTEM) or "/proc/self/fd/" in os.fsdecode(file) else path


def _refuse(path: str) -> NoReturn:
    raise UnsupportedStepError(
        _(
            "it opens {path} for writing, which cannot be kept from the disk here: this system gives the process no "
            "overlay",
            path=path,
        )
    )
