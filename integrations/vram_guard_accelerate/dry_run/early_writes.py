"""The writes of a script before ``Accelerator.prepare``: the real launch finds the disk as it was.

Until then it runs for real. New files and folders are made, and noted in a journal, by which the launcher removes them
when the dry run is over. A file that is there already is never written: what would go into it goes into a copy, which
is read in its place from then on. What would remove, move or replace a file of the user's ends the dry run. Python's
audit events (PEP 578) see all of it but what libraries do in C; ``torch.save`` and sqlite are watched by themselves.

The caches of libraries are left alone: they read back what they wrote, and the real launch needs them too.
"""

from __future__ import annotations

import builtins
import io
import json
import os
import shutil
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NoReturn

from vram_guard.language import _
from vram_guard_accelerate._patching import wrap

#: In the folder of a request.
JOURNAL: Final = Path("made.jsonl")

#: A database that is larger is not copied.
LARGEST_COPY = 2**30

#: Flags with which a file may be written.
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

#: Audit events whose first path goes away, and the position of the path that comes instead.
_REMOVING: Final = {"os.remove": None, "os.rmdir": None, "os.rename": 1, "shutil.move": 1, "shutil.rmtree": None}
_MAKING: Final = {"os.mkdir": 0, "os.symlink": 1, "os.link": 1}


class EarlyWrites:
    """The writes of one script.

    Args:
        folder: for the journal and for copies; removed with the request.
        stopped: ends the dry run, given the reason.
        in_cache: whether a path belongs to the cache of a library.
    """

    def __init__(self, folder: Path, stopped: Callable[[str], NoReturn], in_cache: Callable[[Any], bool]) -> None:
        self._folder = os.path.realpath(folder)
        self._stopped = stopped
        self._in_cache = in_cache
        self._made: set[str] = set()
        self._copies: dict[str, str] = {}
        self._busy = False
        self._journal = os.open(folder / JOURNAL, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self.watches = True
        """Until ``prepare``; from then on nothing is written at all."""

    def install(self) -> None:
        """From now on. Permanently: the process has no other purpose."""
        import torch

        opened, os_opened = io.open, os.open

        def open_(file: Any, mode: Any = "r", *args: Any, **kwargs: Any) -> Any:
            writes = isinstance(mode, str) and any(sign in mode for sign in "wax+")
            keeps = isinstance(mode, str) and "w" not in mode
            return opened(self._instead(file, keeps=keeps) if writes else self._read(file), mode, *args, **kwargs)

        def os_open(file: Any, flags: int, *args: Any, **kwargs: Any) -> int:
            if kwargs.get("dir_fd") is not None:
                return os_opened(file, flags, *args, **kwargs)
            writes = bool(flags & _WRITING) and not flags & os.O_EXCL
            path = self._instead(file, keeps=not flags & os.O_TRUNC) if writes else self._read(file)
            return os_opened(path, flags, *args, **kwargs)

        builtins.open = io.open = open_
        os.open = os_open  # type: ignore[assignment]
        wrap(torch, "save", self._save)
        for module in (sqlite3, sqlite3.dbapi2):
            wrap(module, "connect", self._connect)
        sys.addaudithook(self._audit)

    # --- files that are there -----------------------------------------------------------------------------------

    def _instead(self, file: Any, *, keeps: bool) -> Any:
        """The file that is written in place of one: itself where it is new, or made by the script."""
        path = self._watched(file)
        if path is None or not Path(path).is_file() or self._is_own(path):
            return file
        if path not in self._copies:
            copy = self._copies[path] = str(Path(self._folder, f"copy_{len(self._copies)}{Path(path).suffix}"))
            self._quietly(lambda: shutil.copyfile(path if keeps else os.devnull, copy))
        return self._copies[path]

    def _read(self, file: Any) -> Any:
        path = self._watched(file) if self._copies else None
        return self._copies.get(path, file) if path is not None else file

    def _save(self, original: Any, thing: Any, file: Any, *args: Any, **kwargs: Any) -> Any:
        """``torch.save`` opens files in C++."""
        path = self._watched(file)
        instead = self._instead(file, keeps=False)
        if path is not None and instead is file:
            self._note(path)
        return original(thing, instead, *args, **kwargs)

    def _connect(self, original: Any, database: Any, *args: Any, **kwargs: Any) -> Any:
        """Sqlite opens files in C: a database that is there is copied."""
        path = None if kwargs.get("uri") else self._watched(database)
        if path is None or str(database) == ":memory:":
            return original(database, *args, **kwargs)
        if Path(path).is_file() and not self._is_own(path) and Path(path).stat().st_size > LARGEST_COPY:
            self._stopped(_("it opens the database {path}, which is too large to be copied for a dry run", path=path))
        if not Path(path).exists():
            self._note(path)
        return original(self._instead(database, keeps=True), *args, **kwargs)

    # --- what is made, and what would go away -------------------------------------------------------------------

    def _audit(self, event: str, values: tuple[Any, ...]) -> None:
        if not self.watches or self._busy:
            return
        if event == "open" and isinstance(values[2], int) and values[2] & _WRITING:
            path = self._watched(values[0])
            if path is not None and not Path(path).exists():
                self._note(path)
        elif event in _MAKING:
            path = self._watched(values[_MAKING[event]])
            if path is not None and not os.path.lexists(path):
                self._note(path)
        elif event in _REMOVING:
            self._removes(event, values)

    def _removes(self, event: str, values: tuple[Any, ...]) -> None:
        gone, into = self._watched(values[0]), _REMOVING[event]
        if gone is not None and os.path.lexists(gone) and not self._is_own(gone):
            self._stopped(_("before Accelerator.prepare it removes or moves {path}, which a dry run cannot", path=gone))
        target = None if into is None else self._watched(values[into])
        if target is None:
            return
        if os.path.lexists(target) and not self._is_own(target) and not Path(target).is_dir():
            self._stopped(_("before Accelerator.prepare it replaces {path}, which a dry run cannot", path=target))
        self._note(target)

    def _watched(self, file: Any) -> str | None:
        """The path of a file of the user's; None for devices, descriptors, caches and our own folder."""
        if not self.watches or self._busy or not isinstance(file, (str, bytes, os.PathLike)):
            return None
        name = os.fsdecode(file)
        path = os.path.join(os.path.realpath(os.path.dirname(name) or "."), os.path.basename(name))  # noqa: PTH118, PTH119, PTH120
        inside = path.startswith((self._folder + os.sep, "/dev/", "/proc/")) or "__pycache__" in path
        return None if inside or self._in_cache(path) else path

    def _is_own(self, path: str) -> bool:
        """True for what the script has made itself, and for what is in it."""
        return path in self._made or any(str(above) in self._made for above in Path(path).parents)

    def _note(self, path: str) -> None:
        if path not in self._made:
            self._made.add(path)
            self._quietly(lambda: os.write(self._journal, (json.dumps(path) + "\n").encode()))

    def _quietly(self, act: Callable[[], object]) -> None:
        """Our own writes are not the script's."""
        self._busy = True
        try:
            act()
        finally:
            self._busy = False


def undo(folder: Path) -> None:
    """Remove what the script of a request has made before ``prepare``, the latest first.

    Args:
        folder: of the request, whose process is over.
    """
    journal = folder / JOURNAL
    if not journal.is_file():
        return
    for line in reversed(journal.read_text(encoding="utf-8").splitlines()):
        path = Path(json.loads(line))
        try:
            if path.is_dir() and not path.is_symlink():
                path.rmdir()
            else:
                path.unlink(missing_ok=True)
        except OSError:
            continue  # somebody else has put something there
