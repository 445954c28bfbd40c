"""A script that was edited: `guard` stands around `prepare`."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from common import WithLoss, dataset, weights, write
from torch.utils.data import DataLoader

from vram_guard_accelerate import guard


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out")
    parser.add_argument("--budget")
    options = parser.parse_args()
    accelerator = Accelerator()
    log = open(f"{options.out}.{accelerator.process_index}", "w", buffering=1)  # noqa: SIM115, PTH123 - as people write it
    set_seed(0)
    model = WithLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(dataset(40), batch_size=16, shuffle=True)
    guarding = guard(budget=options.budget, allow=("accumulate",))
    as_written = Accelerator.prepare, Accelerator.prepare_model
    with guarding:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    restored = (Accelerator.prepare, Accelerator.prepare_model) == as_written
    model.train()
    for x, y in loader:
        loss = model(x, labels=y)["loss"]
        accelerator.backward(loss)
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(loss.detach())
        print("a step", file=log)
        optimizer.step()
        optimizer.zero_grad()
    write(
        accelerator, options.out, weights=weights(accelerator, model), rates=[], text=guarding.text, restored=restored
    )


if __name__ == "__main__":
    main()
