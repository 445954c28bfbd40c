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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Final

from vram_guard.limits import LARGEST_LISTING
from vram_guard.patching import replaced

#: What Python tells of actions whose results cannot be looked at again.
_BEYOND: Final = ("socket.connect", "socket.getaddrinfo", "subprocess.Popen", "os.system", "os.posix_spawn", "os.exec")

#: Folders of what the operating system says of this moment: the user's code that reads there is not remembered.
_OF_THE_MOMENT: Final = ("/proc", "/sys")

#: Variables in which shells keep what they did last.
_OF_SHELLS: Final = frozenset({"_", "OLDPWD", "PWD", "SHLVL", "COLUMNS", "LINES"})

_ABSENT: Final = "absent"

_PACKAGE: Final = str(Path(__file__).parents[1]) + os.sep
_STANDARD: Final = str(Path(contextlib.__file__).parent) + os.sep


@dataclass(frozen=True)
class Inputs:
    """What was read, each with what it was.

    Attributes:
        files: folder -> name -> what the file is: its digest, or its size and time; "absent".
        folders: path -> digest of the names in it; "absent".
        searched: folders in which modules were looked for -> digest of the names that modules may have; "absent".
        variables: name -> digest of its value; "absent".
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
                _state_of(os.path.join(folder, name), by_content=len(known) == _LONG) == known  # noqa: PTH118 - thousands
                for folder, names in self.files.items()
                for name, known in names.items()
            )
        )


@dataclass
class InputsRead:
    """What has been read so far.

    Attributes:
        beyond: what was done whose result cannot be looked at again; "" for nothing.
    """

    files: set[str] = field(default_factory=set)
    folders: set[str] = field(default_factory=set)
    searched: set[str] = field(default_factory=set)
    variables: set[str] = field(default_factory=set)
    beyond: str = ""

    def note(self, paths: set[str], path: Any) -> None:
        """Write a path down, unless it is a descriptor, a device, or compiled code that stands for a module."""
        try:
            found = os.path.abspath(os.fsdecode(path))  # noqa: PTH100 - of every file that is opened
        except (TypeError, ValueError):
            return
        if found.startswith(_OF_THE_MOMENT):
            self.beyond = self.beyond or (found if _by_user() else "")
        elif not found.endswith(".pyc") and not found.startswith("/dev/"):
            paths.add(found)

    def inputs(self) -> Inputs | None:
        """All of it as it is now, with the modules of this process; None where some cannot be looked at again."""
        if self.beyond:
            return None
        modules = {str(file) for one in list(sys.modules.values()) if (file := getattr(one, "__file__", None))}
        searched = self.searched | {path or os.getcwd() for path in sys.path}  # noqa: PTH109 - as Python does
        files: dict[str, dict[str, str]] = {}
        for path in sorted(self.files | modules):
            folder, name = os.path.split(path)
            if name and not os.path.isdir(path):  # noqa: PTH112 - thousands of them
                files.setdefault(folder, {})[name] = _state_of(path, by_content=not _is_installed(path))
        return Inputs(
            files,
            {path: _names_in(path) for path in sorted(self.folders)},
            {path: _names_in(path, of_modules=True) for path in sorted(searched)},
            {name: _digest_of(name) for name in sorted(self.variables)},
        )


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

    def variable(self: Any, name: Any) -> Any:
        if _current is seen and isinstance(name, str) and name not in _OF_SHELLS:
            seen.variables.add(name)
        return looked_up(self, name)

    def asked(path: Any, *args: Any, **kwargs: Any) -> os.stat_result:
        seen.note(seen.files, path)
        return stat(path, *args, **kwargs)

    try:
        with replaced(environment, {"__getitem__": variable}), replaced(os, {"stat": asked}):
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
        if not (flags or 0) & (os.O_WRONLY | os.O_RDWR) and not set(mode or "") & set("wax+"):
            seen.note(seen.files, path)
    elif event in ("os.listdir", "os.scandir"):
        importing = sys._getframe(1).f_code.co_filename.startswith("<frozen importlib")  # noqa: SLF001 - who lists it
        seen.note(seen.searched if importing else seen.folders, arguments[0] or ".")
    elif event in _BEYOND and not seen.beyond:
        seen.beyond = event


def _is_installed(path: str) -> bool:
    """True for files of Python, of installed libraries, and of this package."""
    return path.startswith((sys.prefix + os.sep, sys.base_prefix + os.sep, _PACKAGE, "<frozen"))


def _by_user() -> bool:
    """True if the user's own code is what is running, and not a library in a call of its own."""
    frame: FrameType | None = sys._getframe(3)  # noqa: SLF001 - of whoever reads
    while frame is not None and frame.f_code.co_filename.startswith((_STANDARD, "<frozen")):
        frame = frame.f_back
    return frame is not None and not _is_installed(frame.f_code.co_filename)


_OF_MODULES: Final = (".py", ".pyc", ".so", ".pyd")
_LONG: Final = len(hashlib.sha256().hexdigest())


def _state_of(path: str, *, by_content: bool) -> str:
    try:
        state = os.stat(path)  # noqa: PTH116 - thousands of them
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
    value = os.environ.get(variable)
    return _ABSENT if value is None else hashlib.sha256(value.encode()).hexdigest()
