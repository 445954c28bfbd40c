"""Continue a Python process in a copy of one that has its libraries imported: see ``server.py``.

Python imports this module as it starts wherever this folder is on ``PYTHONPATH``. Only a script or ``-m module`` is
passed on, and only if ``PRELOADED_AT`` names a server for it; all others, and those that the server declines, start as
usual.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from pathlib import Path

_IGNORABLE = ("SIGINT", "SIGTERM", "SIGHUP", "SIGPIPE", "SIGQUIT", "SIGUSR1", "SIGUSR2")
_FORWARDED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGCONT", "SIGWINCH")


def _command() -> list[str] | None:
    """``["-u"] script arguments`` or ``["-u"] -m module arguments``; None for every other start of Python."""
    given = sys.orig_argv[1:]
    rest = given[1:] if given[:1] == ["-u"] else given
    if not rest or (rest[0].startswith("-") and (rest[0] != "-m" or len(rest) < 2)):
        return None
    return given


def _server_of(command: list[str], servers: dict[str, str]) -> str:
    """Address of the module's own server, or of the one for all others."""
    module = command[command.index("-m") + 1] if "-m" in command[:2] else ""
    return servers.get(module, servers[""])


def _may_be_passed_on() -> bool:
    """False where the kernel confines this process: the server's copy would be free."""
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    return "NoNewPrivs:\t0" in status


def _open_files() -> list[int]:
    files = []
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - nothing more than this is imported for every process
        try:
            os.fstat(int(name))
        except OSError:  # the list's own
            continue
        files.append(int(name))
    return files


def _send(connection: socket.socket, command: list[str]) -> None:
    files = _open_files()
    files.remove(connection.fileno())
    folder = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
    mask = os.umask(0)
    os.umask(mask)
    text = json.dumps(
        {
            "command": command,
            "python": sys.orig_argv[0],
            "environment": dict(os.environ),
            "path": sys.path,
            "mask": mask,
            "files": files,
            "ignored": {name: signal.getsignal(getattr(signal, name)) is signal.SIG_IGN for name in _IGNORABLE},
        }
    ).encode()
    socket.send_fds(connection, [len(text).to_bytes(8, "big")], [folder, *files])
    connection.sendall(text)
    os.close(folder)


def _close_files(connection: socket.socket) -> None:
    """Leave the files to the copy: who reads from it sees their end when it closes them."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for file in _open_files():
        if file < 3:
            os.dup2(nothing, file)
        elif file not in (connection.fileno(), nothing):
            os.close(file)


def _end_as(code: int) -> None:
    if code >= 0:
        os._exit(code)
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    os._exit(128 - code)


def _continue_there(address: str, command: list[str]) -> None:
    forwarded = [getattr(signal, name) for name in _FORWARDED]
    signal.pthread_sigmask(signal.SIG_BLOCK, forwarded)  # until there is somebody to pass them on to
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(address)
        _send(connection, command)
        answers = connection.makefile("r")
        process = int(answers.readline() or 0)
    except OSError:
        process = 0
    if not process:
        connection.close()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, forwarded)
        return
    try:
        for number in forwarded:
            signal.signal(number, lambda number, _: os.kill(process, number))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, forwarded)
        _close_files(connection)
        _end_as(int(answers.readline() or -signal.SIGKILL))
    finally:  # never what the copy did once more, here
        os._exit(125)


if (_servers := os.environ.get("PRELOADED_AT")) and (_given := _command()) and _may_be_passed_on():
    _continue_there(_server_of(_given, json.loads(_servers)), _given)
