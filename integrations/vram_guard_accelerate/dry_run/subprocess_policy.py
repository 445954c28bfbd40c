"""Programs that a script starts by itself: those that report something, and change nothing, may run at any time.

Until ``prepare`` a script runs for real, and so does what it starts, where its files can be thrown away. From then on
its loop runs in several copies of its process, each of which would start the program again. Which commit it is or what
``nvidia-smi`` says may be asked all the same: trackers and log lines do. Anything else ends the dry run, and the answer
names the command and the line.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from functools import partial
from pathlib import PurePath
from typing import Any, Final, NoReturn

from vram_guard.forks.side_effects import listen, way
from vram_guard.language import _, marked
from vram_guard.user_code import is_users_file
from vram_guard_accelerate._patching import wrap

#: Programs that only report something, whatever their arguments are.
READING_PROGRAMS = frozenset(
    {
        *("nvidia-smi", "rocm-smi", "xpu-smi", "hostname", "uname", "whoami", "id", "pwd", "which", "whereis"),
        *("nproc", "lscpu", "lspci", "free", "df", "du", "ls", "cat", "head", "tail", "wc", "ps", "uptime", "getconf"),
        *("ldconfig", "lsb_release", "sw_vers", "sysctl", "true", "echo"),
    }
)

#: Programs some of whose commands only report something.
READING_COMMANDS = {
    "git": ("rev-parse", "rev-list", "describe", "status", "log", "diff", "show", "ls-files", "ls-remote", "version"),
    "pip": ("freeze", "list", "show", "--version"),
    "conda": ("list", "info", "--version"),
    "hg": ("id", "identify", "status", "log"),
    # Asked for by torch's compiler and by libraries that compile kernels.
    **dict.fromkeys(("nvcc", "ptxas", "gcc", "g++", "c++", "clang", "clang++"), ("--version",)),
}

#: What makes a shell do more than run one program with these words.
_SHELLS_OWN = frozenset("<>|;&$`\n")

#: Audit events of a program's start, and which of their values is its command.
_STARTS = {"subprocess.Popen": 1, "os.system": 0, "os.posix_spawn": 1}


def only_reads(command: Any) -> bool:
    """True if a program changes nothing, as far as its command says.

    Args:
        command: words, or text that a shell reads.
    """
    words = words_of(command)
    line = _line(command)
    if not words or (line is not None and _SHELLS_OWN & set(line)):
        return False
    name, rest = PurePath(words[0]).name.removesuffix(".exe"), list(words[1:])
    if name in READING_PROGRAMS:
        return True
    while name == "git" and rest[:1] == ["-C"]:
        rest = rest[2:]
    if name == "git" and rest[:1] in (["branch"], ["config"], ["remote"]):
        return "--show-current" in rest or "--get" in rest or rest[1:] in ([], ["-v"], ["get-url", "origin"])
    if name.startswith("python") and rest[:2] == ["-m", "pip"]:
        name, rest = "pip", rest[2:]
    written = any(word.startswith("--output") for word in rest)
    return bool(rest) and rest[0] in READING_COMMANDS.get(name, ()) and not written


def words_of(command: Any) -> list[str]:
    """A command's words; none where it cannot be read."""
    line = _line(command)
    try:
        return [os.fsdecode(word) for word in command] if line is None else shlex.split(line)
    except (TypeError, ValueError):
        return []


def _line(command: Any) -> str | None:
    """The text that a shell is given, as ``subprocess`` gives it; None where there is no shell."""
    if isinstance(command, (list, tuple)) and command[:2] == ["/bin/sh", "-c"]:
        command = command[2]
    return os.fsdecode(command) if isinstance(command, (str, bytes, os.PathLike)) else None


_MAY_WRITE: Final = marked(
    "it starts a program ({command}), whose files this system cannot keep from the disk: it has neither an overlay for "
    "this user nor Landlock"
)
_SEVERAL_TIMES: Final = marked(
    "it starts a process of its own after Accelerator.prepare ({command}), which a dry run would start several times "
    "over; start it before prepare, or after the training"
)


def refuse_writing_programs(stopped: Callable[[str], NoReturn]) -> None:
    """From now on a program that may change something ends the dry run, where its files cannot be kept from the disk.

    Args:
        stopped: ends it, given the reason.
    """
    if way() == "python":
        _refuse_starts(stopped, _MAY_WRITE)


def refuse_processes(stopped: Callable[[str], NoReturn]) -> None:
    """From now on a program that may change something ends the dry run, and so does a process of ``multiprocessing``.

    Args:
        stopped: ends it, given the reason.
    """
    _refuse_starts(stopped, _SEVERAL_TIMES)

    def started(_original: Any, process: Any) -> NoReturn:
        stopped(_(_SEVERAL_TIMES, command=type(process).__name__))

    for name in ("multiprocessing.process", "multiprocess.process"):  # the second: what `datasets` uses
        process = getattr(sys.modules.get(name), "BaseProcess", None)
        wrap(process, "start", started, optional=process is None)


def _refuse_starts(stopped: Callable[[str], NoReturn], reason: str) -> None:
    def heard(event: str, values: tuple[Any, ...]) -> None:
        command = values[_STARTS[event]]
        if not only_reads(command):
            words = " ".join(words_of(command)) or "a program"
            stopped(_(reason, command=words if len(words) <= 60 else f"{words[:57]}..."))

    listen(_STARTS, heard)


def refuse_copies(stopped: Callable[[str], NoReturn]) -> None:
    """From now on what would run the script in other processes, or another program in its place, ends the dry run.

    Libraries may copy the process to work beside it; where the script does, a copy of it would run on as it does.

    Args:
        stopped: ends it, given the reason.
    """
    import accelerate
    from torch import multiprocessing

    def refused(name: str, *_call: Any, **_options: Any) -> NoReturn:
        stopped(_("it starts processes of its own ({name}), which are not followed", name=name))

    def heard(event: str, _values: tuple[Any, ...]) -> None:
        caller = sys._getframe(2)  # noqa: SLF001 - who asks is the question
        while caller.f_back is not None and caller.f_globals.get("__name__") == "os":  # its spawnv and the like
            caller = caller.f_back
        if event == "os.exec" or is_users_file(caller.f_code.co_filename):
            refused(event)

    listen(("os.exec", "os.fork", "os.forkpty"), heard)
    for owner, names in {
        multiprocessing: ("spawn", "start_processes"),
        accelerate: ("notebook_launcher", "debug_launcher"),
    }.items():
        for name in names:
            shown = name if owner is accelerate else f"{owner.__name__}.{name}"
            wrap(owner, name, partial(refused, shown), optional=True)
