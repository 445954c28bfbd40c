"""The ``vram-guard`` command: one file per command, each with ``add(commands)`` for its parser.

What a command needs is imported when it runs, so that ``--help`` and ``--version`` never wait for torch. The adapters'
commands come from the entry points ``vram_guard.commands`` of installed distributions, each the ``add`` of its own.

Exit codes: 0 done (and, where something is checked, it fits), 1 it does not fit, 2 bad usage, 3 no
answer, 4 no answer because something was ended from outside. Answers go to standard output, messages to standard error.
"""

from __future__ import annotations

import argparse
import errno
import io
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vram_guard import __version__
from vram_guard.cli import _compare, _doctor, _estimate, _gpus, _monitor, _optimize, _plan
from vram_guard.cli._arguments import fill_from_settings, read_numbers, with_dashes
from vram_guard.cli.exits import EXIT_DOES_NOT_FIT, EXIT_DONE, EXIT_ENVIRONMENT, EXIT_NOT_KNOWN, EXIT_USAGE, exit_code
from vram_guard.cli.parsing import Parser, argparse_locale
from vram_guard.cli.printing import JSON_SCHEMA, tell
from vram_guard.errors import InvalidInputError, VramGuardError
from vram_guard.language import _, checked_language, language, speaking
from vram_guard.settings import Setting, settings
from vram_guard.user_code import is_of_stand_ins, line_of_error, raised_here, said_of_failure

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = [
    "EXIT_DOES_NOT_FIT",
    "EXIT_DONE",
    "EXIT_ENVIRONMENT",
    "EXIT_NOT_KNOWN",
    "EXIT_USAGE",
    "JSON_SCHEMA",
    "main",
]

#: The core's own commands, in the order of ``--help``.
_COMMANDS = {
    "estimate": _estimate.add,
    "plan": _plan.add,
    "gpus": _gpus.add,
    "doctor": _doctor.add,
    "monitor": _monitor.add,
    "optimize": _optimize.add,
    "compare": _compare.add,
    "variants": _compare.add_variants,
}


#: The command whose words are those of another program.
_LAUNCH = "launch"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code. argparse itself exits with 0 for help and 2 for bad usage."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    wanted, given = _language_of(given)
    try:
        found, problem = settings(), None
    except InvalidInputError as error:
        found, problem = {}, error
    try:
        spoken = _spoken(wanted, found)
    except InvalidInputError as error:
        tell(str(error))
        return EXIT_USAGE
    if sys.stdout is None or sys.stderr is None:  # closed (`>&-`): nobody listens, and that is no error
        nowhere = Path(os.devnull).open("w")  # noqa: SIM115 - for the rest of the process
        sys.stdout, sys.stderr = sys.stdout or nowhere, sys.stderr or nowhere
    if isinstance(sys.stdout, io.TextIOWrapper):
        # What the terminal's encoding cannot show becomes a question mark: the answer is delivered all the same.
        sys.stdout.reconfigure(errors="replace")
    # torch needs no numpy, and nor do we: an environment with the package alone has none.
    warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)
    with speaking(spoken):
        return _run(given, found, problem)


def _spoken(wanted: str | None, found: Mapping[str, Setting]) -> str:
    """The language of ``--lang``, of the settings, or of the environment."""
    if wanted is None and "lang" in found:
        wanted = found["lang"].value
    return language() if wanted is None else checked_language(wanted)


def _run(given: list[str], found: Mapping[str, Setting], problem: InvalidInputError | None) -> int:
    with argparse_locale():
        parser = _parser(given)
        if not given:
            parser.print_help()
            return EXIT_DONE
        options = parser.parse_args(given)
    run: Callable[[argparse.Namespace], int] = options.run
    if problem is not None and given[0] != "doctor":  # which says what is wrong with them
        tell(_said(problem))
        return exit_code(problem)
    try:
        fill_from_settings(options, found)
        read_numbers(options)
        code = run(options)
        sys.stdout.flush()
    except VramGuardError as error:
        tell(_said(error))
        return exit_code(error)
    except BrokenPipeError:
        # The reader has seen enough (`| head`). Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_DONE
    except OSError as error:  # a full disk, a folder that may not be read, a path that no system takes
        if error.errno == errno.ENAMETOOLONG:
            tell(_("{path} ... is too long for a path", path=str(error.filename)[:40]))
            return EXIT_USAGE
        tell(_("{name}: {problem}", name=error.filename or "-", problem=error.strerror or error))
        return EXIT_ENVIRONMENT
    except Exception as error:  # noqa: BLE001 - the user's code runs in a trace, and may raise anything
        return _code_of_failure(error, verbose=bool(getattr(options, "verbose", False)))
    return code


