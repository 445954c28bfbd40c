"""``vram-guard plan``: one training predicted and planned, with its report and every picture of it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vram_guard.cli._configuration import check_said_once, described, parsed, said
from vram_guard.cli.exits import EXIT_DOES_NOT_FIT, EXIT_DONE
from vram_guard.cli.options import (
    DEVICE,
    SIZES,
    WEIGHTS,
    add_config,
    add_options,
    asked_budget,
    listed,
    whole_number,
)
from vram_guard.cli.printing import print_json, progress_shown, say
from vram_guard.cli.ways import check_needed
from vram_guard.errors import InvalidInputError
from vram_guard.language import _
from vram_guard.plan.layouts import LAYOUTS
from vram_guard.plan.options import PlanOptions
from vram_guard.state.collector import collector_paused

if TYPE_CHECKING:
    from vram_guard.plan import Plan

#: How large a sample is, and what the weights are.
_SHAPES = (*SIZES, *WEIGHTS)


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
    add_config(parser, _("the training config, YAML; or a step or a model: file.py:name, resnet50"))
    parser.add_argument("--set", action="list", metavar="A=1,B=2", help=_("values in place of the config's"))
    add_options(parser, "model", "batch", *_SHAPES, *DEVICE, "allow", "cudnn", "json")
    add_options(parser, "verbose", default=None)  # None: as the settings say
    several = parser.add_argument_group(_("a training over several GPUs"))
    several.add_argument(
        "--gpus", metavar="N", help=_("spread the training over N GPUs; auto: as few as suffice for the whole batch")
    )
    several.add_argument("--node-gpus", metavar="N", help=_("GPUs of a node (default: 8)"))
    several.add_argument(
        "--link",
        action="list",
        metavar="A,B",
        help=_('what connects the GPUs of a node, and the nodes, such as "nvlink,ib400" (default: usual for the GPU)'),
    )
    several.add_argument(
        "--layouts",
        action="list",
        metavar="A,B",
        help=_("ways to spread that are tried (default: {all})", all=",".join(LAYOUTS)),
    )
    parser.add_argument("--title", default="", metavar="TEXT", help=_("title of the HTML report"))
    plots = parser.add_argument_group(_("plots"))
    plots.add_argument("--html", metavar="FILE", help=_("write the report as a self-contained HTML page"))
    plots.add_argument("--plot", metavar="FILE", help=_("write the memory over the step as .svg"))
    plots.add_argument("--snapshot", metavar="FILE", help=_("write a snapshot for pytorch.org/memory_viz"))
    parser.set_defaults(run=_plan)


def _check_pictures(options: argparse.Namespace) -> None:
    for path in (options.html, options.plot, options.snapshot):
        if path and Path(path).is_dir():
            raise InvalidInputError(_("{path} is a folder: give the name of a file", path=path))
    if options.plot and Path(options.plot).suffix.lower() != ".svg":
        raise InvalidInputError(_("{path}: the picture is written as .svg", path=options.plot))


def _write_pictures(options: argparse.Namespace, made: Plan, title: str) -> None:
    """Write what was asked for, and say on standard error where it is."""
    from vram_guard.report import save

    for path, kind in ((options.html, ".html"), (options.plot, ".svg"), (options.snapshot, ".pickle")):
        if path:
            save(made, path, kind, title=title)
            say(_("wrote {path}", path=path), sys.stderr)


def _several(options: argparse.Namespace) -> PlanOptions:
    """What the options say about cuDNN and several GPUs."""
    return PlanOptions(
        cudnn=options.cudnn,
        node=options.node_gpus,
        link=",".join(options.link) if options.link else None,
        layouts=None if options.layouts is None else listed(options.layouts),
    )


def _one_of(options: argparse.Namespace) -> None:
    """The one thing to plan for: a config, or the name of a step or a model, which CONFIG may be as well."""
    name = options.config
    if name and not Path(name).exists() and Path(name).suffix not in (".yaml", ".yml", ".json"):
        if options.model is not None:  # also of --model gpt2 --gpu RTX 4090
            raise InvalidInputError(_("give {name} or --step, not both; a value with spaces needs quotes", name=name))
        options.config, options.model = None, name
    if not options.config and not options.model:
        raise InvalidInputError(_("name what to plan for: CONFIG, or --step module:function"))


@collector_paused()  # imports make hundreds of thousands of objects that all stay
def _plan(options: argparse.Namespace) -> int:
    from vram_guard.config_file import load_config
    from vram_guard.plan import DEFAULT_ALLOW, plan
    from vram_guard.plan.checks import check_cudnn
    from vram_guard.plan.techniques import checked_techniques
    from vram_guard.report.as_json import as_dict
    from vram_guard.report.html import html_report, where_to_read_on
    from vram_guard.report.text import show

    if options.gpus is None:
        check_needed(options, ("node_gpus", "link", "layouts"), needs="--gpus")
    if options.json and not options.html:
        check_needed(options, ("title",), needs="--html")
    _check_pictures(options)
    _one_of(options)
    budget = asked_budget(options)
    name = options.title or (Path(options.config).name if options.config else options.model)
    config = load_config(options.config) if options.config else {}
    change = parsed(*options.set) if options.set else {}
    check_said_once(change, options)
    one = described(name, config, change, said(options), options)
    allow = DEFAULT_ALLOW if options.allow is None else listed(options.allow)
    checked_techniques(allow)
    check_cudnn(options.cudnn)
    batch_size = one.request.numbers["batch"]
    made = None if options.gpus is not None else one.plan_as_written(budget, cudnn=options.cudnn)
    with progress_shown() as progress:
        made = made or one.planned(
            lambda step: plan(
                step,
                batch_size,
                budget,
                allow=allow,
                gpus=options.gpus if options.gpus in (None, "auto") else whole_number("gpus", options.gpus),
                options=_several(options),
                progress=progress,
            )
        )
    one.tell_assumed()
    if options.json:
        print_json({"kind": "plan", "report": as_dict(made)})
    else:
        show(made, verbose=bool(options.verbose))
        if not options.verbose and not options.html:
            say(where_to_read_on(html_report(made, title=name), "-v"))
    _write_pictures(options, made, name)
    return EXIT_DONE if made.fits else EXIT_DOES_NOT_FIT
