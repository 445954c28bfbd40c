"""Arguments of a launch: ours, accelerate's, and the script's; accelerate's own parser decides where it begins."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from vram_guard.cli.parsing import Parser, argparse_locale, fail, refuse_unknown
from vram_guard.errors import InvalidInputError, MissingLibraryError
from vram_guard.language import _
from vram_guard.patching import replaced
from vram_guard_accelerate._settings import LaunchSettings, add_options


@dataclass(frozen=True)
class LaunchArguments:
    """The words after ``vram-guard launch``, sorted."""

    settings: LaunchSettings
    options: argparse.Namespace
    """The guard's own options, those of the command too (``dry_run``, ``json``, ``ask``)."""
    accelerate: tuple[str, ...]
    """accelerate's options as they were typed, without the script."""
    script: str
    arguments: tuple[str, ...]
    """The script's own."""
    module: bool
    """True if ``script`` names a module (``-m``)."""

    @property
    def command(self) -> tuple[str, ...]:
        """The script and its arguments."""
        return (self.script, *self.arguments)


def parsed(arguments: Sequence[str]) -> LaunchArguments:
    """The arguments of ``vram-guard launch``.

    Raises:
        InvalidInputError: no script, one that is not there, an option that makes no sense.
        SystemExit: with 0 for ``--help``, with 2 for unknown options, as argparse does.
    """
    both = launch_parser()
    for action in both._actions:  # noqa: SLF001 - argparse has no other
        if action.nargs == argparse.REMAINDER:  # argparse before Python 3.12 asks for the script's arguments too
            action.required = False
    add_options(both)
    both.prog = "vram-guard launch"
    both.formatter_class = _with_hyphens(both.formatter_class)
    said = {"error": partial(fail, both)}  # one line, not the usage with hundreds of options before it
    with (
        argparse_locale(),
        replaced(both, said),
        replaced(sys, {"argv": [both.prog]}),
    ):  # where accelerate's help looks to find what to leave out
        found, unknown = both.parse_known_args(list(arguments))
        refuse_unknown(both, unknown)
    if found.no_python:
        raise InvalidInputError(
            _("--no_python: a program that is not Python cannot be followed; use accelerate launch")
        )
    # What follows the script is the script's own, whatever it looks like.
    head = list(arguments[: len(arguments) - len(found.training_script_args) - 1])
    own = Parser(prog="vram-guard launch", passes_on=True, add_help=False, allow_abbrev=False)
    add_options(own)
    with argparse_locale():
        _found, accelerates = own.parse_known_args(head)
    check_script(found.training_script, module=found.module)
    return LaunchArguments(
        settings=LaunchSettings.of_options(vars(found)),
        options=found,
        accelerate=tuple(accelerates),
        script=found.training_script,
        arguments=tuple(found.training_script_args),
        module=bool(found.module),  # accelerate leaves None
    )


def _with_hyphens(formatter: Any) -> type[argparse.HelpFormatter]:
    """The formatter of accelerate's help, which takes away every name with a hyphen: ours often have no other."""

    class LaunchFormatter(formatter):  # type: ignore[misc]
        def add_argument(self, action: argparse.Action) -> None:
            names = action.option_strings
            super().add_argument(action)
            action.option_strings = action.option_strings or names

    return LaunchFormatter


def launch_parser() -> argparse.ArgumentParser:
    """The parser of ``accelerate launch``.

    Raises:
        MissingLibraryError: accelerate is not installed.
    """
    try:
        from accelerate.commands.launch import launch_command_parser
    except ImportError as error:
        raise MissingLibraryError(
            _("vram-guard launch needs accelerate: pip install accelerate ({error})", error=error)
        ) from error
    parser: argparse.ArgumentParser = launch_command_parser()
    return parser


def check_script(script: str, *, module: bool) -> None:
    """Raises InvalidInputError where there is no such script, or no such module."""
    if module:
        sys.path.insert(0, str(Path.cwd()))
        try:
            there = importlib.util.find_spec(script) is not None
        except (ImportError, ValueError, AttributeError):
            there = False
        finally:
            sys.path.pop(0)
        if not there:
            raise InvalidInputError(_("there is no module {name} (-m names a module, not a file)", name=repr(script)))
        return
    path = Path(script)
    if path.is_dir():
        raise InvalidInputError(_("{path} is a folder: name the script in it", path=script))
    if not path.is_file():
        if script.startswith("-"):
            raise InvalidInputError(
                _("there is no script {path}; options of vram-guard and accelerate come before the script", path=script)
            )
        raise InvalidInputError(_("there is no script {path}, seen from {folder}", path=script, folder=Path.cwd()))
