"""``vram-guard mmengine compare``: the comparison on the command line."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vram_guard.cli.exits import EXIT_DONE
from vram_guard.cli.printing import print_columns, print_json
from vram_guard.errors import InvalidInputError
from vram_guard.units import format_bytes

if TYPE_CHECKING:
    from vram_guard_mmengine.compare import Comparison, Row

# ruff: noqa: T201 - the command line prints


def answer(options: argparse.Namespace) -> int:
    """Compare, and print the table or JSON."""
    from vram_guard_mmengine import GuardRunner  # noqa: F401 - says what is missing where MMEngine is
    from vram_guard_mmengine.compare import compare

    # As `python tools/train.py` does for the folder it is started in by PYTHONPATH=. in OpenMMLab's projects.
    if "" not in sys.path:
        sys.path.insert(0, "")
    found = compare(
        _config(options),
        options.gpu,
        options.batch_size,
        _precisions(options.precision),
        lr_rule=options.lr_rule,
        margin=options.margin,
    )
    if options.json:
        print_json({"gpu": found.gpu.name, "usable": found.budget.usable, "rows": [asdict(row) for row in found.rows]})
    else:
        _show(found, options.config)
    return EXIT_DONE


def _config(options: argparse.Namespace) -> Any:
    from mmengine.config import Config, DictAction

    if not Path(options.config).is_file():
        raise InvalidInputError(f"there is no config {options.config}")
    cfg = Config.fromfile(options.config)
    if options.cfg_options:
        parser = argparse.ArgumentParser()
        parser.add_argument("--cfg-options", nargs="+", action=DictAction)
        cfg.merge_from_dict(parser.parse_args(["--cfg-options", *options.cfg_options]).cfg_options)
    return cfg


def _precisions(given: list[str]) -> list[Any]:
    from vram_guard.step import PRECISIONS

    for name in given:
        if name not in PRECISIONS:
            raise InvalidInputError(f"precision must be one of {', '.join(PRECISIONS)}, not {name!r}")
    return given


def _show(found: Comparison, name: str) -> None:
    print(f"{name} on a {found.gpu.name}: {format_bytes(found.budget.usable)} usable\n")
    titles = ("batch", "precision", "memory", "of the card", "fits", "step", "samples/s", "learning rate")
    print_columns([titles, *(_cells(row, found.rows[0]) for row in found.rows)], left=0)
    print(
        "\nmemory: predicted peak that PyTorch reserves. step and samples/s: by a model of the card, without the data "
        f"loader.\nlearning rate: the config's, written for a batch of {found.written}, by the {found.lr_rule} rule."
    )
    for note in found.notes:
        print(f"- {note}")


def _cells(row: Row, first: Row) -> tuple[str, ...]:
    faster = row.samples_per_second / first.samples_per_second
    return (
        str(row.batch_size),
        row.precision,
        format_bytes(row.peak_reserved),
        f"{row.share:.0%}",
        "yes" if row.fits else "no",
        f"{1000 * row.seconds:.1f} ms",
        f"{row.samples_per_second:.0f} (x {faster:.2f})",
        f"{row.learning_rate:g}",
    )
