"""The writes of a script before ``Accelerator.prepare``: the real launch finds the disk as it was.

Until then it runs for real. New files and folders are made, and noted in a journal, by which the launcher removes them
when the dry run is over. A file that is there already is never written: what would go into it goes into a copy, which
is read in its place from then on. What would remove, move or replace a file of the user's ends the dry run. Python's
audit events (PEP 578) see all of it but what libraries do in C; ``torch.save``, safetensors, tokenizers and sqlite are
watched by themselves, others by :mod:`.library_writes`, programs that it starts by :mod:`.early_programs`. Times and
rights of the user's files are left as they are.

The caches of libraries are left alone: they read back what they wrote, and the real launch needs them too.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import json
import os
import shutil
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NoReturn

from vram_guard.forks.side_effects import WRITING
from vram_guard.language import _
from vram_guard_accelerate._patching import wrap
from vram_guard_accelerate.dry_run.library_writes import LibraryWrites

#: In the folder of a request.
JOURNAL: Final = Path("made.jsonl")

#: A database that is larger is not copied.
LARGEST_COPY = 2**30

#: Audit events by which a path goes away, or comes: the positions of the path, and of the descriptor of the folder that
#: it is relative to.
_REMOVING: Final = {"os.remove": (0, 1), "os.rmdir": (0, 1), "shutil.rmtree": (0, 1), "os.rename": (0, 2)}
_MAKING: Final = {"os.mkdir": (0, 2), "os.symlink": (1, 2), "os.link": (1, 3), "os.rename": (1, 3)}

#: The part of the library in Rust.
_TOKENIZERS: Final = "tokenizers.tokenizers"

#: Functions that change what the system keeps about a file; nothing of a training depends on it.
_DESCRIBING: Final = ("utime", "chmod", "chown", "setxattr", "removexattr")


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
        self._watches_tokenizers = False
        self._thrown_away = 0
        self._libraries = LibraryWrites(self, stopped)
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
            return opened(self._instead(file, keeps=keeps) if writes else self.read(file), mode, *args, **kwargs)

        def os_open(file: Any, flags: int, *args: Any, **kwargs: Any) -> int:
            writes = bool(flags & WRITING) and not flags & os.O_EXCL
            if (below := kwargs.get("dir_fd")) is not None:
                path = _below(below, file)
                if not writes or not os.path.isabs(path):  # noqa: PTH117
                    return os_opened(file, flags, *args, **kwargs)
                file, kwargs["dir_fd"] = path, None
            path = self._instead(file, keeps=not flags & os.O_TRUNC) if writes else self.read(file)
            return os_opened(path, flags, *args, **kwargs)

        builtins.open = io.open = open_
        os.open = os_open  # type: ignore[assignment]
        wrap(torch, "save", self._save)
        wrap(torch.jit, "save", self._save)
        # Those that are scripted, and those that are traced: their class has a copy of the other's functions.
        for kind in (torch.jit.RecursiveScriptModule, torch.jit.ScriptModule):  # type: ignore[attr-defined]
            wrap(kind, "save", self._save)
        wrap(torch, "from_file", self._map)
        for name in ("mkfifo", "mknod"):
            wrap(os, name, self._make, optional=True)
        for name in ("rename", "replace"):
            wrap(os, name, self._rename)
        for name in _DESCRIBING:
            wrap(os, name, self._describe, optional=True)
        wrap(os, "truncate", self._truncate, optional=True)
        for library in ("safetensors.torch", "safetensors.numpy"):
            wrap(sys.modules.get(library), "serialize_file", self._serialize, optional=True)
        for library in ("safetensors", "safetensors.torch"):
            wrap(sys.modules.get(library), "safe_open", self._open_tensors, optional=True)
        for module in (sqlite3, sqlite3.dbapi2):
            wrap(module, "connect", self._connect)
        self.watch_libraries()
        sys.addaudithook(self._audit)

    # --- files that are there -----------------------------------------------------------------------------------

    def _instead(self, file: Any, *, keeps: bool) -> Any:
        """The file that is written in place of one: itself where it is new, or made by the script."""
        path = self._content(file)
        if path is None or not Path(path).is_file():
            return file
        if self._is_own(path) and Path(path).stat().st_nlink == 1:  # another name of it may be the user's
            return file
        if path not in self._copies:
            copy = self._copies[path] = str(Path(self._folder, f"copy_{len(self._copies)}{Path(path).suffix}"))
            self._quietly(lambda: shutil.copyfile(path if keeps else os.devnull, copy))
        return self._copies[path]

    def read(self, file: Any) -> Any:
        """The file that is read in place of one: what was written in its place, also after ``prepare``."""
        if not self._copies or self._busy or not isinstance(file, (str, bytes, os.PathLike)):
            return file
        return self._copies.get(os.path.realpath(os.fsdecode(file)), file)

    def _save(self, original: Any, thing: Any, file: Any, *args: Any, **kwargs: Any) -> Any:
        """``torch.save`` and what ``torch.jit`` saves: files are opened in C++."""
        return original(thing, self.written(file), *args, **kwargs)

    def _map(self, original: Any, file: Any, shared: bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """``torch.from_file`` maps files in C++, and makes those that are not there."""
        if shared and not self.watches and os.path.exists(file):  # noqa: PTH110
            shared = False  # what is written stays in this process
        return original(self.written(file, keeps=True) if shared else self.read(file), shared, *args, **kwargs)

    def _make(self, original: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        """There is no audit event for these."""
        path = self._watched(file, kwargs.get("dir_fd"))
        if path is not None and not os.path.lexists(path):
            self._note(path)
        original(file, *args, **kwargs)

    def _serialize(self, original: Any, tensors: Any, file: Any, *args: Any, **kwargs: Any) -> Any:
        """Safetensors opens files in Rust."""
        return original(tensors, self.written(file), *args, **kwargs)

    def watch_libraries(self) -> None:
        """Those that are loaded by now and write files by themselves; to be called whenever a module has been."""
        self._libraries.watch()
        library = sys.modules.get(_TOKENIZERS)
        if library is None or self._watches_tokenizers:
            return
        self._watches_tokenizers = True
        wrap(library.Tokenizer, "save", _save_tokenizer)
        wrap(library.Tokenizer, "from_file", lambda original, path: original(self.read(path)))
        models = library.models
        for kind in (models.Model, *models.Model.__subclasses__()):
            if "save" in vars(kind):
                wrap(kind, "save", self._save_vocabulary)

    def _save_vocabulary(self, original: Any, model: Any, folder: Any, *args: Any, **kwargs: Any) -> list[str]:
        scratch = Path(self._folder, "vocabulary")
        self._quietly(lambda: scratch.mkdir(exist_ok=True))
        found = [Path(written).name for written in original(model, str(scratch), *args, **kwargs)]
        for name in found:
            shutil.copyfile(scratch / name, Path(folder) / name)
        return [str(Path(folder) / name) for name in found]

    def _open_tensors(self, original: Any, file: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self.read(file), *args, **kwargs)

    def written(self, file: Any, *, keeps: bool = False) -> Any:
        """The file that is written in place of one: a copy, with its content where that is kept."""
        if not self.watches:
            return file if self._place(file) is None else self.thrown_away(file)
        path, instead = self._content(file), self._instead(file, keeps=keeps)
        if path is not None and instead is file:
            self._note(path)
        return instead

    def _rename(self, original: Any, source: Any, target: Any, *args: Any, **kwargs: Any) -> None:
        """A file of the script's own that takes the place of one of the user's, as files are written at one blow."""
        own = None if args or kwargs else self._watched(source)
        there = self._content(target)
        own_file = own is not None and self._is_own(own) and Path(own).is_file() and not Path(own).is_symlink()
        if not own_file or there is None or self._is_own(there) or not Path(there).is_file():
            original(source, target, *args, **kwargs)
            return
        instead = self._instead(target, keeps=False)
        self._quietly(lambda: shutil.copyfile(str(own), instead))
        self._quietly(lambda: Path(str(own)).unlink())

    def made_whole(self, folder: Any) -> bool:
        """True if all that will be in a folder is the script's: it is removed then, whatever its files are called."""
        path = self._content(folder)
        if path is None:
            return True
        if Path(path).is_dir() and any(Path(path).iterdir()) and not self._is_own(path):
            return False
        if not Path(path).exists():
            self._note(path)
        self._quietly(lambda: os.write(self._journal, (json.dumps([path]) + "\n").encode()))
        return True

    def thrown_away(self, file: Any) -> Any:
        """A file of the same kind that is removed with the dry run."""
        self._thrown_away += 1
        return str(Path(self._folder, f"gone_{self._thrown_away}{Path(os.fsdecode(file)).suffix}"))

    def _truncate(self, original: Any, file: Any, length: int) -> None:
        original(self._instead(file, keeps=True), length)

    def _describe(self, original: Any, file: Any, *args: Any, **kwargs: Any) -> Any:
        path = self._watched(file, kwargs.get("dir_fd"))
        if path is None or self._is_own(path):
            return original(file, *args, **kwargs)
        return None if os.path.lexists(path) else original(file, *args, **kwargs)

    def _connect(self, original: Any, database: Any, *args: Any, **kwargs: Any) -> Any:
        """Sqlite opens files in C: a database that is there is copied; from ``prepare`` on, into memory."""
        if not self.watches and not kwargs.get("uri") and (place := self._place(database)) is not None:
            return _in_memory(original, self.read(place), *args, **kwargs)
        path = None if kwargs.get("uri") else self._content(database)
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
        if event == "open" and isinstance(values[2], int) and values[2] & WRITING:
            path = self._content(values[0])
            if path is not None and not Path(path).exists():
                self._note(path)
        gone = self._watched_at(_REMOVING, event, values)
        if gone is not None and os.path.lexists(gone) and not self._is_own(gone):
            self._stopped(_("before it trains it removes or moves {path}, which a dry run cannot", path=gone))
        target = self._watched_at(_MAKING, event, values)
        if target is not None:
            self._makes(event, gone, target)

    def _makes(self, event: str, source: str | None, target: str) -> None:
        if not os.path.lexists(target):
            self._note(target)
        elif event == "os.rename" and not self._is_own(target):
            self._stopped(_("before it trains it replaces {path}, which a dry run cannot", path=target))
        if event == "os.rename" and source is not None:
            for path in sorted(Path(source).rglob("*")):  # what a folder holds moves with it
                self._note(str(target / path.relative_to(source)))

    def _watched_at(self, positions: dict[str, tuple[int, int]], event: str, values: tuple[Any, ...]) -> str | None:
        if event not in positions:
            return None
        path, below = positions[event]
        return self._watched(values[path], values[below])

    def _watched(self, file: Any, below: int | None = None) -> str | None:
        """The path of a file of the user's; None for devices, descriptors, caches and our own folder.

        Args:
            file: as the script names it.
            below: the descriptor of the folder that the name is relative to; None and -1: the current folder.
        """
        return self._place(file, below) if self.watches and not self._busy else None

    def _place(self, file: Any, below: int | None = None) -> str | None:
        """As :meth:`_watched`, whether anything is watched now or not."""
        if not isinstance(file, (str, bytes, os.PathLike)):
            return None
        name = _below(below, file) if below not in (None, -1) else os.fsdecode(file)
        path = os.path.join(os.path.realpath(os.path.dirname(name) or "."), os.path.basename(name))  # noqa: PTH118, PTH119, PTH120
        inside = path.startswith((self._folder + os.sep, "/dev/", "/proc/")) or "__pycache__" in path
        return None if inside or self._in_cache(path) else path

    def _content(self, file: Any) -> str | None:
        """The path of the file that holds what is written under a name: a link names another one."""
        path = self._watched(file)
        return None if path is None else self._watched(os.path.realpath(path))

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


