"""Scripts that offer batch size, accumulation and precision as options."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from common import Network, dataset, end_process_groups_at_exit, weights, write
from torch import nn
from torch.utils.data import DataLoader


def by_hand(options):
    """Accumulates by itself, and computes its loss outside the model."""
    steps_per_update = options.gradient_accumulation_steps
    accelerator = Accelerator()
    set_seed(0)
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(dataset(options.samples), batch_size=options.batch_size, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(2):
        model.train()
        for number, (x, y) in enumerate(loader):
            accelerator.backward(nn.functional.cross_entropy(model(x), y) / steps_per_update)
            if (number + 1) % steps_per_update == 0:
                optimizer.step()
                optimizer.zero_grad()
    write(accelerator, options.out, weights=weights(accelerator, model), rates=[])


def asks(options):
    """Frozen models in the precision of the run, which the script asks the Accelerator for."""
    accelerator = Accelerator(mixed_precision=options.mixed_precision)
    set_seed(0)
    encoder = nn.Linear(1000, 1000, bias=False).requires_grad_(requires_grad=False)
    dtype = {"no": torch.float32, "bf16": torch.bfloat16}[accelerator.mixed_precision]
    encoder.to(accelerator.device, dtype=dtype)
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(dataset(options.samples), batch_size=options.batch_size, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x, y in loader:
        with torch.no_grad():
            code = encoder(torch.ones(1, 1000, dtype=dtype, device=x.device)).float().mean()
        accelerator.backward(nn.functional.cross_entropy(model(x + code), y))
        optimizer.step()
        optimizer.zero_grad()
    write(accelerator, options.out, weights=weights(accelerator, model), rates=[], dtype=str(encoder.weight.dtype))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=["asks", "by_hand"])
    parser.add_argument("--out")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--mixed_precision", choices=["no", "bf16"])
    options = parser.parse_args()
    {"asks": asks, "by_hand": by_hand}[options.way](options)


if __name__ == "__main__":
    end_process_groups_at_exit()
    main()
