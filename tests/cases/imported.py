"""What a statement imports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

HEAVY = {
    "torch",
    "lightning",
    "pytorch_lightning",
    "mmengine",
    "accelerate",
    "transformers",
    "rich",
    "numpy",
    "matplotlib",
}


def imported_after(statement: str, *extra_paths: Path) -> set[str]:
    """The top-level packages that a fresh interpreter holds after ``statement``."""
    code = f"import json, sys\n{statement}\nprint(json.dumps([name.partition('.')[0] for name in sys.modules]))"
    path = os.pathsep.join([*map(str, extra_paths), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": path}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    return set(json.loads(run.stdout.splitlines()[-1]))


def heavy_after(statement: str, *extra_paths: Path) -> set[str]:
    """The heavy ones among them."""
    return HEAVY & imported_after(statement, *extra_paths)
