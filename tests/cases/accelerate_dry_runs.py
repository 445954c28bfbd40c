"""Several dry runs from one process, which is copied for each: importing the libraries takes longer than any of them.

``python accelerate_dry_runs.py FOLDER``: each folder in it whose name is read from standard input, and that holds a
request, gets an answer; its name is written then.
"""

import gc
import importlib
import os
import sys
from pathlib import Path

import accelerate  # noqa: F401 - imported once, for all copies
import torch
import torch._dynamo
import torch.distributed.tensor
from guard_imports import PLANS
from transformers import GPT2LMHeadModel, Trainer  # noqa: F401 - the same

from vram_guard.codec import from_json
from vram_guard_accelerate.planning import followed_script, worker  # noqa: F401 - imported once, too
from vram_guard_accelerate.planning.requests import ANSWER, REQUEST, DryRunRequest

for late in PLANS:
    importlib.import_module(late)
torch.set_num_threads(1)
gc.collect()
gc.freeze()  # no copy looks through it again


def answer(folder: Path) -> None:
    request = from_json(DryRunRequest, (folder / REQUEST).read_bytes())
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
    assert (folder / ANSWER).is_file()


for line in sys.stdin:
    answer(Path(sys.argv[1], line.strip()))
    print(line, end="", flush=True)
