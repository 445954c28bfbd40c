"""Several dry runs from one process, which is copied for each: importing the libraries takes longer than any of them.

``python accelerate_dry_runs.py FOLDER``: each folder in it whose name is read from standard input, and that holds a
request, gets an answer; its name is written then. Relaunches are run as
:mod:`vram_guard_accelerate.planning.prediction` runs them, but for the process, which is a copy too.
"""

import gc
import importlib
import json
import os
import sys
from pathlib import Path

import accelerate  # noqa: F401 - imported once, for all copies
import torch
import torch._dynamo
import torch.distributed.tensor
from guard_imports import PLANS
from transformers import GPT2LMHeadModel, Trainer  # noqa: F401 - the same

from vram_guard.codec import from_json, to_json
from vram_guard_accelerate.dry_run.results import DryRunFailure
from vram_guard_accelerate.planning import followed_script, worker  # noqa: F401 - imported once, too
from vram_guard_accelerate.planning.prediction import better_of, read_answer
from vram_guard_accelerate.planning.relaunch import Relaunch
from vram_guard_accelerate.planning.requests import ANSWER, REQUEST, DryRunAnswer, DryRunRequest

for late in PLANS:
    importlib.import_module(late)
torch.set_num_threads(1)
gc.collect()
gc.freeze()  # no copy looks through it again


def answered(folder: Path, request: DryRunRequest) -> DryRunAnswer | DryRunFailure:
    process = os.fork()
    if process == 0:
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        log = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(request.environment)
        sys.argv = ["worker", str(folder)]
        worker.main()
    os.waitpid(process, 0)
    answer = read_answer(folder)
    assert answer is not None
    return answer


def with_relaunch(folder: Path) -> None:
    request = from_json(DryRunRequest, (folder / REQUEST).read_bytes())
    first = answered(folder, request)
    if isinstance(first, DryRunFailure) or first.relaunch is None:
        return
    tried: list[str] = []

    def run(relaunch: Relaunch) -> DryRunAnswer | DryRunFailure:
        tried.append(relaunch.words)
        inner = folder / "relaunch"
        inner.mkdir()
        changed = request.relaunched(relaunch)
        (inner / REQUEST).write_text(to_json(changed), encoding="utf-8")
        return answered(inner, changed)

    (folder / ANSWER).write_text(to_json(better_of(first, run)), encoding="utf-8")
    (folder / "tried.json").write_text(json.dumps(tried), encoding="utf-8")


for line in sys.stdin:
    with_relaunch(Path(sys.argv[1], line.strip()))
    print(line, end="", flush=True)
