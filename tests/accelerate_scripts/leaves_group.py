"""Ends with its process group alive, right after operations of it: as scripts do."""

import argparse
import atexit

import torch
from accelerate import Accelerator
from torch import distributed

parser = argparse.ArgumentParser()
parser.add_argument("--raises", action="store_true")
options = parser.parse_args()
accelerator = Accelerator(cpu=True)
destroy = distributed.destroy_process_group


def told(*args, **kwargs):
    destroy(*args, **kwargs)
    print("the group is ended", flush=True)


distributed.destroy_process_group = told
atexit.register(lambda: print("the script's own exit handler:", distributed.is_initialized(), flush=True))
for _ in range(50):
    works = [distributed.all_reduce(torch.ones(2**12), async_op=True) for _ in range(20)]
    for work in works:
        work.wait()
if options.raises:
    raise SystemExit(3)
