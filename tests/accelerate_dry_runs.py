"""Several dry runs from one process, which is copied for each: importing the libraries takes longer than any of them.

``python accelerate_dry_runs.py FOLDER``: every folder in it that holds a request gets an answer. Variants of a launch
are run as :mod:`vram_guard_accelerate.planning.prediction` runs them, but for the process, which is a copy too.
"""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import accelerate  # noqa: F401 - imported once, for all copies
import torch
import torch._dynamo
from transformers import GPT2LMHeadModel, Trainer  # noqa: F401 - the same

from vram_guard_accelerate.dry_run import worker
from vram_guard_accelerate.relaunch.relaunch import Variant, settled

torch.set_num_threads(1)


def answered(folder: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    process = os.fork()
    if process == 0:
        log = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(environment)
        sys.argv = ["follow", str(folder)]
        worker.main()
    os.waitpid(process, 0)
    answer: dict[str, Any] = json.loads((folder / "answer.json").read_text(encoding="utf-8"))
    return answer


def with_variants(folder: Path) -> None:
    first = answered(folder, {})
    if not first.get("wanted"):
        return
    request = json.loads((folder / "request.json").read_text(encoding="utf-8"))
    tried: list[str] = []

    def run(asked: Mapping[str, Any]) -> dict[str, Any]:
        variant = Variant(**asked["variant"])
        tried.append(variant.words)
        inner = folder / f"variant_{len(tried)}"
        inner.mkdir()
        changed = {**request, "command": [*request["command"], *variant.arguments], "varied": asked}
        (inner / "request.json").write_text(json.dumps(changed), encoding="utf-8")
        (inner / "budget.pickle").write_bytes((folder / "budget.pickle").read_bytes())
        return answered(inner, variant.environment)

    best = settled(first, run, lambda _line: None)
    (folder / "answer.json").write_text(json.dumps({**best, "tried": tried}), encoding="utf-8")


for one in sorted(Path(sys.argv[1]).iterdir()):
    with_variants(one)
