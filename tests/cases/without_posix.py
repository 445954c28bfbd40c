"""Takes away what Windows or macOS do not have, in a process of its own; libraries are imported before that.

``import without_posix; without_posix.take_away("win32")`` comes before anything of this package.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.abc
import io
import os
import platform
import select
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

#: What needs these names itself, on this system, when it is imported.
LIBRARIES = ("torch", "torch._dynamo", "torch.distributed.fsdp", "rich.console", "rich.live", "yaml")
FRAMEWORKS = ("lightning.pytorch", "mmengine.runner", "accelerate", "torchmetrics", "numpy", "matplotlib")

#: Modules that Python on Windows has not, and functions and constants of others (docs.python.org: "Availability").
WINDOWS_MODULES = ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "syslog", "readline", "posix")
WINDOWS_OS = """
    fork forkpty register_at_fork pidfd_open setsid getsid killpg getpgid getpgrp setpgid setpgrp tcgetpgrp
    tcsetpgrp getuid geteuid getgid getegid getgroups getresuid getresgid setuid setgid seteuid setegid
    setgroups initgroups wait wait3 wait4 waitid WNOHANG WIFEXITED WIFSIGNALED WIFSTOPPED WEXITSTATUS WTERMSIG
    P_PID P_PIDFD sysconf sysconf_names confstr uname statvfs fstatvfs mkfifo mknod nice getpriority setpriority
    sched_getaffinity sched_setaffinity sched_yield memfd_create fchmod fchown chown lchown chroot fchdir pipe2
    posix_spawn posix_spawnp openpty ttyname ctermid getloadavg set_blocking get_blocking pread pwrite preadv
    pwritev readv writev sendfile fdatasync sync splice copy_file_range getxattr setxattr listxattr removexattr
    lockf O_NONBLOCK O_CLOEXEC O_PATH O_DIRECTORY O_NOFOLLOW O_SYNC O_DSYNC O_NOCTTY O_NDELAY O_ASYNC O_TMPFILE
    eventfd unshare setns
"""
WINDOWS_SIGNALS = {"SIGABRT", "SIGFPE", "SIGILL", "SIGINT", "SIGSEGV", "SIGTERM", "SIG_DFL", "SIG_IGN"}
WINDOWS_SIGNAL = """
    setitimer getitimer alarm pause pthread_sigmask pthread_kill sigpending sigwait sigwaitinfo sigtimedwait
    siginterrupt pidfd_send_signal ITIMER_REAL ITIMER_VIRTUAL ITIMER_PROF SIG_BLOCK SIG_UNBLOCK SIG_SETMASK
    Sigmasks
"""
#: macOS has fork, fcntl and the signals; these it has not.
MACOS_OS = """
    pidfd_open sched_getaffinity sched_setaffinity memfd_create O_PATH O_TMPFILE pipe2 splice copy_file_range
    getxattr setxattr eventfd unshare setns getresuid getresgid fdatasync
"""


class _Missing(importlib.abc.MetaPathFinder):
    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if fullname in self._names:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


def take_away(system: str) -> None:
    """Make this process like one on ``system`` ("win32" or "darwin"), as far as Python shows it."""
    for library in (*LIBRARIES, *FRAMEWORKS):
        importlib.import_module(library)
    if system == "win32":
        sys.meta_path.insert(0, _Missing(WINDOWS_MODULES))
        for name in WINDOWS_MODULES:
            sys.modules.pop(name, None)
        _forget(os, WINDOWS_OS.split())
        signals = [name for name in dir(signal) if name.startswith("SIG") and name not in WINDOWS_SIGNALS]
        _forget(signal, [*signals, *WINDOWS_SIGNAL.split()])
        _forget(socket, ["AF_UNIX"])
        _forget(select, ["poll", "epoll"])
        signal.valid_signals = lambda: {getattr(signal, name) for name in WINDOWS_SIGNALS if name[3] != "_"}
        os.kill = _kill
    else:
        _forget(os, MACOS_OS.split())
        _forget(signal, ["pidfd_send_signal", "sigwaitinfo", "sigtimedwait", "SIGRTMIN", "SIGRTMAX", "SIGPWR"])
        _forget(select, ["epoll"])
    for owner, name in ((os, "open"), (os, "listdir"), (os, "scandir"), (os, "readlink"), (os, "stat")):
        _without_proc(owner, name)
    for owner in (builtins, io):
        _without_proc(owner, "open")
    sys.platform = system
    name = {"win32": "Windows", "darwin": "Darwin"}[system]
    platform.system = lambda: name
    for module in list(sys.modules.values()):
        if hasattr(module, "_IS_WINDOWS"):  # Lightning's, asked when it was imported
            module._IS_WINDOWS = system == "win32"


def _kill(pid: int, number: int) -> None:
    raise AssertionError(f"process {pid} gets Ctrl-C (0) or is ended on Windows: os.kill({pid}, {number})")


def _forget(owner: Any, names: Sequence[str]) -> None:
    for name in names:
        if hasattr(owner, name):
            delattr(owner, name)


def _without_proc(owner: Any, name: str) -> None:
    original = getattr(owner, name)

    def without(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
        if isinstance(path, (str, Path)) and str(path).startswith(("/proc/", "/sys/")):
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return original(path, *args, **kwargs)

    setattr(owner, name, without)
