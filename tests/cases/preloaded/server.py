"""A process with libraries imported, which continues starting Python processes in copies of itself.

A launch starts four Python processes and more (the command, the dry run, accelerate's launcher, the script for each
rank), and each spends a second or two importing the same libraries. With this, they are real processes as before, with
their own arguments, environment, files and signals, but begin with these libraries imported::

    environment = preloaded.environment(os.environ, "torch", "accelerate")
    subprocess.run([sys.executable, "script.py"], env=environment)

A start is declined, and goes on as usual, where a variable differs that
Python or a library reads while it is imported. The started process waits for its copy, passes signals on and ends as
the copy does; if it is killed, so is the copy.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import fcntl
import gc
import importlib
import importlib.machinery
import json
import os
import random
import runpy
import selectors
import signal
import socket
import sys
from pathlib import Path
from typing import Any

#: Read once, while Python or a library starts.
READ_AT_START = (
    *("PYTHONHASHSEED", "PYTHONWARNINGS", "PYTHONUTF8", "PYTHONIOENCODING", "LANG", "LC_ALL", "LC_CTYPE", "TZ"),
    *("LD_PRELOAD", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "PYTORCH_ALLOC_CONF", "TORCH_LOGS"),
    *("PYTORCH_CUDA_ALLOC_CONF", "TORCH_DISTRIBUTED_DEBUG", "HF_HOME", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"),
    *("TRANSFORMERS_VERBOSITY", "MPLBACKEND"),
)
_HIGH = 512
_PR_SET_PDEATHSIG = 1


class _Server:
    """Waits for requests and for the end of its copies."""

    def __init__(self, address: str) -> None:
        self._selector = selectors.DefaultSelector()
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(address)
        self._listening.listen(64)
        self._woken, self._wakes = socket.socketpair()
        self._wakes.setblocking(False)
        self._woken.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakes.fileno(), warn_on_full_buffer=False)
        self._selector.register(self._listening, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._copies: dict[int, socket.socket] = {}

    def next_copy(self) -> dict[str, Any]:
        """Serve for ever; returns only in a copy, with what it was asked for."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._listening:
                    asked = self._accepted()
                    if asked is not None:
                        return asked
                elif key.fileobj is self._woken:
                    self._woken.recv(4096)
                    self._tell_ends()
                else:
                    self._end_copy_of(key.fileobj)  # type: ignore[arg-type]

    def _accepted(self) -> dict[str, Any] | None:
        connection, _ = self._listening.accept()
        with connection.makefile("rb") as stream:
            head, files, *_ = socket.recv_fds(connection, 8, 253)
            asked = json.loads(stream.read(int.from_bytes(head, "big")))
        try:
            if any(asked["environment"].get(name) != os.environ.get(name) for name in READ_AT_START):
                connection.sendall(b"0\n")
                connection.close()
                return None
            process = os.fork()
            if process == 0:
                self._close()
                connection.close()
                _take_files(files, asked.pop("files"))
                return asked
        finally:
            if "files" in asked:
                for file in files:
                    os.close(file)
        with contextlib.suppress(OSError):  # the copy was quicker
            os.setpgid(process, process)
        self._copies[process] = connection
        connection.sendall(b"%d\n" % process)
        self._selector.register(connection, selectors.EVENT_READ)
        return None

    def _tell_ends(self) -> None:
        while self._copies:
            process, status = os.waitpid(-1, os.WNOHANG)
            if process == 0:
                return
            with self._copies.pop(process) as connection:
                if connection in self._selector.get_map():
                    self._selector.unregister(connection)
                    connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))

    def _end_copy_of(self, connection: socket.socket) -> None:
        """The started process was killed: nothing of its copy goes on."""
        self._selector.unregister(connection)
        process = next(process for process, its in self._copies.items() if its is connection)
        os.killpg(process, signal.SIGKILL)

    def _close(self) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._selector.close()
        for one in (self._listening, self._woken, self._wakes, *self._copies.values()):
            one.close()


def _take_files(received: list[int], numbers: list[int]) -> None:
    """Folder and files of the started process, under its own numbers."""
    high = [fcntl.fcntl(file, fcntl.F_DUPFD, _HIGH) for file in received]
    for file in received:
        os.close(file)
    folder, *files = high
    os.fchdir(folder)
    os.close(folder)
    for file, number in zip(files, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)


def _become(asked: dict[str, Any]) -> None:
    """Environment, signals, paths and random numbers as a process that starts has them."""
    os.setpgid(0, 0)  # signals to the started process's group reach it alone, and it passes them on
    os.umask(asked["mask"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    for name, ignored in asked["ignored"].items():
        default = signal.default_int_handler if name == "SIGINT" else signal.SIG_DFL
        signal.signal(getattr(signal, name), signal.SIG_IGN if ignored else default)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # type: ignore[attr-defined]
    random.seed()
    importlib.invalidate_caches()
    sys.path[:] = asked["path"]
    sys.orig_argv = [asked["python"], *asked["command"]]
    through = asked["command"][0] == "-u" or bool(os.environ.get("PYTHONUNBUFFERED"))
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        stream.reconfigure(line_buffering=number == 2 or os.isatty(number), write_through=through)  # type: ignore[union-attr]


def _run(command: list[str]) -> None:
    """What Python does with a script or ``-m module``, in ``__main__``."""
    if command[0] == "-u":
        command = command[1:]
    main = sys.modules["__main__"].__dict__
    main.clear()
    main.update(__name__="__main__", __builtins__=builtins, __doc__=None, __package__=None, __annotations__={})
    if command[0] == "-m":
        sys.argv = ["-m", *command[2:]]
        sys.path.insert(0, str(Path.cwd()))
        runpy._run_module_as_main(command[1])
        return
    script = command[0]
    sys.argv = command
    sys.path.insert(0, os.path.dirname(os.path.realpath(script)))  # noqa: PTH120 - as Python writes it
    loader = importlib.machinery.SourceFileLoader("__main__", script)
    main.update(__file__=os.path.abspath(script), __loader__=loader, __spec__=None, __cached__=None)  # noqa: PTH100
    try:
        source = Path(script).read_bytes()
    except OSError as error:
        print(f"{sys.executable}: can't open file {script!r}: {error}", file=sys.stderr)
        sys.exit(2)
    exec(compile(source, script, "exec"), main)


def main() -> None:
    """``server.py ADDRESS MODULE...``: print a line once the modules are imported."""
    address, *modules = sys.argv[1:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for module in modules:
        importlib.import_module(module)
    server = _Server(address)
    gc.collect()
    gc.freeze()
    print("ready", flush=True)
    asked = server.next_copy()
    _become(asked)
    try:
        _run(asked["command"])
    except Exception as error:  # noqa: BLE001 - Python's own last words, without the frames of this file
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__):
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.exit(1)
