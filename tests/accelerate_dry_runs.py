"""Several dry runs from one process, which is copied for each: importing the libraries takes longer than any of them.

``python accelerate_dry_runs.py FOLDER``: every folder in it that holds a request gets an answer.
"""

import os
import sys
from pathlib import Path

import accelerate  # noqa: F401 - imported once, for all copies
import torch
import torch._dynamo
from transformers import GPT2LMHeadModel, Trainer  # noqa: F401 - the same

from vram_guard_accelerate import follow

torch.set_num_threads(1)
for folder in sorted(Path(sys.argv[1]).iterdir()):
    process = os.fork()
    if process == 0:
        log = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.argv = ["follow", str(folder)]
        follow.main()
    os.waitpid(process, 0)
