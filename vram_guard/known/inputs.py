"""What a trace has read besides its arguments: files, folders, variables; and whether they are still the same.

A trace runs the user's own code, which may read anything. So everything that Python lets be seen is written down while
it runs: modules that were imported, files that were opened or asked about, folders that were listed, variables of the
environment. What cannot be looked at again (a connection, another program) is not remembered at all. Files of the
user's are compared by their content; of installed libraries, which are many, by size and time. Not seen are files that
a library opens in C without Python asking about them, the clock, and random numbers.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from stat import S_ISDIR
from types import FrameType
from typing import Any, Final

from vram_guard.limits import LARGEST_LISTING
from vram_guard.patching import replaced

#: What Python tells of actions whose results cannot be looked at again.
_BEYOND: Final = (
    *("socket.connect", "socket.getaddrinfo", "sqlite3.connect"),
    *("subprocess.Popen", "os.system", "os.posix_spawn", "os.exec", "os.fork", "os.forkpty"),
)

#: Folders of what the operating system says of this moment: the user's code that reads there is not remembered.
_OF_THE_MOMENT: Final = ("/proc/", "/sys/")

#: Of what lies among the devices, the folder of files in memory.
_SHARED: Final = "/dev/shm/"  # noqa: S108 - nothing is written there

#: Variables in which shells keep what they did last.
_OF_SHELLS: Final = frozenset({"_", "OLDPWD", "PWD", "SHLVL", "COLUMNS", "LINES"})

_ABSENT: Final = "absent"
_FOLDER: Final = "folder"

#: In place of a variable: code went through the names of all.
_EVERY: Final = "*"

_PACKAGE: Final = str(Path(__file__).parents[1]) + os.sep
_STANDARD: Final = str(Path(contextlib.__file__).parent) + os.sep


@dataclass(frozen=True)
class Inputs:
    """What was read, each with what it was.

    Attributes:
        files: folder -> name -> what is there: the file's digest, or its size and time; "folder"; "absent".
        folders: path -> digest of the names in it; "absent".
        searched: folders in which modules were looked for -> digest of the names that modules may have; "absent".
        variables: name -> digest of its value when it was read first; "absent"; of "*" the digest of all names.
    """

    files: Mapping[str, Mapping[str, str]]
    folders: Mapping[str, str]
    searched: Mapping[str, str]
    variables: Mapping[str, str]

    def hold(self) -> bool:
        """True if all of it is as it was."""
        return (
            all(_digest_of(name) == known for name, known in self.variables.items())
            and all(_names_in(path) == known for path, known in self.folders.items())
            and all(_names_in(path, of_modules=True) == known for path, known in self.searched.items())
            and all(
                _state_of(os.path.join(folder, name), by_content=" " not in known) == known  # noqa: PTH118 - thousands
                for folder, names in self.files.items()
                for name, known in names.items()
            )
        )

    def with_those_of(self, other: Inputs) -> Inputs:
        """Both, which hold at the same time."""
        folders = self.files.keys() | other.files.keys()
        return Inputs(
            {folder: {**self.files.get(folder, {}), **other.files.get(folder, {})} for folder in sorted(folders)},
            {**self.folders, **other.folders},
            {**self.searched, **other.searched},
            {**self.variables, **other.variables},
        )


@dataclass
class InputsRead:
    """What has been read so far.

    Attributes:
        began: when, in seconds since the epoch.
        beyond: what was done whose result cannot be looked at again; "" for nothing.
    """

    files: set[str] = field(default_factory=set)
    folders: set[str] = field(default_factory=set)
    searched: set[str] = field(default_factory=set)
    variables: dict[str, str] = field(default_factory=dict)
    began: float = field(default_factory=time.time)
    beyond: str = ""

    def note(self, paths: set[str], path: Any) -> None:
        """Write a path down, unless it is a descriptor, a device, or compiled code that stands for a module."""
        try:
            found = os.path.abspath(os.fsdecode(path))  # noqa: PTH100 - of every file that is opened
        except (TypeError, ValueError):
            return
        if found.startswith(_OF_THE_MOMENT):
            self.beyond = self.beyond or (found if _by_user() else "")
        elif not found.endswith(".pyc") and (not found.startswith("/dev/") or found.startswith(_SHARED)):
            paths.add(found)

    def note_variable(self, name: str) -> None:
        """Write down what a variable is when it is read first: code may set it later."""
        if name not in self.variables:
            self.variables[name] = _ABSENT  # it is read now, and not by whom it is written down for
            self.variables[name] = _digest_of(name)

    def inputs(self) -> Inputs | None:
        """All of it as it is now, with the modules of this process; None where some cannot be looked at again."""
        if self.beyond:
            return None
        modules = {str(file) for one in list(sys.modules.values()) if (file := getattr(one, "__file__", None))}
        searched = self.searched | {path or os.getcwd() for path in sys.path}  # noqa: PTH109 - as Python does
        files: dict[str, dict[str, str]] = {}
        for path in sorted(self.files | modules):
            folder, name = os.path.split(path)
            is_installed = _is_installed(path)
            if not is_installed and self._is_changed(path):
                return None
            if name and not (is_installed and os.path.isdir(path)):  # noqa: PTH112 - thousands of them
                files.setdefault(folder, {})[name] = _state_of(path, by_content=not is_installed)
        return Inputs(
            files,
            {path: _names_in(path) for path in sorted(self.folders)},
            {path: _names_in(path, of_modules=True) for path in sorted(searched)},
            dict(sorted(self.variables.items())),
        )

    def _is_changed(self, path: str) -> bool:
        """True for a file that was written since the beginning: what was read of it may not be what is there."""
        try:
            state = os.stat(path)  # noqa: PTH116 - as Python's own
        except OSError:
            return False
        return not S_ISDIR(state.st_mode) and state.st_ctime >= self.began


@contextlib.contextmanager
def reading() -> Iterator[InputsRead]:
    """Inside the block, what this process reads is written down, beside what it has read in earlier blocks.

    Modules are imported once: what one trace has read by importing them, a later one in this process rests on too.
    """
    global _current  # noqa: PLW0603 - a hook of Python's cannot be taken off again
    before, seen = _current, _process
    _current = seen
    _listen()
    environment, stat = type(os.environ), os.stat
    looked_up: Any = environment.__getitem__
    iterated: Any = environment.__iter__

    def variable(self: Any, name: Any) -> Any:
        if _current is seen and isinstance(name, str) and name not in _OF_SHELLS:
            seen.note_variable(name)
        return looked_up(self, name)

    def names(self: Any) -> Any:
        if _current is seen and _by_user():
            seen.note_variable(_EVERY)
        return iterated(self)

    def asked(path: Any, *args: Any, **kwargs: Any) -> os.stat_result:
        seen.note(seen.files, path)
        return stat(path, *args, **kwargs)

    try:
        with replaced(environment, {"__getitem__": variable, "__iter__": names}), replaced(os, {"stat": asked}):
            yield seen
    finally:
        _current = before


_process: Final = InputsRead()
_current: InputsRead | None = None
_listens = False


def _listen() -> None:
    global _listens  # noqa: PLW0603 - as above
    if not _listens:
        sys.addaudithook(_heard)
        _listens = True


def _heard(event: str, arguments: tuple[Any, ...]) -> None:
    seen = _current
    if seen is None:
        return
    if event == "open":
        path, mode, flags = arguments
        if not (flags or 0) & (os.O_WRONLY | os.O_TRUNC) and not set(mode or "") & set("wax"):
            seen.note(seen.files, path)
    elif event in ("os.listdir", "os.scandir"):
        importing = sys._getframe(1).f_code.co_filename.startswith("<frozen importlib")  # noqa: SLF001 - who lists it
        seen.note(seen.searched if importing else seen.folders, arguments[0] or ".")
    elif event in _BEYOND and not seen.beyond and not (event == "os.fork" and _by_this_package()):
        seen.beyond = event


def _is_installed(path: str) -> bool:
    """True for files of Python, of installed libraries, and of this package."""
    return path.startswith((sys.prefix + os.sep, sys.base_prefix + os.sep, _PACKAGE, "<frozen"))


def _by_user() -> bool:
    """True if the user's own code is what is running, perhaps in a call of a library's; not a library's own import."""
    frame: FrameType | None = sys._getframe(2)  # noqa: SLF001 - of whoever reads
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith("<frozen importlib"):
            return False
        if not _is_installed(file):
            return True
        frame = frame.f_back
    return False


