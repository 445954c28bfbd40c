"""What the operators of one forward pass do not show: backward passes, hooks, numbers of Python, what moves on."""

from __future__ import annotations

import collections
import math
import warnings
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from .harness import MICRO, TIGHT
from .lightning import Base, Training, case

#: Each names what it reads, changes or joins; where the training is equal, nothing has to be said.
SAYS = r"\w"


def unseen(name: str, *modes: str) -> Any:
    return case(f"unseen {name}", *(modes or (MICRO,)), says=SAYS)


# --- backward passes ------------------------------------------------------------------------------------------------


class MeanGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient + gradient.mean(0)


class MeanedInside(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return MeanGradient.apply(x)


@unseen("a function that joins samples backward", MICRO, TIGHT)
class JoinsBackward(Base):
    def loss(self, batch):
        return F.mse_loss(MeanGradient.apply(self.net(batch[0])), batch[1])


@unseen("the same in a layer of the model")
class JoinsInside(Base):
    def __init__(self):
        super().__init__()
        self.net.first = nn.Sequential(self.net.first, MeanedInside())


@unseen("the same in a checkpointed layer")
class JoinsCheckpointed(Base):
    def loss(self, batch):
        def part(x):
            return MeanGradient.apply(self.net(x))

        out = torch.utils.checkpoint.checkpoint(part, batch[0], use_reentrant=False)
        return F.mse_loss(out, batch[1])


@unseen("a hook of an activation")
class ActivationHook(Base):
    def loss(self, batch):
        out = self.net(batch[0])
        out.register_hook(lambda gradient: gradient / gradient.norm())
        return F.mse_loss(out, batch[1])


@unseen("a hook of a node")
class NodeHook(Base):
    def loss(self, batch):
        out = self.net(batch[0])
        out.grad_fn.register_prehook(lambda gradients: (gradients[0] / gradients[0].norm(),))
        return F.mse_loss(out, batch[1])


@unseen("a hook of several tensors")
class SeveralHooks(Base):
    def loss(self, batch):
        out = self.net(batch[0])
        torch.autograd.graph.register_multi_grad_hook([out], lambda grads: self.effects.append(float(grads[0].norm())))
        return F.mse_loss(out, batch[1])


@unseen("a hook of a module")
class ModuleHook(Base):
    def __init__(self):
        super().__init__()
        self.net.last.register_full_backward_hook(lambda _m, given, _out: (given[0] / given[0].norm(),))


@unseen("a hook of a module's start")
class ModulePreHook(Base):
    def __init__(self):
        super().__init__()
        self.net.last.register_full_backward_pre_hook(lambda _m, given: (given[0] / given[0].norm(),))


@unseen("a hook of a module that the step registers")
class ModuleHookLater(Base):
    def loss(self, batch):
        handle = self.net.last.register_full_backward_hook(lambda _m, given, _out: (given[0] / given[0].norm(),))
        loss = super().loss(batch)
        handle.remove()
        return loss


@unseen("a hook of a weight")
class WeightHook(Base):
    def __init__(self):
        super().__init__()
        self.net.last.weight.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05))


@unseen("gradients that are packed")
class Packed(Base):
    def loss(self, batch):
        def pack(x):
            return x / x.abs().max()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            return super().loss(batch)


class Scaled(torch.autograd.graph.saved_tensors_hooks):
    """Of which the functions that use it do not name what it is."""

    def __init__(self) -> None:
        super().__init__(lambda x: x / x.abs().max(), lambda x: x)


@unseen("gradients that a class packs around the model", MICRO, TIGHT)
class PackedByClass(Base):
    def loss(self, batch):
        with Scaled():
            out = self.net(batch[0])
        return F.mse_loss(out, batch[1])


