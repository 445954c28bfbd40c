"""All published measurements: one table, and every row that could not be reproduced, with its reason.

    python -m benchmarks published [--source WORD ...] [--only WORD ...] [--json FILE] [--with FILE ...] [--out DIR]

Sources run in processes of their own: some need another environment than the rest. ``make bench-published`` makes these
and runs this. What is not installed is said, row by row:

- xmem's transformers: the release that the runs had, 4.51.3 (a folder that pip's --target filled, see --libraries);
- xmem's CNNs, timm's models: torchvision and timm, which come with a CUDA build of torch. The rest needs nothing but
  torch.

--with takes rows that an earlier run wrote with --json: their sources do not run again. The tables of
docs/lab/accuracy.md whose rows are all there are filled in, but not with --only; the others keep their figures and
their date.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import import_module
from itertools import groupby
from pathlib import Path

from benchmarks.harness.command import arguments_of, is_chosen
from benchmarks.harness.pages import DOCS
from benchmarks.harness.records import Results, read, write
from benchmarks.published.pages import show
from benchmarks.published.source import Source, run
from vram_guard.errors import InvalidInputError

ROOT = Path(__file__).parents[2]
MODULES = ("xmem", "liger", "images")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run everything, print the table; the exit status is 1 where a row failed, 2 for a file that cannot be read."""
    parser = arguments_of("published", __doc__, only="rows", json="every row")
    parser.add_argument("--source", nargs="+", default=[], metavar="WORD", help="only sources whose titles contain it")
    parser.add_argument("--with", nargs="+", type=Path, default=[], metavar="FILE", dest="files")
    parser.add_argument("--libraries", type=Path, default=ROOT / ".venv-published", metavar="FOLDER")
    parser.add_argument("--here", action="store_true", help="run the sources in this process, and fill in no page")
    parser.add_argument("--out", type=Path, default=DOCS, metavar="DIR")
    options = parser.parse_args(arguments)
    results = Results()
    try:
        for path in options.files:
            results.add(read(path))
    except InvalidInputError as error:
        print(error, file=sys.stderr)
        return 2
    chosen = [
        (module, one)
        for module in MODULES
        for one in import_module(f"benchmarks.published.{module}").SOURCES
        if one.title not in results.made_with and is_chosen(one.title, options.source)
    ]
    if options.here:
        for _module, one in chosen:
            results.add(run(one, options.only, lambda line: print(line, flush=True)))
    else:
        groups = groupby(chosen, lambda pair: (pair[0], pair[1].libraries, pair[1].environment))
        for _where, group in groups:
            results.add(_in_its_place([one for _module, one in group], options))
        show(results, None if options.only else options.out)
    if options.json:
        write(results, options.json)
    return int(bool(results.failed))


def _in_its_place(sources: Sequence[Source], options: argparse.Namespace) -> Results:
    """Sources of one place in a process of their own; where it breaks down, its errors are in the results."""
    first = sources[0]
    python = options.libraries / first.environment / "bin" / "python" if first.environment else Path(sys.executable)
    folders = [str(options.libraries / first.libraries)] if first.libraries else []
    paths = os.pathsep.join([*folders, str(ROOT), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        command = [str(python) if python.exists() else sys.executable, "-m", "benchmarks", "published", "--here"]
        command += ["--json", str(file), "--source", *(f"={one.title}" for one in sources)]
        command += ["--only", *options.only] if options.only else []
        done = subprocess.run(
            command, check=False, text=True, stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": paths}
        )
        if file.exists():
            return read(file)
    return Results(failed={", ".join(one.title for one in sources): f"{done.stderr[-4000:]}\n{done.returncode}"})
