"""``vram-guard compare`` and ``vram-guard variants``: several trainings side by side, without running any."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vram_guard.cli._configuration import check_said_once, configuration, described, parsed, said
from vram_guard.cli.exits import EXIT_DOES_NOT_FIT, EXIT_DONE
from vram_guard.cli.options import DEVICE, SIZES, add_options, asked_budget, listed
from vram_guard.cli.printing import print_comparison, progress_shown
from vram_guard.errors import InvalidInputError
from vram_guard.language import _

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vram_guard.plan.comparison import Configuration
    from vram_guard.step import TrainingStep


def add(commands: Any) -> None:
    """The parser of ``compare``."""
    parser = commands.add_parser(
        "compare",
        help=_("several configurations side by side: peak, plan, learning rate, speed"),
        description=_(
            "Compare configurations of a training: predicted peak, utilisation of the memory, the plan that makes each "
            "fit, its learning rate, and its modelled speed. Exit code 1 where one of them does not fit."
        ),
    )
    parser.add_argument(
        "configs", action="extend", nargs="*", metavar="CONFIG", default=[], help=_("training configs, YAML")
    )
    add_options(parser, "config", action="append", dest="configs", default=argparse.SUPPRESS)
    add_options(parser, "model", *SIZES, "dtype", "lora", "qlora", "lr-rule")
    parser.add_argument(
        "--set",
        action="list",
        metavar="A=1,B=2",
        help=_("an additional configuration: the first config (or none) with these values; repeatable"),
    )
    add_options(parser, *DEVICE, "cudnn", "json", "allow")
    parser.set_defaults(run=_compare)


def add_variants(commands: Any) -> None:
    """The parser of ``variants``."""
    parser = commands.add_parser(
        "variants",
        help=_("variants of a model, and the largest that fits"),
        description=_(
            "Compare variants of a model at one batch size and choose the one with most parameters that "
            "fits. Exit code 1 where none fits."
        ),
    )
    parser.add_argument(
        "names",
        nargs="+",
        metavar="NAME",
        help=_("module:function or file.py:function, giving a step or several"),
    )
    add_options(parser, "batch", required=True, dest="batch_size")
    add_options(parser, *DEVICE, "cudnn", "json")
    add_options(parser, "allow", default="")
    parser.set_defaults(run=_variants)


def _compare(options: argparse.Namespace) -> int:
    from vram_guard.plan.comparison import compare
    from vram_guard.plan.techniques import DEFAULT_ALLOW

    if not options.configs and not options.set:
        raise InvalidInputError(_("there is nothing to compare: give at least one"))
    budget = asked_budget(options)
    allow = DEFAULT_ALLOW if options.allow is None else listed(options.allow)
    configurations = tuple(_configurations(options))
    with progress_shown() as progress:
        answer = compare(
            configurations, budget, allow=allow, lr_rule=options.lr_rule, cudnn=options.cudnn, progress=progress
        )
    print_comparison(answer, as_json=options.json)
    return EXIT_DONE if answer.all_fit else EXIT_DOES_NOT_FIT


def _variants(options: argparse.Namespace) -> int:
    from vram_guard.capture.object_reference import load_steps
    from vram_guard.plan.comparison import variants

    budget = asked_budget(options)
    steps = dict[str, "TrainingStep"]()
    for named in options.names:
        for name, step in load_steps(named).items():
            if name in steps:
                raise InvalidInputError(_("two variants are called {name}", name=name))
            steps[name] = step
    allow = listed(options.allow)
    with progress_shown() as progress:
        answer = variants(steps, options.batch_size, budget, allow=allow, cudnn=options.cudnn, progress=progress)
    print_comparison(answer, as_json=options.json)
    return EXIT_DONE if answer.chosen is not None else EXIT_DOES_NOT_FIT


def _configurations(options: argparse.Namespace) -> Iterator[Configuration]:
    """The configs as they are, and the first of them (or none) with each ``--set``."""
    from vram_guard.config_file import load_config

    configs = [(Path(path).stem, load_config(path)) for path in options.configs]
    base = configs[0][1] if configs else {}
    asked = [(name, config, dict[str, Any]()) for name, config in configs]
    asked += [(text, base, parsed(text)) for text in options.set or ()]
    for _name, _config, change in asked:
        check_said_once(change, options)
    for name, config, change in asked:
        yield configuration(described(name, config, change, said(options), options))
