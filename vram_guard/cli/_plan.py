"""``vram-guard plan``: one training predicted and planned, with its report and every picture of it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from vram_guard.cli._compare import configuration, listed, parsed, tell_progress
from vram_guard.cli._plots import add_picture_options, check_pictures, write_pictures
from vram_guard.cli.exits import EXIT_DOES_NOT_FIT, EXIT_DONE
from vram_guard.cli.options import DEVICE, add_options
from vram_guard.cli.printing import print_json
from vram_guard.cli.releases import add_release_options, required_releases, tell_differences
from vram_guard.language import _


def add(commands: Any) -> None:
    """The parser of ``plan``."""
    parser = commands.add_parser(
        "plan",
        help=_("predict a training's memory and plan what makes it fit; reports and plots"),
        description=_(
            "Predict a training's memory, and find the cheapest change that makes it fit. Nothing is "
            "trained. The report is printed; plots are written on request."
        ),
    )
    parser.add_argument("config", nargs="?", metavar="CONFIG", help=_("the training config, YAML"))
    add_options(parser, "step", *DEVICE, "allow", "json")
    add_release_options(parser)
    parser.add_argument("--set", default="", metavar="A=1,B=2", help=_("values in place of the config's"))
    parser.add_argument("--cards", metavar="A,B", help=_("GPUs in the batch-size plot (default: common ones)"))
    parser.add_argument("--title", default="", metavar="TEXT", help=_("title of the HTML report"))
    add_picture_options(parser)
    parser.set_defaults(run=_plan)


def _plan(options: argparse.Namespace) -> int:
    from vram_guard.budget import Budget
    from vram_guard.config_file import load_config
    from vram_guard.plan import DEFAULT_ALLOW, plan
    from vram_guard.report.as_json import as_dict
    from vram_guard.report.text import show

    check_pictures(options)
    required = required_releases(options)
    cards = listed(options.cards or "")
    for card in cards:
        Budget.of(card)  # an unknown one is an error before any work
    name = options.title or (Path(options.config).name if options.config else options.step or "")
    config = load_config(options.config) if options.config else {}
    one = configuration(name, config, parsed(options.set) if options.set else {}, options.step)
    allow = DEFAULT_ALLOW if options.allow is None else listed(options.allow)
    made = plan(one.step, one.batch_size, options.budget, gpu=options.gpu, allow=allow, progress=tell_progress)
    if options.json:
        print_json({"kind": "plan", "report": as_dict(made)})
    else:
        show(made)
    tell_differences(required, made.before.releases)
    write_pictures(options, made, gpus=cards or None, title=name)
    return EXIT_DONE if made.fits else EXIT_DOES_NOT_FIT
