"""Programs that a script starts by itself: those that report something, and change nothing, may run at any time.

Until ``prepare`` a script runs for real, and so does what it starts, where its files can be thrown away. From then on
its loop runs in several copies of its process, each of which would start the program again. Which commit it is or what
``nvidia-smi`` says may be asked all the same: trackers and log lines do. Anything else ends the dry run, and the answer
names the command and the line.
"""

from __future__ import annotations

import inspect
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import PurePath
from typing import Any, Final, NoReturn

from vram_guard.forks.side_effects import way
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


def only_reads(command: Any, *, in_shell: bool = False) -> bool:
    """True if a program changes nothing, as far as its command says.

    Args:
        command: text, or words, as ``subprocess.Popen`` takes them.
        in_shell: whether a shell reads it.
    """
    words = words_of(command)
    if not words or (in_shell and isinstance(command, (str, bytes)) and _SHELLS_OWN & set(os.fsdecode(command))):
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
    try:
        if isinstance(command, (str, bytes, os.PathLike)):
            return shlex.split(os.fsdecode(command))
        return [os.fsdecode(word) for word in command]
    except (TypeError, ValueError):
        return []


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
        around_starts(_unless_it_reads(stopped, _MAY_WRITE))


def _unless_it_reads(stopped: Callable[[str], NoReturn], reason: str) -> Callable[..., Any]:
    """What starts a program that only reads, and ends the dry run before any other, for a reason that names it."""

    def check(start: Callable[[], Any], command: Any, in_shell: bool = False) -> Any:
        if not only_reads(command, in_shell=in_shell):
            stopped(_(reason, command=shown(command)))
        return start()

    return check


def refuse_processes(stopped: Callable[[str], NoReturn]) -> None:
    """From now on a program that may change something ends the dry run.

    Args:
        stopped: ends it, given the reason.
    """
    check = _unless_it_reads(stopped, _SEVERAL_TIMES)
    around_starts(check)
    for name in ("multiprocessing.process", "multiprocess.process"):  # the second: what `datasets` uses
        process = getattr(sys.modules.get(name), "BaseProcess", None)

        def started(original: Any, process: Any) -> Any:
            return check(partial(original, process), [type(process).__name__])

        wrap(process, "start", started, optional=process is None)


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

    def copied(name: str, original: Callable[[], Any]) -> Any:
        return refused(name) if is_users_file(sys._getframe(2).f_code.co_filename) else original()  # noqa: SLF001

    names = {multiprocessing: ("spawn", "start_processes"), os: ("execv", "execve", "execvp", "execvpe")}
    for owner, functions in {**names, accelerate: ("notebook_launcher", "debug_launcher")}.items():
        for name in functions:
            shown_name = name if owner is accelerate else f"{owner.__name__}.{name}"
            wrap(owner, name, partial(refused, shown_name), optional=True)
    for name in ("fork", "forkpty"):
        wrap(os, name, partial(copied, f"os.{name}"), optional=True)


def around_starts(around: Callable[..., Any]) -> None:
    """Have a function called in place of every start of a program.

    Args:
        around: given what starts it, its command, and whether a shell reads that.
    """
    signature = inspect.signature(subprocess.Popen.__init__)

    def popen(original: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs).arguments
        around(partial(original, *args, **kwargs), given["args"], bool(given.get("shell")))

    def spawned(original: Any, path: Any, argv: Any, *args: Any, **kwargs: Any) -> Any:
        return around(partial(original, path, argv, *args, **kwargs), argv)

    def by_mode(original: Any, mode: int, file: Any, argv: Any, *args: Any) -> Any:
        return around(partial(original, mode, file, argv, *args), argv)

    wrap(subprocess.Popen, "__init__", popen)
    wrap(os, "system", lambda original, command: around(partial(original, command), command, True))
    for name in ("posix_spawn", "posix_spawnp"):
        wrap(os, name, spawned, optional=True)
    for name in ("spawnv", "spawnve", "spawnvp", "spawnvpe"):
        wrap(os, name, by_mode, optional=True)


def shown(command: Any) -> str:
    """The command for a message."""
    words = " ".join(words_of(command)) or "a program"
    return words if len(words) <= 60 else f"{words[:57]}..."
