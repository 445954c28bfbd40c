"""Models whose loss slices of a batch would change, and some whose loss they do not; run with the name of one."""

import argparse
import random

import torch
from accelerate import Accelerator
from common import Block, Network, WithLoss, write
from torch import nn
from training import loop


class Plain(WithLoss):
    """A mean over samples."""

    def loss(self, logits, labels):
        return nn.functional.cross_entropy(logits, labels)

    def forward(self, pixels, labels=None):
        logits = self.network(pixels)
        return {"loss": None if labels is None else self.loss(logits, labels), "logits": logits}


class Wide(Plain):
    """Many more classes than features, as in a model of language."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(10, 120_000)

    def loss(self, logits, labels):
        return super().loss(self.head(logits), labels)


class Dropping(Plain):
    """Random numbers for every sample, in every block, and normalisation over the batch."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(10)
        for block in self.network.blocks:
            block.narrow = nn.Sequential(block.narrow, nn.Dropout(0.2))

    def loss(self, logits, labels):
        return super().loss(self.norm(logits), labels)


class Centred(Plain):
    """The mean of a batch is taken off its samples, before any weight has seen them."""

    def forward(self, pixels, labels=None):
        return super().forward(pixels - pixels.mean(0), labels)


class Weighted(Plain):
    """Some classes count more than others."""

    def __init__(self):
        super().__init__()
        self.register_buffer("classes", torch.linspace(0.1, 3, 10))

    def loss(self, logits, labels):
        return nn.functional.cross_entropy(logits, labels, self.classes)


class Grouped(Plain):
    """Samples come in groups of four, which are told apart by their mean: batches of other sizes fail."""

    def loss(self, logits, labels):
        means = logits.view(-1, 4, 10).mean(1, keepdim=True)
        return super().loss((logits.view(-1, 4, 10) - means).flatten(0, 1), labels)


class Masked(WithLoss):
    """A mean over the positions that a mask leaves."""

    def forward(self, pixels, labels=None):
        x = self.network.first(pixels["values"] if labels is not None else pixels)
        for block in self.network.blocks:
            x = block(x)
        if labels is None:
            return x
        of_each = nn.functional.cross_entropy(
            self.network.last(x).transpose(1, 2), labels[:, None].expand(x.shape[:2]), reduction="none"
        )
        return {"loss": (of_each * pixels["mask"]).sum() / pixels["mask"].sum()}


class Queued(Plain):
    """The latest outputs stay in a buffer, which the next call compares with."""

    def __init__(self):
        super().__init__()
        self.register_buffer("latest", torch.zeros(10))

    def loss(self, logits, labels):
        apart = (logits - self.latest).square().mean()
        self.latest.copy_(logits.detach().mean(0))
        return super().loss(logits, labels) + 0.1 * apart


class ByChance(Block):
    """Draws from a generator of Python's, which checkpointing does not put back."""

    def forward(self, x):
        return super().forward(x * (1 + random.random()))


class Drawing(Network):
    """Blocks that draw from Python's generator, whose state checkpointing puts back."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(ByChance(32) for _ in range(4))


class Overwriting(torch.autograd.Function):
    """Its backward spoils what it has saved, behind autograd's back."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.saved_tensors[0].data.zero_()
        return gradient


class Spoiled(Block):
    """What :class:`Overwriting` spoils is what another operator has saved too."""

    def forward(self, x):
        wide = nn.functional.silu(self.wide(self.norm(x)))
        return x + self.narrow(wide) + self.narrow(Overwriting.apply(wide))


class Spoiling(Network):
    """Blocks whose gradients are others where their activations come back as copies."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Spoiled(32) for _ in range(4))


class Squared(Block):
    """More bytes between its products."""

    def forward(self, x):
        return x + self.narrow(nn.functional.gelu(self.wide(self.norm(x))).square().tanh())


class Heavy(Network):
    """Blocks whose products take longer than all else."""

    def __init__(self):
        super().__init__(width=256)
        self.blocks = nn.ModuleList(Squared(256) for _ in range(3))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--out")
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--samples", type=int, default=40)
    options = parser.parse_args()
    accelerator = Accelerator()
    model_class = globals()[options.model]

    def loss_of(model, x, y):
        if model_class is Masked:
            x = {"values": x, "mask": x[:, :, 0] > 0}
        return model(x, labels=y)["loss"]

    outside = None if issubclass(model_class, Network) else loss_of
    write(accelerator, options.out, **loop(options, accelerator, model=model_class, loss_of=outside))


if __name__ == "__main__":
    main()
