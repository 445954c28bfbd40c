"""``vram-guard mmengine``: what the command line offers for MMEngine; what a command needs is imported when it runs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from vram_guard.cli.exits import EXIT_DOES_NOT_FIT, EXIT_DONE
from vram_guard.cli.options import DEVICE, add_options, asked_budget, listed, whole_number
from vram_guard.cli.parsing import Parser
from vram_guard.cli.printing import print_comparison
from vram_guard.closed_form.from_config import precision_word
from vram_guard.config_file import load_config
from vram_guard.errors import InvalidInputError, MissingLibraryError
from vram_guard.language import _


def add(commands: Any) -> None:
    """The subcommands."""
    mmengine = commands.add_parser("mmengine", help=_("vram_guard in OpenMMLab's configs"))
    own = mmengine.add_subparsers(title=_("commands"), metavar="COMMAND", required=True)
    _add_compare(own)


def _add_compare(own: Any) -> None:
    parser = own.add_parser(
        "compare",
        help=_("batch sizes and precisions of a config, side by side"),
        description=_(
            "Predict a config's training step at several batch sizes and precisions, on a named GPU: "
            "memory, modelled speed, and the learning rate that goes with the batch. Nothing is trained. "
            "Run it where tools/train.py runs, so that the config's modules are found."
        ),
    )
    parser.add_argument("config", help=_("a config file"))
    add_options(parser, *DEVICE, "lr-rule", "json")
    add_options(parser, "allow")
    parser.add_argument("--batch-size", action="list", nargs="+", metavar="N", help=_("default: as written, twice"))
    add_options(parser, "precision", action="list", nargs="+")
    parser.add_argument(
        "--cfg-options",
        action="list",
        nargs="+",
        metavar="KEY=VALUE",
        help=_("settings of the config"),
    )
    parser.set_defaults(run=_compare)


def _compare(options: argparse.Namespace) -> int:
    """Print the table, or JSON."""
    try:
        from vram_guard_mmengine import GuardRunner  # noqa: F401 - says what is missing where MMEngine is
    except ImportError as error:
        raise MissingLibraryError(str(error)) from error
    from vram_guard_mmengine._compare import compare

    if "" not in sys.path:  # the folder that it is started in, as with `python -m`
        sys.path.insert(0, "")
    precisions: list[Any] = [precision_word("--precision", one) for one in listed(options.precision)]
    found = compare(
        _config(options),
        asked_budget(options),
        [whole_number("batch_size", one) for one in listed(options.batch_size)],
        precisions,
        allow=listed(options.allow),
        lr_rule=options.lr_rule,
    )
    print_comparison(found, as_json=options.json)
    return EXIT_DONE if found.all_fit else EXIT_DOES_NOT_FIT


def _config(options: argparse.Namespace) -> Any:
    from mmengine.config import Config, DictAction

    if not Path(options.config).is_file():
        raise InvalidInputError(_("there is no config {path}", path=options.config))
    if Path(options.config).suffix in (".yaml", ".yml"):
        load_config(options.config)  # says what is wrong with it, and takes no hours over a bomb of aliases
    try:
        cfg = Config.fromfile(options.config)
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise InvalidInputError(_("{path} cannot be read: {reason}", path=options.config, reason=why)) from error
    if "model" not in cfg:
        raise InvalidInputError(_("{path} has no model: it is no config of a training", path=options.config))
    if options.cfg_options:
        parser = Parser(prog="vram-guard mmengine compare")
        parser.add_argument("--cfg-options", nargs="+", action=DictAction)
        cfg.merge_from_dict(parser.parse_args(["--cfg-options", *options.cfg_options]).cfg_options)
    return cfg
