"""What libraries open in C or C++: Arrow's files (Parquet, Feather), HDF5's, pictures and films of OpenCV, LMDB's.

Neither Python's audit events nor its ``open`` see these files. So the functions of such libraries that take a path are
given another one: before ``prepare`` that of :mod:`.early_writes`, and from then on one that is thrown away.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from vram_guard.language import _
from vram_guard_accelerate._patching import wrap


class Paths(Protocol):
    """Where a script's files are while it is followed."""

    watches: bool
    """Until ``prepare``: what is written is read back. From then on it is thrown away."""

    def written(self, file: Any, *, keeps: bool = False) -> Any:
        """The file that is written in place of one."""

    def read(self, file: Any) -> Any:
        """The file that is read in place of one."""

    def made_whole(self, folder: Any) -> bool:
        """True if all that will be in a folder is the script's: it is removed then."""

    def thrown_away(self, file: Any) -> Any:
        """A file that is removed with the dry run."""


@dataclass(frozen=True)
class _Opens:
    """A function that opens a file, and where it is given the path and the mode."""

    where: str
    """``module:name`` or ``module:Class.name``."""
    path: str
    at: int
    """The position of the path; ``self`` counts."""
    mode: str = "w"
    """A mode, or ``name:position:default`` of the parameter."""

    def resolve(self) -> tuple[Any, str] | None:
        """Its owner and its name; None where the library is not loaded."""
        module, _colon, name = self.where.partition(":")
        owner = sys.modules.get(module)
        *classes, name = name.split(".")
        for one in classes:
            owner = getattr(owner, one, None)
        return None if owner is None or not hasattr(owner, name) else (owner, name)

    def mode_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """The mode of a call."""
        name, _colon, rest = self.mode.partition(":")
        if not rest:
            return self.mode
        position, _colon, default = rest.partition(":")
        given = kwargs.get(name, args[int(position)] if len(args) > int(position) else None)
        return default if given is None else str(given)


_FILES = (
    _Opens("pyarrow.parquet.core:ParquetWriter.__init__", "where", 1),
    _Opens("pyarrow.parquet.core:ParquetFile.__init__", "source", 1, "r"),
    *(_Opens(f"pyarrow.parquet{inner}:read_table", "source", 0, "r") for inner in ("", ".core")),
    _Opens("pyarrow.orc:ORCWriter.__init__", "where", 1),
    _Opens("pyarrow.feather:write_feather", "dest", 1),
    _Opens("pyarrow.feather:read_table", "source", 0, "r"),
    _Opens("pyarrow.csv:write_csv", "output_file", 1),
    _Opens("pyarrow.ipc:RecordBatchFileWriter.__init__", "sink", 1),
    _Opens("pyarrow.ipc:RecordBatchStreamWriter.__init__", "sink", 1),
    _Opens("pyarrow:OSFile", "path", 0, "mode:1:r"),
    _Opens("pyarrow:memory_map", "path", 0, "mode:1:r"),
    _Opens("pyarrow:create_memory_map", "path", 0),
    _Opens("pyarrow:output_stream", "source", 0),
    _Opens("h5py:File.__init__", "name", 1, "mode:2:r"),
    _Opens("cv2:imwrite", "filename", 0),
    _Opens("cv2:imwritemulti", "filename", 0),
    _Opens("cv2:imread", "filename", 0, "r"),
    _Opens("cv2:VideoWriter", "filename", 0),
    _Opens("soundfile:SoundFile.__init__", "file", 1, "mode:2:r"),
)

#: Those that write into a folder.
_FOLDERS = (
    _Opens("pyarrow.dataset:write_dataset", "base_dir", 1),
    _Opens("lmdb:open", "path", 0),
    _Opens("lmdb:Environment", "path", 0),
)


class LibraryWrites:
    """The files of one script that libraries open by themselves.

    Args:
        paths: which file is written and read in place of one.
        stopped: ends the dry run, given the reason.
    """

    def __init__(self, paths: Paths, stopped: Callable[[str], NoReturn]) -> None:
        self._paths = paths
        self._stopped = stopped
        self._waiting = [*_FILES, *_FOLDERS]

    def watch(self) -> None:
        """The libraries that are loaded by now; to be called again whenever a module has been."""
        self._waiting = [opens for opens in self._waiting if not self._wrapped(opens)]

    def _wrapped(self, opens: _Opens) -> bool:
        found = opens.resolve()
        if found is None:
            return False
        redirected = self._folder if opens in _FOLDERS else self._file

        def call(original: Any, *args: Any, **kwargs: Any) -> Any:
            by_name = opens.path in kwargs
            if not by_name and len(args) <= opens.at:
                return original(*args, **kwargs)
            given = kwargs[opens.path] if by_name else args[opens.at]
            if not isinstance(given, (str, bytes, os.PathLike)) or kwargs.get("filesystem") is not None:
                return original(*args, **kwargs)
            instead = redirected(given, opens.mode_of(args, kwargs), kwargs)
            if by_name:
                return original(*args, **{**kwargs, opens.path: instead})
            return original(*args[: opens.at], instead, *args[opens.at + 1 :], **kwargs)

        wrap(*found, call)
        return True

    def _file(self, file: Any, mode: str, _options: dict[str, Any]) -> Any:
        if not any(sign in mode for sign in "wax+"):
            return self._paths.read(file)
        if not self._paths.watches:
            return self._paths.thrown_away(file)
        return self._paths.written(file, keeps="w" not in mode)

    def _folder(self, folder: Any, _mode: str, options: dict[str, Any]) -> Any:
        if options.get("readonly"):  # LMDB
            return folder
        if not self._paths.watches:
            return self._paths.thrown_away(folder)
        if not self._paths.made_whole(folder):
            path = os.fsdecode(folder)
            self._stopped(_("before it trains it writes into {path}, which a dry run cannot", path=path))
        return folder
