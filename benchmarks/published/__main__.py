"""All published measurements in one run: one table, and every row that could not be reproduced, with its reason.

    python benchmarks/published [--rows] [--only WORD ...] [--json FILE] [--with FILE ...] [--python MODULE=PATH ...]

Each module runs in a process of its own: two need another environment than the rest. ``make bench-published`` makes
both and runs this. What is not installed is said, row by row:

- xmem's transformers: the release that the runs had, 4.51.3 (a folder that pip's --target filled, see --libraries);
- xmem's CNNs, timm_brackets, gpumemnet: torchvision and timm, which come with a CUDA build of torch;
- peft_methods: peft and diffusers; lora_t4: peft, and bitsandbytes for QLoRA;
- litgpt's configurations: litgpt (a folder, as transformers 4.51.3). The rest needs nothing but torch.

--with takes rows that an earlier run wrote with --json: their modules do not run again.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness.command import arguments_of
from benchmarks.harness.records import Results, read, write
from benchmarks.harness.tables import print_table
from vram_guard.errors import InvalidInputError

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = ROOT / ".venv-published"


class Run(NamedTuple):
    """One module's part."""

    module: str
    sources: tuple[str, ...]
    """Titles of what it gives."""
    arguments: tuple[str, ...] = ()
    libraries: str = ""
    """Folder under --libraries that goes before the installed packages."""
    environment: str = ""
    """Environment under --libraries whose Python runs it, where it is there."""


RUNS = (
    Run("xmem", ("xMem's runs, transformers",), ("--kind", "transformers"), libraries="transformers-4.51.3"),
    Run("xmem", ("xMem's runs, CNNs",), ("--kind", "cnns"), environment="torchvision"),
    Run("liger", ("Liger-Kernel's operators",)),
    Run(
        "timm_brackets",
        ("timm on a 24 GB card", "timm on a 24 GB card, kept aside"),
        environment="torchvision",
    ),
    Run("peft_methods", ("peft's methods, Llama-3.2-3B", "peft's methods, FLUX.2-klein-4B")),
    Run("segformer", ("MMSegmentation's SegFormer",)),
    Run("gpumemnet", ("GPUMemNet's table",), environment="torchvision"),
    Run("readmes", ("rasbt's ViT-L/16",), ("--kind", "vit")),
    Run("readmes", ("litgpt's configurations",), ("--kind", "litgpt"), libraries="litgpt"),
    Run(
        "lora_t4",
        (
            "LoRA on a T4, reserved",
            "LoRA on a T4, allocated",
            "QLoRA on a T4, reserved",
            "QLoRA on a T4, allocated",
        ),
    ),
    Run("readmes", ("other READMEs",), ("--kind", "others")),
)


def run(each: Run, options: argparse.Namespace, file: Path) -> Results:
    """The module in a process of its own; where it breaks down, its output is in the results."""
    python = str(options.libraries / each.environment / "bin" / "python") if each.environment else sys.executable
    chosen = dict(pair.split("=", 1) for pair in options.python)
    python = chosen.get(each.module, python if Path(python).exists() else sys.executable)
    folders = [str(options.libraries / each.libraries)] if each.libraries else []
    paths = os.pathsep.join([*folders, str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [python, "-m", f"benchmarks.published.{each.module}", *each.arguments, "--json", str(file)]
    command += ["--only", *options.only] if options.only else []
    done = subprocess.run(
        command,
        check=False,
        text=True,
        stdout=None if options.rows else subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": paths},
    )
    if file.exists():
        return read(file)
    return Results(failed={f"{each.module} ({python})": f"{done.stderr[-4000:]}\nexit status {done.returncode}"})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run everything, print the table; the exit status is 1 where a row failed, 2 for a file that cannot be read."""
    parser = arguments_of("python benchmarks/published", __doc__, only="rows", json="every row")
    parser.add_argument("--rows", action="store_true", help="also print every row as it is predicted")
    parser.add_argument("--with", nargs="+", type=Path, default=[], metavar="FILE", dest="files")
    parser.add_argument("--python", nargs="+", default=[], metavar="MODULE=PATH", help="another Python for a module")
    parser.add_argument("--libraries", type=Path, default=ENVIRONMENTS, metavar="FOLDER")
    options = parser.parse_args(arguments)
    if any("=" not in pair for pair in options.python):
        parser.error("--python takes MODULE=PATH, as in --python xmem=/opt/old/bin/python")
    results = Results()
    try:
        for path in options.files:
            results.add(read(path))
    except InvalidInputError as error:
        print(error, file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        for number, each in enumerate(RUNS):
            if not set(each.sources) <= set(results.made_with):
                results.add(run(each, options, Path(folder) / f"{number}.json"))
    print_table(results)
    if options.json:
        write(results, options.json)
    return int(bool(results.failed))


if __name__ == "__main__":
    raise SystemExit(main())