def _save_tokenizer(_original: Any, tokenizer: Any, path: Any, pretty: bool = True) -> None:
    """The same text, written in Python."""
    Path(path).write_text(tokenizer.to_str(pretty), encoding="utf-8")


def _in_memory(original: Any, path: str, *args: Any, **kwargs: Any) -> Any:
    """A database in memory, with all that the one at a path holds; that one itself, to be read only, if it is large."""
    if not os.path.isfile(path):  # noqa: PTH113
        return original(":memory:", *args, **kwargs)
    address = f"{Path(path).as_uri()}?mode=ro"
    if os.path.getsize(path) > LARGEST_COPY:  # noqa: PTH202
        return original(address, *args, **{**kwargs, "uri": True})
    made = original(":memory:", *args, **kwargs)
    with contextlib.closing(original(address, uri=True)) as there:
        there.backup(made)
    return made


def _below(descriptor: int | None, file: Any) -> str:
    """The path of a file whose name is relative to an open folder (``dir_fd``), where the system tells it (Linux)."""
    folder = ""
    with contextlib.suppress(OSError):
        folder = os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115
    return os.path.join(folder, os.fsdecode(file))  # noqa: PTH118


def undo(folder: Path) -> None:
    """Remove what the script of a request has made before ``prepare``, the deepest first.

    Not the latest first: ``Path.mkdir(parents=True)`` tries the folder itself before it makes those above it.

    Args:
        folder: of the request, whose process is over.
    """
    journal = folder / JOURNAL
    if not journal.is_file():
        return
    lines = [json.loads(line) for line in journal.read_text(encoding="utf-8").splitlines()]
    whole = [Path(path) for line in lines if isinstance(line, list) for path in line]
    below = [path for one in whole for path in one.rglob("*")]
    made = {*below, *(Path(line) for line in lines if isinstance(line, str))}
    for path in sorted(made, key=lambda one: len(one.parts), reverse=True):
        with contextlib.suppress(OSError):  # somebody else has put something there
            if path.is_dir() and not path.is_symlink():
                path.rmdir()
            else:
                path.unlink(missing_ok=True)
