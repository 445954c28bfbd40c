"""The releases that a prediction is for."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version


def write(folder, name, text, encoding="utf-8"):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode(encoding))
    return path


def test_those_that_are_imported_and_no_others(tmp_path):
    write(tmp_path, "timm/__init__.py", "__version__ = '1.0.9'\n")  # on the path, without metadata
    write(tmp_path, "diffusers/__init__.py", "raise SystemError\n")
    write(tmp_path, "transformers/__init__.py", "")
    write(tmp_path, "transformers/modeling_utils.py", "")
    write(tmp_path, "transformers-4.45.2.dist-info/METADATA", "Name: transformers\nVersion: 4.45.2\n")
    code = """
import torch, timm, yaml, transformers
from vram_guard.releases.installed import Releases
print(Releases.here())
import transformers.modeling_utils
print(Releases.here())
"""
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": path}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    looked_at, used = (line.split(", ") for line in run.stdout.strip().splitlines())
    assert used[0] == "Python " + ".".join(map(str, sys.version_info[:3]))
    assert used[1].startswith(f"torch {version('torch')}")
    assert used[2:] == ["transformers 4.45.2", "timm 1.0.9"]
    assert looked_at == [used[0], used[1], used[3]]
