"""Trainings whose blocks read something that changes between a forward and its backward pass, and others that do not.

Each is a model with ``blocks`` and a ``loss`` of a batch; what changes does so before ``loss`` returns, so that it
trains alike in a plain loop and under a framework.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import random
import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH, SAMPLES, BATCH = 8, 24, 4


class Block(nn.Module):
    """A residual block; kinds change what it does to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.line = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def change(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def forward(self, x: Any) -> Any:
        return x + torch.tanh(self.line(self.change(self.norm(x))))


class Model(nn.Module):
    """Three blocks under a mean square."""

    block: type[nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.run(x), y)


#: Name -> a training that a second forward would change: it is stopped before the first step that would be another.
STOPS: dict[str, type[Model]] = {}
#: Name -> a training that is the same.
EQUAL: dict[str, type[Model]] = {}


def kind(name: str, table: dict[str, type[Model]], base: type[Model] = Model) -> Any:
    """Register a block, or a whole model."""

    def register(found: type[nn.Module]) -> Any:
        whole = issubclass(found, Model)
        table[name] = found if whole else type(f"Of{found.__name__}", (base,), {"block": found})  # type: ignore[assignment]
        return found

    return register


# --- what blocks read changes ---------------------------------------------------------------------------------------


class Adapted(Block):
    """Two adapters of low rank, which return zeros at first."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, 2)) for _ in range(2))
        self.up = nn.ParameterList(nn.Parameter(torch.zeros(2, WIDTH)) for _ in range(2))
        self.active = 0

    def change(self, x: torch.Tensor) -> torch.Tensor:
        return x + x @ self.down[self.active] @ self.up[self.active]


@kind("an adapter switched between two forwards", STOPS)
class Adapters(Model):
    block = Adapted

    def loss(self, x, y):
        found = []
        for active in (0, 1):
            for block in self.blocks:
                block.active = active
            found.append(super().loss(x, y * (active + 1)))
        return sum(found)


SCALE = [1.0]


@contextlib.contextmanager
def scaled(value: float) -> Any:
    before, SCALE[0] = SCALE[0], value
    try:
        yield
    finally:
        SCALE[0] = before


class Scaled(Block):
    def change(self, x):
        return x * SCALE[0]


@kind("a scale in a context", STOPS)
class InContext(Model):
    block = Scaled

    def loss(self, x, y):
        with scaled(1.01):
            return super().loss(x, y)


STEP = {"number": 0}


@kind("a global of the module", STOPS)
class ByStep(Model):
    class block(Block):  # noqa: N801
        def change(self, x):
            return x / (1 + STEP["number"])

    def __init__(self) -> None:
        super().__init__()
        STEP["number"] = 0

    def loss(self, x, y):
        found = super().loss(x, y)
        STEP["number"] += 1
        return found


FACTOR: contextvars.ContextVar[float] = contextvars.ContextVar("FACTOR", default=1.0)


@kind("fewer operators by a global of the module", STOPS)
class Fewer(Model):
    class block(Block):  # noqa: N801
        def change(self, x):
            return torch.tanh(torch.sin(x)) if STEP["number"] % 2 == 0 else x

    def __init__(self) -> None:
        super().__init__()
        STEP["number"] = 0

    def loss(self, x, y):
        found = super().loss(x, y)
        STEP["number"] += 1
        return found


@kind("other shapes by a global of the module", STOPS)
class OtherShapes(Fewer):
    class block(Block):  # noqa: N801
        def change(self, x):
            return x * x.new_ones(1 if STEP["number"] % 2 == 0 else WIDTH).exp().requires_grad_()


@kind("a weight that is turned", STOPS)
class Turned(Fewer):
    class block(Block):  # noqa: N801
        def change(self, x):
            weight = self.line.weight.detach() + 1
            return x @ (weight if STEP["number"] % 2 == 0 else weight.t())


@kind("a context variable", STOPS)
class InVariable(Model):
    class block(Block):  # noqa: N801
        def change(self, x):
            return x * FACTOR.get()

    def loss(self, x, y):
        token = FACTOR.set(2.0)
        found = super().loss(x, y)
        FACTOR.reset(token)
        return found


class Called(Model):
    """Its loss runs with other weights than its own."""

    def weights(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: one * 1.5 for name, one in self.named_parameters()}

    def forward(self, x):
        return self.run(x)

    def loss(self, x, y):
        return F.mse_loss(functional_call(self, self.weights(x, y), (x,)), y)


kind("functional_call with modulated weights", STOPS)(Called)


@kind("an inner step of MAML", STOPS)
class Maml(Called):
    def weights(self, x, y):
        own = dict(self.named_parameters())
        inner = F.mse_loss(self(x), y)
        found = torch.autograd.grad(inner, list(own.values()), create_graph=True)
        return {name: one - 0.5 * gradient for (name, one), gradient in zip(own.items(), found, strict=True)}


@kind("a hook removed before the backward pass", STOPS)
class Hooked(Model):
    def loss(self, x, y):
        handles = [one.line.register_forward_hook(lambda _m, _i, out: out * 2) for one in self.blocks]
        found = super().loss(x, y)
        for handle in handles:
            handle.remove()
        return found


@kind("weights that move through .data", STOPS)
class Moving(Model):
    def loss(self, x, y):
        found = super().loss(x, y)
        for block in self.blocks:
            block.line.weight.data.mul_(0.9)
        return found


COUNTER = [itertools.count(1)]


@kind("a counter of itertools", STOPS)
class Counted(Model):
    class block(Block):  # noqa: N801
        def change(self, x):
            return x / next(COUNTER[0])

    def __init__(self) -> None:
        super().__init__()
        COUNTER[0] = itertools.count(1)


@kind("the time", STOPS)
class Timed(Block):
    def change(self, x):
        return x * (1 + time.perf_counter() % 1)


GENERATORS = {"torch": torch.Generator(), "numpy": np.random.default_rng(0), "python": random.Random(0)}


@kind("dropout by a generator of the script", STOPS)
class OwnDropout(Block):
    def change(self, x):
        return x * (torch.rand(x.shape, generator=GENERATORS["torch"]) < 0.7)


@kind("a NumPy generator of the script", STOPS)
class OwnNumpy(Block):
    def change(self, x):
        return x * float(GENERATORS["numpy"].uniform(0.5, 2))


@kind("an order of channels by a generator of the script", STOPS)
class Shuffled(Block):
    def change(self, x):
        order = list(range(WIDTH))
        GENERATORS["python"].shuffle(order)
        return x[:, order]


SIGN = [torch.ones(())]


@kind("a sign", STOPS)
class Signed(Model):
    class block(Block):  # noqa: N801
        def forward(self, x):
            return x * SIGN[0]

    def __init__(self) -> None:
        super().__init__()
        self.blocks.append(Block())

    def run(self, x):
        return super().run(self.blocks[-1].line(x))

    def loss(self, x, y):
        SIGN[0] = torch.ones(())
        found = super().loss(x, y)
        SIGN[0] = -torch.ones(())
        return found


@kind("a gate of a block that returns nothing yet", STOPS)
class Gated(Model):
    class block(Block):  # noqa: N801
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Parameter(torch.zeros(()))
            self.temperature = torch.tensor(1.0)

        def forward(self, x):
            return x + self.gate * (self.line(x) * self.temperature)

    def loss(self, x, y):
        for block in self.blocks:
            block.temperature = torch.tensor(1.0)
        found = super().loss(x, y)
        for block in self.blocks:
            block.temperature = torch.tensor(0.5)
        return found


@kind("a mask that is set before each call", STOPS)
class Masked(Model):
    class block(Block):  # noqa: N801
        mask: Any = None

        def change(self, x):
            return x * self.mask

    def run(self, x):
        for block in self.blocks:
            block.mask = (x > 0).float()
            x = block(x)
            block.mask = (x > 0).float()
        return self.head(x)


SEEN: dict[int, torch.Tensor] = {}


@kind("values kept by the script from the first call of a step", STOPS)
class Remembering(Model):
    class block(Block):  # noqa: N801
        def change(self, x):
            known = SEEN.get(id(self))
            SEEN[id(self)] = x.detach().mean(0)
            return x if known is None else x - known

    def loss(self, x, y):
        SEEN.clear()
        return super().loss(x, y)


LOCAL = threading.local()


@kind("a value of the thread", STOPS)
class OfThread(Model):
    class block(Block):  # noqa: N801
        def change(self, x):
            return x * getattr(LOCAL, "value", 1.0)

    def loss(self, x, y):
        LOCAL.value = 0.5
        found = super().loss(x, y)
        del LOCAL.value
        return found


@kind("an input that is changed through .data", STOPS)
class Overwritten(Model):
    def run(self, x):
        kept = []
        for block in self.blocks:
            kept.append(x)
            x = block(x)
        out = self.head(x)
        kept[1].data.mul_(2)
        return out


# --- they do not ----------------------------------------------------------------------------------------------------


@kind("nothing", EQUAL)
class Pure(Block):
    pass


@kind("dropout, Python's and NumPy's numbers", EQUAL)
class Random(Block):
    def change(self, x):
        return F.dropout(x, 0.3) * random.uniform(0.5, 2) * float(np.random.uniform(0.5, 2))


@kind("noise of the size of rounding", EQUAL)
class Noisy(Block):
    """As where kernels add up in another order: too small to move a weight by more than rounding."""

    def change(self, x):
        noise = torch.randn(x.shape, generator=GENERATORS["torch"]) * torch.finfo(x.dtype).eps
        return x * (1 + noise)


@kind("bfloat16", EQUAL)
class Autocast(Model):
    def loss(self, x, y):
        with torch.autocast("cpu", torch.bfloat16):
            found = self.run(x)
        return F.mse_loss(found.float(), y)


@kind("NaN and infinity", EQUAL)
class Undefined(Model):
    class block(Block):  # noqa: N801
        def forward(self, x):
            spoiled = torch.where(x > 0, torch.nan, torch.inf) * x
            return super().forward(x) + (spoiled * self.line.bias).detach().nan_to_num(0, 0, 0)


@kind("normalised weights, and buffers that are written", EQUAL)
class Written(Block):
    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.weight_norm(self.line)
        self.batch, self.instance = nn.BatchNorm1d(WIDTH), nn.InstanceNorm1d(2, track_running_stats=True)
        self.other = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def change(self, x):
        x = self.batch(self.other(x))
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.instance((x - self.mean).unflatten(1, (2, -1))).flatten(1)


TABLE: dict[int, torch.Tensor] = {}


@kind("a table that is made at the first call", EQUAL)
class Tabled(Block):
    def change(self, x):
        if x.shape[1] not in TABLE:
            TABLE[x.shape[1]] = torch.arange(x.shape[1]).cos()
        return x * TABLE[x.shape[1]]


@dataclass
class Found:
    hidden: torch.Tensor
    count: torch.Tensor
    nothing: None = None


class Structured(Block):
    def forward(self, x):
        x = x.hidden if isinstance(x, Found) else x["x"] if isinstance(x, dict) else x
        out = super().forward(x)
        top = out.topk(2).indices
        return Found(out[:, :].view_as(out) + out.gather(1, top).sum(1, keepdim=True), top.sum())


@kind("results of other kinds", EQUAL)
class Structures(Model):
    block = Structured

    def run(self, x):
        found = {"x": x}
        for block in self.blocks:
            found = block(found)
        return self.head(found.hidden)


@kind("complex numbers", EQUAL)
class Spectral(Block):
    def change(self, x):
        return torch.fft.irfft(torch.fft.rfft(x) * self.line.weight[0, :5], n=WIDTH)


@kind("a checkpoint within", EQUAL)
class Nested(Block):
    def change(self, x):
        return checkpoint(lambda x: torch.sin(self.line(x)) * 2, x, use_reentrant=False)


@kind("one block called twice", EQUAL)
class Shared(Model):
    def run(self, x):
        return super().run(self.blocks[0](x).relu())


@kind("two backward passes through one graph", EQUAL)
class Twice(Model):
    def loss(self, x, y):
        found = super().loss(x, y)
        found.backward(retain_graph=True)
        return found


@kind("gradients of gradients", EQUAL)
class Penalised(Model):
    def loss(self, x, y):
        x = x.clone().requires_grad_()
        found = self.run(x)
        (slope,) = torch.autograd.grad(found.sum(), x, create_graph=True)
        return F.mse_loss(found, y) + slope.square().mean()


@kind("a gradient within the forward", EQUAL)
class Force(Model):
    class block(Block):  # noqa: N801
        def forward(self, x):
            inside = self.norm(x)
            energy = torch.tanh(self.line(inside))
            (force,) = torch.autograd.grad(energy.square().sum(), inside, create_graph=True)
            return x + energy + torch.tanh(force)


@kind("an input that is changed in place behind the block", EQUAL)
class InPlace(Model):
    def run(self, x):
        for block in self.blocks:
            x = block(x)
            x.mul_(0.5)
        return self.head(x)


@kind("several results of which some are not used", EQUAL)
class Unused(Model):
    class block(Block):  # noqa: N801
        def forward(self, x):
            return super().forward(x), torch.softmax(self.line(x), 1).exp()

    def run(self, x):
        for block in self.blocks:
            x, _unused = block(x)
        return self.head(x)


# --- running them ---------------------------------------------------------------------------------------------------


def made(found: type[Model]) -> Model:
    """A model, and every generator where it begins."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    GENERATORS["torch"].manual_seed(0)
    GENERATORS["numpy"], GENERATORS["python"] = np.random.default_rng(0), random.Random(0)
    TABLE.clear()
    SCALE[0] = 1.0
    return found()


def data() -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(SAMPLES, WIDTH, generator=draw), torch.randn(SAMPLES, 1, generator=draw)


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: one.clone() for name, one in model.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.allclose(one[name], other[name], rtol=1e-4, atol=1e-5, equal_nan=True) for name in one)
