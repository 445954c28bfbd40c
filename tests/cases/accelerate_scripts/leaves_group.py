"""Ends with its process group alive, in the middle of operations of it."""

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
works = [distributed.all_reduce(torch.ones(2**14), async_op=True) for _ in range(30)]
if options.raises:
    raise SystemExit(3)
