"""accelerate's own launchers, started in a way that tells how they ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from vram_guard_accelerate.cli.arguments import launch_parser
from vram_guard_accelerate.messages import say

#: Signals that end a launch, and are passed on to the script.
PASSED_ON = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT") if hasattr(signal, name))

SIGNAL_BASE = 128


def run(options: Sequence[str], command: Sequence[str], *, simple: bool) -> int:
    """``accelerate launch options command``; its exit code, 128 + n where signal n ended it.

    Args:
        options: accelerate's own.
        command: the rest: script and its arguments, with ``-m`` before it for a module.
        simple: whether accelerate starts one process, without torchrun. It is started here then, for accelerate
            itself turns every exit code into 1.
    """
    arguments = launch_parser().parse_args([*options, *command])
    return _one_process(arguments) if simple else _torchrun(arguments)


def _one_process(arguments: Any) -> int:
    from accelerate.commands.launch import _validate_launch_command
    from accelerate.utils.launch import prepare_simple_launcher_cmd_env

    arguments, _, _ = _validate_launch_command(arguments)
    command, environment = prepare_simple_launcher_cmd_env(arguments)
    process = subprocess.Popen(command, env=environment)  # noqa: S603 - the user's own script
    with _passing_on(process):
        code = process.wait()
    return code if code >= 0 else SIGNAL_BASE - code


@contextlib.contextmanager
def _passing_on(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Signals that reach us reach the script; what the terminal sends reaches it by itself."""

    def pass_on(number: int, _frame: Any) -> None:
        if not (number == signal.SIGINT and _in_front(process)):
            with contextlib.suppress(OSError):
                process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in PASSED_ON}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _in_front(process: subprocess.Popen[bytes]) -> bool:
    """Whether the script is in the terminal's foreground group, which gets Ctrl-C from the terminal itself."""
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgid(process.pid)
    except (OSError, ValueError, AttributeError):
        return False


def _torchrun(arguments: Any) -> int:
    from accelerate.commands.launch import launch_command
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        launch_command(arguments)
    except ChildFailedError as error:
        say(str(error))
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode >= 0 else SIGNAL_BASE - failure.exitcode
    except SignalException as error:
        return SIGNAL_BASE + int(error.sigval)
    except KeyboardInterrupt:
        return SIGNAL_BASE + signal.SIGINT
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 1
    return 0