def _language_of(arguments: list[str]) -> tuple[str | None, list[str]]:
    """``--lang``, known before there is a parser, whose help speaks it; and the arguments without it.

    What stands after ``launch`` stays as it is, but for a ``--lang`` right behind it: it may be meant for the script.
    """
    wanted, rest, command = None, list[str](), ""
    words = list(arguments)
    while words:
        word, _equals, value = words[0].partition("=")
        if word in ("--lang", "--language"):
            takes_next = "=" not in words[0]
            if takes_next and len(words) == 1:
                break  # argparse says that its value is missing
            wanted = words[1] if takes_next else value
            words = words[1 + takes_next :]
        elif command == _LAUNCH:
            return wanted, [*rest, *words]
        else:
            rest.append(words.pop(0))
            command = command or ("" if word.startswith("-") else word)
    return wanted, list(with_dashes([*rest, *words]))


def _said(error: VramGuardError) -> str:
    """The message, with options where it names arguments of Python: ``budget="24GiB"`` is ``--budget 24GiB``."""

    def option(found: re.Match[str]) -> str:
        name, value = f"--{found[1].replace('_', '-')}", found[2]
        if value is None:
            return name
        return f"{name} {value if ' ' in value else value.strip(chr(34) + chr(39))}"

    named = r"(?<![\w.])(budget|device|gpu|gpu_memory|host_budget|margin)="
    return re.sub(named + r"""(?:("[^"]*"|'[^']*'|[0-9]+)|(?=[ ,、（]))""", option, str(error))


def _code_of_failure(error: Exception, *, verbose: bool) -> int:
    """The exit code for an error of the user's own code, which is said, or of ours, which is shown as it is."""
    line = line_of_error(error)  # the innermost one outside libraries: what a model raises is found there
    if verbose or not line or raised_here(error):
        traceback.print_exception(error)
    if not line:
        tell(_("there is no answer: the error above is one of vram_guard or of a library that it calls"))
        return EXIT_ENVIRONMENT
    tell(said_of_failure(line, f"{type(error).__name__}: {error}", "--verbose", stand_ins=is_of_stand_ins(error)))
    return EXIT_USAGE


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    parser = Parser(
        prog="vram-guard",
        description=_("Know how much GPU memory a PyTorch training step takes before it runs, and make it fit."),
        epilog=_(
            "Exit codes: 0 done, 1 it does not fit, 2 bad usage, 3 no answer, 4 no answer because a process was ended "
            "from outside."
        ),
    )
    parser.add_argument(
        "--version", action="version", version=f"vram-guard {__version__}", help=_("show the version and exit")
    )
    parser.add_argument(
        "--lang",
        "--language",
        metavar="LANGUAGE",
        help=_("en or zh (default: the language of the environment, LANG=zh_CN)"),
    )
    commands = parser.add_subparsers(
        title=_("commands"), metavar="COMMAND", required=True, dest="command", parser_class=Parser
    )
    for add in _COMMANDS.values():
        add(commands)
    # Looking through the installed distributions takes longer than some of our own commands do.
    if not arguments or arguments[0] not in _COMMANDS:
        _add_adapters(commands)
    return parser


def _add_adapters(commands: Any) -> None:
    """The commands of installed adapters."""
    from importlib.metadata import entry_points

    for entry in sorted(entry_points(group="vram_guard.commands"), key=lambda entry: entry.name):
        _add_adapter(entry, commands)


def _add_adapter(entry: EntryPoint, commands: Any) -> None:
    """One that cannot be imported is left out with a message; the others still work."""
    try:
        entry.load()(commands)
    except ImportError as error:
        tell(_("the command {name} is unavailable: {reason}", name=repr(entry.name), reason=error))
