"""What selective checkpointing costs the host: microseconds for each operator of a block, beside other ways to run it.

Small tensors on one core, so that nothing counts but starting operators.
"""

from __future__ import annotations

import time

import torch
from torch import nn

from vram_guard.techniques import Recipe, install

OPERATORS, BLOCKS, STEPS = 100, 4, 30


class Block(nn.Module):
    """A hundred operators and a product."""

    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The result has the shape of ``x``."""
        for _ in range(OPERATORS // 5):
            x = ((torch.tanh(x) * 1.1 + 1.0).sigmoid()).exp()
        return self.product(x)


def microseconds(recipe: Recipe) -> float:
    """Processor time of forward and backward for each operator of the forward."""
    model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    undo = install(model, recipe)
    inputs = torch.randn(4, 8, requires_grad=True)
    for step in range(STEPS + 1):
        if step == 1:  # the first one warms up
            start = time.process_time()
        model(inputs).sum().backward()
    undo()
    return (time.process_time() - start) / STEPS / BLOCKS / (OPERATORS + 1) * 1e6


def main() -> None:
    """Print the times, and what selective checkpointing adds to each of a block's two forwards."""
    torch.set_num_threads(1)
    every = tuple(map(str, range(BLOCKS)))
    whole, kept = Recipe(checkpoint=every), Recipe(checkpoint=every, checkpoint_keeps=("addmm",))
    ways = {"as written": Recipe(), "checkpointed": whole, "with the product kept": kept}
    found = {name: min(microseconds(way) for _ in range(3)) for name, way in ways.items()}
    for name, each in found.items():
        print(f"{name:24}{each:7.1f} us for each operator")
    added = (found["with the product kept"] - found["checkpointed"]) / 2
    print(f"{'added to each forward':24}{added:7.1f} us for each operator")


if __name__ == "__main__":
    main()
