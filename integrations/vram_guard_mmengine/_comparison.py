"""``vram-guard mmengine compare``: the comparison on the command line."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from vram_guard.cli.exits import EXIT_DOES_NOT_FIT, EXIT_DONE
from vram_guard.cli.options import asked_budget
from vram_guard.cli.parsing import Parser
from vram_guard.cli.printing import print_json, print_now
from vram_guard.cli.releases import required_releases, tell_differences
from vram_guard.config_file import load_config
from vram_guard.errors import InvalidInputError
from vram_guard.language import _


def answer(options: argparse.Namespace) -> int:
    """Compare, and print the table or JSON."""
    from vram_guard.report.comparison import comparison_dict, render
    from vram_guard_mmengine import GuardRunner  # noqa: F401 - says what is missing where MMEngine is
    from vram_guard_mmengine._compare import compare

    required = required_releases(options)
    if "" not in sys.path:  # the folder that it is started in, as with `python -m`
        sys.path.insert(0, "")
    found = compare(
        _config(options),
        asked_budget(options),
        options.batch_size,
        _precisions(options.precision),
        allow=[name for name in options.allow.split(",") if name],
        lr_rule=options.lr_rule,
    )
    if options.json:
        print_json(comparison_dict(found))
    else:
        print_now([render(found).rstrip("\n")])
    tell_differences(required, found.releases)
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


def _precisions(given: list[str]) -> list[Any]:
    from vram_guard.step import PRECISIONS

    for name in given:
        if name not in PRECISIONS:
            raise InvalidInputError(
                _(
                    "{name} must be one of {known}, not {value}",
                    name="precision",
                    known=", ".join(PRECISIONS),
                    value=repr(name),
                )
            )
    return given
