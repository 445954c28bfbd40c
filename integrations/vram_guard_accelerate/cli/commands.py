"""``vram-guard launch``: what the command line offers for Accelerate. Imports neither Accelerate nor torch."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vram_guard.language import _
from vram_guard.settings import AMOUNTS, disabled, settings
from vram_guard_accelerate.cli.misplaced import misplaced_said


def add(commands: Any) -> None:
    """The subcommand. Everything after it is sorted by :mod:`vram_guard_accelerate.cli.arguments`."""
    launch = commands.add_parser(
        "launch",
        help=_("accelerate launch for an unmodified script: predict, plan, then run under the plan"),
        add_help=False,
        # No argument looks like an option to this parser: accelerate's own parser knows which are.
        prefix_chars="\0",
    )
    launch.add_argument("arguments", nargs=argparse.REMAINDER)
    launch.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    _find_memory(options.arguments)
    from vram_guard_accelerate.cli.launch import launch

    return launch(options.arguments)


#: Options of ours without a value, after which a script may stand.
_SWITCHES = frozenset({"--dry-run", "--json", "--verbose", "-v"})


def _find_memory(arguments: Sequence[str]) -> None:
    """Say that there is no GPU to plan for before torch and Accelerate are imported, which takes seconds.

    Where the arguments begin with a script, or switches of ours and a script: about others the parsers know more.

    Raises:
        NoDeviceError: no budget, no GPU's name, and no GPU here.
        DeviceQueryError: the GPU here cannot be read.
    """
    from vram_guard.budget import Budget

    at = next((index for index, word in enumerate(arguments) if word not in _SWITCHES), len(arguments))
    if at < len(arguments) and Path(arguments[at]).is_file() and not disabled() and AMOUNTS.isdisjoint(settings()):
        with misplaced_said(arguments[at + 1 :]):
            Budget.resolve()
