"""accelerate's own launchers, started so that their exit codes are known."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from vram_guard import signals
from vram_guard_accelerate._messages import say
from vram_guard_accelerate.cli.arguments import launch_parser
from vram_guard_accelerate.cli.target import simple_launch


def run(options: Sequence[str], command: Sequence[str], *, simple: bool) -> int:
    """``accelerate launch options command``; its exit code, 128 + n where signal n ended it, where it returns.

    Args:
        options: accelerate's own.
        command: the rest: script and its arguments, with ``-m`` before it for a module.
        simple: whether accelerate starts one process, without torchrun. It takes the place of this one then, for
            accelerate itself turns every exit code into 1.
    """
    words = [*options, *command]
    return _one_process(words) if simple else _torchrun(launch_parser().parse_args(words))


def _one_process(words: Sequence[str]) -> int:
    """The script in place of this process: signals reach it, and its exit code is this one's."""
    _arguments, command, environment = simple_launch(words)
    if os.name != "nt":  # where no process becomes another one
        sys.stdout.flush()
        sys.stderr.flush()
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and what is not Python expects it
        os.execvpe(command[0], command, environment)  # noqa: S606 - the user's own script
    return subprocess.call(command, env=environment)  # noqa: S603 - the same


def _torchrun(arguments: Any) -> int:
    from accelerate.commands.launch import launch_command
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # torchrun's own handlers would react to signals that are ignored (torch 2.9 and later have the option).
    kept = [number.name for number in signals.ENDING if number not in signals.ignored()]
    arguments.signals_to_handle = ",".join(kept)
    try:
        launch_command(arguments)
    except ChildFailedError as error:
        say(str(error))
        return signals.exit_code(error.get_first_failure()[1].exitcode)
    except SignalException as error:
        return signals.EXIT_BASE + int(error.sigval)
    except KeyboardInterrupt:
        return signals.EXIT_BASE + signal.SIGINT
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 1
    return 0