def _by_this_package() -> bool:
    """True for a copy of this process that is made here."""
    frame: FrameType | None = sys._getframe(2)  # noqa: SLF001 - of whoever forks
    while frame is not None and frame.f_code.co_filename.startswith(_STANDARD):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_PACKAGE)


_OF_MODULES: Final = (".py", ".pyc", ".so", ".pyd")


def _state_of(path: str, *, by_content: bool) -> str:
    try:
        state = os.stat(path)  # noqa: PTH116 - thousands of them
        if S_ISDIR(state.st_mode):
            return _FOLDER
        if by_content and state.st_size <= LARGEST_LISTING:
            return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return _ABSENT
    return f"{state.st_size} {state.st_mtime_ns}"


def _names_in(path: str, *, of_modules: bool = False) -> str:
    try:
        names = sorted(os.listdir(path))  # noqa: PTH208 - names alone
    except OSError:
        return _ABSENT
    if of_modules:
        names = [name for name in names if name != "__pycache__" and ("." not in name or name.endswith(_OF_MODULES))]
    return hashlib.sha256("\0".join(names).encode()).hexdigest()


def _digest_of(variable: str) -> str:
    if variable == _EVERY:
        return hashlib.sha256("\0".join(sorted(os.environ.keys() - _OF_SHELLS)).encode()).hexdigest()
    value = os.environ.get(variable)
    return _ABSENT if value is None else hashlib.sha256(value.encode()).hexdigest()
