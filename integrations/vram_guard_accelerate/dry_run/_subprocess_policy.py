"""Programs that a script may start by itself from ``prepare`` on: those that report something, and change nothing.

Until ``prepare`` a script runs for real, and so does what it starts. From then on its loop runs in several copies of
its process, each of which would start the program again. Which commit it is or what ``nvidia-smi`` says may be asked
all the same: trackers and log lines do. Anything else ends the dry run, and the answer names the command and the line.
"""

from __future__ import annotations

import inspect
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import PurePath
from typing import Any, NoReturn

from vram_guard.language import _
from vram_guard_accelerate._patching import wrap

#: Programs that only report something, whatever their arguments are.
TELLING = frozenset(
    {
        *("nvidia-smi", "rocm-smi", "xpu-smi", "hostname", "uname", "whoami", "id", "pwd", "which", "whereis"),
        *("nproc", "lscpu", "lspci", "free", "df", "du", "ls", "cat", "head", "tail", "wc", "ps", "uptime", "getconf"),
        *("ldconfig", "lsb_release", "sw_vers", "sysctl", "true", "echo"),
    }
)

#: Programs some of whose commands only report something.
TELLING_COMMANDS = {
    "git": ("rev-parse", "rev-list", "describe", "status", "log", "diff", "show", "ls-files", "ls-remote", "version"),
    "pip": ("freeze", "list", "show", "--version"),
    "conda": ("list", "info", "--version"),
    "hg": ("id", "identify", "status", "log"),
}

#: What makes a shell do more than run one program with these words.
_SHELLS_OWN = frozenset("<>|;&$`\n")


def only_tells(command: Any, *, in_shell: bool = False) -> bool:
    """True if a program changes nothing, as far as its command says.

    Args:
        command: text, or words, as ``subprocess.Popen`` takes them.
        in_shell: whether a shell reads it.
    """
    words = words_of(command)
    if not words or (in_shell and isinstance(command, (str, bytes)) and _SHELLS_OWN & set(os.fsdecode(command))):
        return False
    name, rest = PurePath(words[0]).name.removesuffix(".exe"), list(words[1:])
    if name in TELLING:
        return True
    while name == "git" and rest[:1] == ["-C"]:
        rest = rest[2:]
    if name == "git" and rest[:1] in (["branch"], ["config"], ["remote"]):
        return "--show-current" in rest or "--get" in rest or rest[1:] in ([], ["-v"], ["get-url", "origin"])
    if name.startswith("python") and rest[:2] == ["-m", "pip"]:
        name, rest = "pip", rest[2:]
    written = any(word.startswith("--output") for word in rest)
    return bool(rest) and rest[0] in TELLING_COMMANDS.get(name, ()) and not written


def words_of(command: Any) -> list[str]:
    """A command's words; none where it cannot be read."""
    try:
        if isinstance(command, (str, bytes, os.PathLike)):
            return shlex.split(os.fsdecode(command))
        return [os.fsdecode(word) for word in command]
    except (TypeError, ValueError):
        return []


def refuse_processes(stopped: Callable[[str], NoReturn]) -> None:
    """From now on a program that may change something ends the dry run.

    Args:
        stopped: ends it, given the reason.
    """

    def check(command: Any, *, in_shell: bool = False) -> None:
        if not only_tells(command, in_shell=in_shell):
            words = " ".join(words_of(command)) or "a program"
            short = words if len(words) <= 60 else f"{words[:57]}..."
            stopped(
                _(
                    "it starts a process of its own after Accelerator.prepare ({command}), which a dry run would start "
                    "several times over; start it before prepare, or after the training",
                    command=short,
                )
            )

    signature = inspect.signature(subprocess.Popen.__init__)

    def check_popen(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs).arguments
        check(given["args"], in_shell=bool(given.get("shell")))

    wrap(subprocess.Popen, "__init__", _checked(check_popen))
    wrap(os, "system", _checked(lambda command: check(command, in_shell=True)))
    for name in ("posix_spawn", "posix_spawnp"):
        wrap(os, name, _checked(lambda _path, argv, *_args, **_kwargs: check(argv)), optional=True)
    for name in ("spawnv", "spawnve", "spawnvp", "spawnvpe"):
        wrap(os, name, _checked(lambda _mode, _file, argv, *_args: check(argv)), optional=True)
    for name in ("multiprocessing.process", "multiprocess.process"):  # the second: what `datasets` uses
        process = getattr(sys.modules.get(name), "BaseProcess", None)
        wrap(process, "start", _checked(lambda process: check([type(process).__name__])), optional=process is None)


def _checked(before: Callable[..., None]) -> Callable[..., Any]:
    """Around a function: its arguments are checked before it is called."""

    def checked(original: Any, *args: Any, **kwargs: Any) -> Any:
        before(*args, **kwargs)
        return original(*args, **kwargs)

    return checked
