"""A detector's loop: a batch is a list of three pictures of three channels, which reads as three columns as well.

With ``--time_first`` the model is called with time first, in sequences that are as long as the batch.
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from common import Network, weights, write
from torch import nn
from torch.utils.data import DataLoader


class Detector(nn.Module):
    """Takes a list of pictures and a list of their targets, and returns its loss, as torchvision's detectors do."""

    def __init__(self):
        super().__init__()
        self.network = Network()

    def forward(self, pictures, targets):
        logits = self.network(torch.stack([picture.flatten(0, 1) for picture in pictures]))
        return {"loss": nn.functional.cross_entropy(logits, torch.stack([target["kind"] for target in targets]))}


class TimeFirst(Network):
    def forward(self, x):
        return super().forward(x.transpose(0, 1))


def pictures(size):
    """Pairs of a picture and its target."""
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randn(3, size, 4, generator=generator), {"kind": torch.randint(0, 10, (), generator=generator)})
        for _ in range(12)
    ]


def as_lists(samples):
    return [picture for picture, _ in samples], [target for _, target in samples]


def time_first(model, x, y):
    return nn.functional.cross_entropy(model(x.transpose(0, 1)), y)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out")
    parser.add_argument("--time_first", action="store_true")
    options = parser.parse_args()
    accelerator = Accelerator()
    set_seed(0)
    model = TimeFirst() if options.time_first else Detector()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sequences = [(torch.randn(16, 4), torch.tensor(at % 10)) for at in range(64)]
    data, collate, size = (sequences, None, 16) if options.time_first else (pictures(1024), as_lists, 3)
    loader = DataLoader(data, batch_size=size, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    losses = []
    for x, y in loader:
        loss = time_first(model, x, y) if options.time_first else model(x, y)["loss"]
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    write(accelerator, options.out, weights=weights(accelerator, model), losses=losses)


if __name__ == "__main__":
    main()
