"""A script that was edited: `guard` stands around `prepare`."""

import argparse
import os
import signal
import threading

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from common import WithLoss, dataset, weights, write
from torch.utils.data import DataLoader

from vram_guard.forks import hanging
from vram_guard.forks.exclusive import in_copy
from vram_guard_accelerate import guard


def lost(where, now):
    """A copy that looks is killed, or waits for ever, at one of two places."""
    if not in_copy() or where != now:
        return
    if where.endswith("hangs"):
        threading.Event().wait()
    os.kill(os.getpid(), signal.SIGSEGV)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out")
    parser.add_argument("--budget")
    parser.add_argument("--lost", default="")
    options = parser.parse_args()
    if options.lost:
        hanging.IDLE_SECONDS = 2.0
    accelerator = Accelerator()
    log = open(f"{options.out}.{accelerator.process_index}", "w", buffering=1)  # noqa: SIM115, PTH123 - as people write it
    set_seed(0)
    model = WithLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(dataset(40), batch_size=16, shuffle=True)
    guarding = guard(budget=options.budget, allow=("slices",))
    as_written = Accelerator.prepare, Accelerator.prepare_model
    with guarding:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    restored = (Accelerator.prepare, Accelerator.prepare_model) == as_written
    model.train()
    for how in ("dies", "hangs"):
        lost(options.lost, f"prepared, {how}")
    for x, y in loader:
        loss = model(x, labels=y)["loss"]
        for how in ("dies", "hangs"):
            lost(options.lost, f"training, {how}")
        accelerator.backward(loss)
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(loss.detach())
        print("a step", file=log)
        optimizer.step()
        optimizer.zero_grad()
    write(
        accelerator,
        options.out,
        weights=weights(accelerator, model),
        rates=[],
        text=guarding.text,
        fits=guarding.fits,
        restored=restored,
    )


if __name__ == "__main__":
    main()
