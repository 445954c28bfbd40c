"""Blocks that are checkpointed: pure ones, and others."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from .harness import CHECKPOINT, unchanged
from .lightning import Base, BlockNet, PureBlock, Training, case, drawn

WHY = r"block|checkpoint|recomput|pure"


def blocks(
    name: str, says: str = WHY, net: Any = BlockNet, exact: bool = False, modes: tuple[str, ...] = ()
) -> Callable[[Any], Any]:
    """A case of three blocks of this class."""

    def register(block: type[nn.Module]) -> Any:
        def make() -> Training:
            class OfBlocks(Base):
                def __init__(self) -> None:
                    super().__init__()
                    self.net = net(block)

            module = OfBlocks()
            return Training(module, effects=lambda: [getattr(one, "watched", None) for one in module.net.blocks])

        case(f"block {name}", *(modes or (unchanged(name), CHECKPOINT)), says="" if exact else says)(make)
        return block

    return register


blocks("pure", exact=True)(PureBlock)


@blocks("dropout", exact=True)
class Dropout(PureBlock):
    def change(self, x):
        return F.dropout(x, 0.3)


@blocks("noise", exact=True)
class Noise(PureBlock):
    def change(self, x):
        return x + 0.3 * torch.randn_like(x)


@blocks("stochastic depth", exact=True)
class Depth(PureBlock):
    def change(self, x):
        return x * (torch.rand(()) < 0.6)


@blocks("Python random")
class PythonRandom(PureBlock):
    def change(self, x):
        return x * random.uniform(0.2, 2)


@blocks("numpy random")
class NumpyRandom(PureBlock):
    def change(self, x):
        return x * float(np.random.uniform(0.2, 2))


@blocks("layer dropped by Python")
class LayerDrop(PureBlock):
    def forward(self, x):
        return x if random.random() < 0.5 else super().forward(x)


@blocks("generator of its own")
class OwnGenerator(PureBlock):
    def __init__(self, width):
        super().__init__(width)
        self.generator = torch.Generator().manual_seed(3)

    def change(self, x):
        return x + 0.5 * torch.randn(x.shape, generator=self.generator)


@blocks("numpy generator of its own")
class OwnNumpyGenerator(PureBlock):
    def __init__(self, width):
        super().__init__(width)
        self.generator = np.random.default_rng(3)

    def change(self, x):
        return x * float(self.generator.uniform(0.2, 2))


@blocks("codebook through data")
class Codes(PureBlock):
    def __init__(self, width):
        super().__init__(width)
        self.register_buffer("codes", drawn(12, 8, width))

    def change(self, x):
        nearest = torch.cdist(x.detach(), self.codes).argmin(-1)
        self.codes.data[nearest[0]] = self.codes.data[nearest[0]] * 0.8 + 0.2 * x.detach().mean(0)
        return x + (self.codes[nearest] - x).detach() * 0.1


@blocks("buffer moved in place")
class Moving(PureBlock):
    def __init__(self, width):
        super().__init__(width)
        self.register_buffer("mean", torch.zeros(width))

    def change(self, x):
        self.mean.mul_(0.5).add_(x.detach().mean(0), alpha=0.5)
        return x - self.mean.clone()


@blocks("tensor attribute")
class TensorAttribute(PureBlock):
    def __init__(self, width):
        super().__init__(width)
        self.watched = torch.zeros(width)

    def change(self, x):
        self.watched = 0.5 * self.watched + x.detach().mean(0)
        return x - self.watched


@blocks("frozen parameter moved")
class FrozenMoved(PureBlock):
    def __init__(self, width):
        super().__init__(width)
        self.slow = nn.Parameter(torch.ones(width), requires_grad=False)

    def change(self, x):
        with torch.no_grad():
            self.slow.mul_(0.9).add_(x.abs().mean(0), alpha=0.1)
        return x * self.slow.clone()


@blocks("call counter")
class Calls(PureBlock):
    watched = 0

    def change(self, x):
        self.watched += 1
        return x / self.watched


@blocks("counter that nothing depends on")
class SilentCalls(PureBlock):
    watched = 0

    def change(self, x):
        self.watched += 1
        return x


@blocks("list of what passed")
class Passed(PureBlock):
    def __init__(self, width):
        super().__init__(width)
        self.watched: list[float] = []

    def change(self, x):
        self.watched.append(float(x.detach().mean()))
        return x


PASSED: list[int] = []


@blocks("list of the script")
class GlobalList(PureBlock):
    def __init__(self, width):
        super().__init__(width)
        PASSED.clear()

    @property
    def watched(self):
        return list(PASSED)

    def change(self, x):
        PASSED.append(len(x))
        return x


@blocks("batch normalisation")
class Normalised(PureBlock):
    def __init__(self, width):
        super().__init__(width)
        self.norm = nn.BatchNorm1d(width)

    def change(self, x):
        return self.norm(x)


@blocks("spectral norm")
class Spectral(PureBlock):
    def __init__(self, width):
        super().__init__(width)
        nn.utils.parametrizations.spectral_norm(self.inner[0])


@blocks("recurrent state carried on")
class Carried(PureBlock):
    def __init__(self, width):
        super().__init__(width)
        self.watched = torch.zeros(width)

    def change(self, x):
        out = torch.tanh(x + self.watched)
        self.watched = out.detach().mean(0)
        return out


class WithBalance(BlockNet):
    """A part of the loss is left at the blocks, as layers of experts leave it."""

    def forward(self, x):
        out = super().forward(x)
        return out + 0.0 * out.mean() + 0.3 * sum(block.aside for block in self.blocks)


@blocks("loss left at the block", net=WithBalance, says=rf"{WHY}|aside")
class Aside(PureBlock):
    def change(self, x):
        self.aside = x.softmax(-1).mean(0).square().sum()
        return x


@blocks("input changed in place", exact=True)
class InPlace(PureBlock):
    def forward(self, x):
        out = self.inner(x)
        return out.add_(x.detach())


class Hooked(BlockNet):
    def __init__(self, block):
        super().__init__(block)
        self.blocks[1].register_forward_hook(lambda module, *_: setattr(module, "watched", module.watched + 1))


@blocks("counted by a forward hook", net=Hooked, says=rf"{WHY}|hook")
class ForwardHooked(PureBlock):
    watched = 0


class Scaled(torch.autograd.graph.saved_tensors_hooks):
    def __init__(self) -> None:
        super().__init__(lambda x: x / x.abs().max(), lambda x: x)


class Doubles(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return 2 * out if func is torch.tanh else out


class Doubled(BlockNet):
    def forward(self, x):
        with Doubles():
            return super().forward(x)


blocks("in a mode of functions", net=Doubled)(type("InMode", (PureBlock,), {}))


class Packed(BlockNet):
    def forward(self, x):
        with Scaled():
            return super().forward(x)


blocks("packed by hooks around it", net=Packed)(type("Around", (PureBlock,), {}))


@blocks("packed by hooks of its own", exact=True)
class Packing(PureBlock):
    def forward(self, x):
        with Scaled():
            return torch.sin(super().forward(x))


class Shared(BlockNet):
    def __init__(self, block):
        super().__init__(block)
        one = self.blocks[0]
        self.blocks = nn.ModuleList([one, block(16), one])


blocks("used twice", net=Shared, exact=True)(type("Twice", (PureBlock,), {}))


class OfTuples(BlockNet):
    def forward(self, x):
        pair = (torch.tanh(self.first(x)), None)
        for block in self.blocks:
            pair = block(*pair, scale=0.5)
        return self.last(pair[0])


@blocks("several arguments and results", net=OfTuples, exact=True)
class Several(PureBlock):
    def forward(self, x, kept=None, *, scale=1.0):
        x = x + scale * self.inner(x)
        return x, (x if kept is None else kept + x)


# --- compiled ones: a compiler puts back nothing that a second forward writes ----------------------------------------


class Compiled(BlockNet):
    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__(block)
        for one in self.blocks:
            one.compile(backend="aot_eager")


@blocks("compiled, with a constant in a buffer", net=Compiled, exact=True, modes=(CHECKPOINT,))
class Constant(PureBlock):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("scale", torch.full((), 0.7))

    def change(self, x):
        return x * self.scale


@blocks("compiled, with a counter in a buffer", "changes the buffer calls", net=Compiled, modes=(CHECKPOINT,))
class Counted(PureBlock):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("calls", torch.zeros(()))

    def change(self, x):
        self.calls += 1
        return x / self.calls


@blocks("compiled, with batch normalisation", "changes the buffer", net=Compiled, modes=(CHECKPOINT,))
class CompiledNorm(PureBlock):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.norm = nn.BatchNorm1d(width)

    def change(self, x):
        return self.norm(x)
