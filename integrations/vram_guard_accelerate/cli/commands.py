"""``vram-guard launch``: what the command line offers for Accelerate. Imports neither Accelerate nor torch."""

from __future__ import annotations

import argparse
from typing import Any

from vram_guard.language import _


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
    from vram_guard_accelerate.cli.launch import launch

    return launch(options.arguments)