class Rounds(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out / out.abs().max() if func is torch.ops.aten.tanh.default else out


class Doubles(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return 2 * out if func is torch.tanh else out


def inside(name: str, mode: Any, *modes: str) -> None:
    class Inside(Base):
        def loss(self, batch):
            with mode():
                out = self.net(batch[0])
            return F.mse_loss(out, batch[1])

    unseen(name, *modes)(Inside)


inside("a mode of operators around the model", Rounds)
inside("a mode of functions around the model", Doubles)


class ScaledInside(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with Scaled():
            return torch.tanh(self.inner(x))


@unseen("gradients that a layer of the model packs")
class PackedInside(Base):
    def __init__(self):
        super().__init__()
        self.net.first = ScaledInside(self.net.first)


@unseen("gradients on the host")
class OnHost(Base):
    def loss(self, batch):
        with torch.autograd.graph.save_on_cpu():
            return super().loss(batch)


# --- numbers that are others later ----------------------------------------------------------------------------------


def scaled(name: str, *modes: str) -> Any:
    """A loss that is multiplied with what a function of the module and the batch's number gives."""

    def register(function: Any) -> Any:
        class Scaled(Base):
            def __init__(self):
                super().__init__()
                self.seen = []

            def training_step(self, batch, batch_idx):
                loss = self.loss(batch)
                self.log("loss", loss)
                return loss * function(self, batch_idx)

            def configure_optimizers(self):
                optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
                scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
                return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

        def make() -> Training:
            return Training(Scaled(), callbacks=[Moves()], trainer={"max_epochs": 2})

        return case(f"unseen {name}", *(modes or (MICRO,)), says=SAYS)(make)

    return register


class Moves(pl.Callback):
    """Holds values that move on in ways of their own."""

    def __init__(self) -> None:
        self.warmth = collections.deque([1.0])
        self.held = {"scale": 1.0}

    def on_train_batch_end(self, *_: Any) -> None:
        self.held["scale"] *= 0.7
        self.warmth[0] *= 0.7


TABLE = [1.0, 0.5, 0.25, 0.125, 0.1]
VALUES = torch.tensor(TABLE)


@scaled("the rate of the trainer's optimizer")
def rate(m, number):
    return 10 * m.trainer.optimizers[0].param_groups[0]["lr"]


scaled("the rate of its own optimizer")(lambda m, number: 10 * m.optimizers().param_groups[0]["lr"])
scaled("the rate through the strategy")(lambda m, number: 10 * m.trainer.strategy.optimizers[0].param_groups[0]["lr"])
scaled("the rate of the scheduler")(lambda m, number: 10 * m.lr_schedulers().get_last_lr()[0])
scaled("the rate of the scheduler's settings")(
    lambda m, number: 10 * m.trainer.lr_scheduler_configs[0].scheduler._last_lr[0]
)
scaled("a dict of a callback")(
    lambda m, number: next(one for one in m.trainer.callbacks if isinstance(one, Moves)).held["scale"]
)
scaled("a deque of a callback")(
    lambda m, number: next(one for one in m.trainer.callbacks if isinstance(one, Moves)).warmth[0]
)
scaled("a list by the number of the batch")(lambda m, number: TABLE[number])
scaled("a tensor by the number of the batch")(lambda m, number: VALUES[number])
scaled("an array by the number of the batch")(lambda m, number: float(np.array(TABLE)[number]))
scaled("an exponential of the number of the batch")(lambda m, number: math.exp(-number))
scaled("a range up to the number of the batch")(lambda m, number: 1.0 + len(range(number)))
scaled("a tensor of the number of the batch")(lambda m, number: torch.tensor(1.0 + 0.1 * torch.tensor(number)))
scaled("a float of the number of the batch")(lambda m, number: 1.0 / (1.0 + float(number)))
scaled("a sequence by the number of the batch")(lambda m, number: 1.0 + len([0] * number))
scaled("a power of the number of the batch")(lambda m, number: 0.5**number)
scaled("a list by the epoch")(lambda m, number: TABLE[m.current_epoch])
scaled("a list by the step")(lambda m, number: TABLE[m.global_step % 5])
scaled("the trainer's loop")(lambda m, number: TABLE[m.trainer.fit_loop.epoch_loop.batch_idx])
scaled("what was logged")(lambda m, number: 1.0 + float(m.trainer.callback_metrics.get("loss", 0.0)))
scaled("what was logged in this step")(lambda m, number: 1.0 + float(m.trainer.logged_metrics.get("loss", 0.0)))


@scaled("a default argument that counts")
def by_default(m, number, _held=[0]):  # noqa: B006 - which is the point
    _held[0] = 1 if number == 0 else _held[0] + 1  # each training begins anew, in one process
    return 1 / (1 + _held[0] % 5)


def _rates() -> Any:
    rate = 1.0
    while True:
        yield rate
        rate *= 0.7


def _in_closure() -> Any:
    held, rates = {"calls": 0}, _rates()

    @scaled("a closure that counts")
    def counts(m, number):
        held["calls"] = 1 if number == 0 else held["calls"] + 1
        return 1 / (1 + held["calls"] % 5)

    @scaled("a generator in a closure")
    def generates(m, number):
        nonlocal rates
        rates = _rates() if number == 0 else rates
        return next(rates)


_in_closure()


scaled("a random number for the batch", MICRO, TIGHT)(lambda m, number: torch.rand(()))
scaled("a numpy draw for the batch")(lambda m, number: float(np.random.uniform(0.5, 1.5)))


@scaled("a seed for the step")
def seeded(m, number):
    torch.manual_seed(m.global_step)
    return torch.rand(())


@unseen("some rows by a mask of the batch")
class Masked(Base):
    def loss(self, batch):
        x, y = batch
        kept = y[:, 0] > 0
        return F.mse_loss(self.net(x)[kept], y[kept])


@unseen("a count of the batch read as a number")
class CountRead(Base):
    def loss(self, batch):
        x, y = batch
        kept = y > 0
        return ((self.net(x) - y).square() * kept).sum() / max(1, kept.sum().item())


@case("unseen the rate is logged", MICRO, exact=True)
class RateLogged(Base):
    def training_step(self, batch, batch_idx):
        self.log("rate", self.optimizers().param_groups[0]["lr"])
        self.log("other", self.trainer.optimizers[0].param_groups[0]["lr"])
        return super().training_step(batch, batch_idx)


@case("unseen a checkpointed layer", MICRO, exact=True)
class Checkpointed(Base):
    def loss(self, batch):
        x = batch[0].clone().requires_grad_()
        return F.mse_loss(torch.utils.checkpoint.checkpoint(self.net, x, use_reentrant=True), batch[1])


# --- what trains in another way -------------------------------------------------------------------------------------


@unseen("fake quantisation")
class FakeQuantised(Base):
    def __init__(self):
        super().__init__()
        self.quantise = torch.ao.quantization.FakeQuantize(
            torch.ao.quantization.MovingAverageMinMaxObserver, quant_min=0, quant_max=255
        )

    def loss(self, batch):
        return F.mse_loss(self.quantise(self.net(batch[0])), batch[1])


@unseen("prepared for quantisation")
def prepared():
    module = Base()
    module.net.train()
    module.net.qconfig = torch.ao.quantization.get_default_qat_qconfig("fbgemm")
    with warnings.catch_warnings():  # torch warns of itself
        warnings.simplefilter("ignore")
        torch.ao.quantization.prepare_qat(module.net, inplace=True)
    return module


@unseen("a running mean behind a flag", MICRO, TIGHT)
class RunningMean(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("on", torch.ones(1, dtype=torch.long))
        self.register_buffer("mean", torch.zeros(4))

    def loss(self, batch):
        out = self.net(batch[0])
        if self.on[0] == 1:
            self.mean.mul_(0.9).add_(out.detach().mean(0), alpha=0.1)
        return F.mse_loss(out - self.mean, batch[1])


@unseen("a mean in a private attribute")
class PrivateMean(Base):
    def __init__(self):
        super().__init__()
        self._mean = torch.zeros(4)

    def loss(self, batch):
        loss = F.mse_loss(self.net(batch[0]) - self._mean, batch[1])
        self._mean.mul_(0.9).add_(batch[1].mean(0), alpha=0.1)
        return loss


@unseen("a mean in a private list")
class PrivateList(Base):
    def __init__(self):
        super().__init__()
        self._held = [torch.zeros(4)]

    def loss(self, batch):
        loss = F.mse_loss(self.net(batch[0]) - self._held[0], batch[1])
        self._held[0].mul_(0.9).add_(batch[1].mean(0), alpha=0.1)
        return loss


class Holder:
    kept = torch.zeros(4)

    def __init__(self):
        self.mean = torch.zeros(4)


def mean_in(name: str, held: Any) -> None:
    """A running mean of the targets in a tensor that ``held(module)`` gives."""

    class Held(Base):
        def __init__(self):
            super().__init__()
            self.holder, self.deque = Holder(), collections.deque([torch.zeros(4)])

        def loss(self, batch):
            loss = F.mse_loss(self.net(batch[0]) - held(self), batch[1])
            held(self).mul_(0.9).add_(batch[1].mean(0), alpha=0.1)
            return loss

    def make() -> Training:
        for one in (Holder.kept, GLOBAL, CELLS[0]):
            one.zero_()
        return Training(Held())

    case(f"unseen a mean in {name}", MICRO, says=SAYS)(make)


GLOBAL, CELLS = torch.zeros(4), [torch.zeros(4)]
mean_in("a helper", lambda m: m.holder.mean)
mean_in("a class", lambda m: m.holder.kept)
mean_in("a deque", lambda m: m.deque[0])
mean_in("a module's variable", lambda m: GLOBAL)
mean_in("a default argument", lambda m, _cells=CELLS: _cells[0])


@case("unseen a sum made in the step", MICRO, exact=True)
class SumMade(Base):
    def loss(self, batch):
        total = torch.tensor(0.0)
        total += super().loss(batch)
        return total


@unseen("a flag that is set later")
class FlagLater(RunningMean):
    def __init__(self):
        super().__init__()
        self.on.zero_()

    def on_train_batch_end(self, *_):
        self.on.fill_(1)


@unseen("the gradients' norm after the batch")
class NormAfter(Base):
    def on_train_batch_end(self, *_):
        self.effects.append([float(p.grad.norm()) if p.grad is not None else -1.0 for p in self.parameters()])


@unseen("precision that is logged")
class Precision(Base):
    def training_step(self, batch, batch_idx):
        out = self.net(batch[0])
        loss = F.mse_loss(out, batch[1])
        found, right = out > 0, batch[1] > 0
        self.log("precision", (found & right).sum() / found.sum())
        self.log("loss", loss)
        return loss


@unseen("no loss where it is not finite")
class OnlyFinite(Base):
    def training_step(self, batch, batch_idx):
        x, y = batch
        if batch_idx is not None:
            x = torch.where(x > 2.2, torch.full_like(x, math.inf), x)
        loss = self.loss((x, y))
        if not torch.isfinite(loss):
            return None
        self.log("loss", loss)
        return loss


@unseen("a loss read back after it is logged")
class ReadBack(Base):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        last = self.trainer.callback_metrics.get("loss")
        return loss if last is None else loss * (1 + last.detach())


@unseen("spikes skipped by a kept loss")
class Spikes(Base):
    previous = None

    def loss(self, batch):
        loss = super().loss(batch)
        scale = 1.0 if self.previous is None or loss.detach() < 1.5 * self.previous else 0.0
        self.previous = loss.detach()
        return loss * scale


@unseen("scaled by a spread that NumPy reads")
class ByNumpy(Base):
    def loss(self, batch):
        return super().loss(batch) * float(batch[1].numpy().std())


@unseen("scaled by the largest value of a list")
class ByList(Base):
    def loss(self, batch):
        return super().loss(batch) * max(map(max, batch[1].tolist()))
