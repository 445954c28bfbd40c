"""Trainings under MMEngine's Runner."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch
from mmengine.hooks import EMAHook, Hook
from mmengine.registry import DATASETS
from torch import nn
from torch.nn import functional as F

from . import lightning_losses
from .harness import CHECKPOINT, FIT, MICRO, REPORT, TIGHT, unchanged
from .lightning import BlockNet, PureBlock
from .lightning_losses import CAUSE, WEIGHTS, flat
from .lightning_state import DRAWS
from .mmengine import Base, FidelityRows, Training, case


def rows(*names: str, **more: Any) -> dict[str, Any]:
    return {"train_dataloader": {"dataset": {"type": "FidelityRows", "names": names}, **more}}


def loss(
    *fields: str, exact: bool = False, tight: bool = False, hooks: Any = (), **buffers: Any
) -> Callable[[Any], Any]:
    """Register a loss ``function(model, out, batch)``."""

    def register(function: Callable[..., torch.Tensor]) -> Any:
        def make() -> Training:
            class OfLoss(Base):
                def loss(self, out: torch.Tensor, b: Any) -> torch.Tensor:
                    return function(self, out, b)

            model = OfLoss()
            for own, value in buffers.items():
                model.register_buffer(own, value.clone())
            return Training(model, rows(*fields), hooks=[one() for one in hooks])

        name = function.__name__
        says = "" if exact else CAUSE
        case(f"loss {name}", unchanged(name), MICRO, *([TIGHT] if tight else []), says=says, exact=exact)(make)
        return function

    return register


# The same losses as under Lightning.
loss("x", "label", exact=True, tight=True)(lightning_losses.cross_entropy)
loss("x", "label")(lightning_losses.class_weights_of_the_file)
loss("tokens", "mask", exact=True)(lightning_losses.masked_mean)
loss("x", "y", tight=True)(lightning_losses.root_mean_square)
loss("x", "y")(lightning_losses.sum_by_eight)
loss("x", "label")(lightning_losses.dice_of_the_batch)
loss("x", "x2", tight=True)(lightning_losses.contrastive)
loss("x", "rank")(lightning_losses.pairs_ranked)
loss("x", "label")(lightning_losses.by_positives)


class Reweighs(Hook):
    """Changes the weights of the classes after each batch."""

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        runner.model.w[batch_idx % 4] *= 5


@loss("x", "label", exact=True, tight=True, hooks=[Reweighs], w=WEIGHTS)
def class_weights(m, out, b):
    return F.cross_entropy(out, b["label"], weight=m.w)


@loss("tokens", "token_255", exact=True)
def ignoring_255(m, out, b):
    return F.cross_entropy(*flat(out, b["token_255"]), ignore_index=255)


@case("several losses and accuracy", exact=True)
class Several(Base):
    def losses(self, x, b):
        out = self.net(x)
        near = (out.argmax(-1) == b["y"].argmax(-1)).float().mean()
        return {
            "loss_a": F.mse_loss(out, b["y"]),
            "loss_b": [0.1 * out.abs().mean(), 0.2 * out.square().mean()],
            "acc": near,
        }


@case("log_vars of the whole batch", says=r"\blog|length|spread")
class LogVars(Base):
    def losses(self, x, b):
        out = self.net(x)
        return {"loss": F.mse_loss(out, b["y"]), "length": torch.tensor(float(len(x))), "spread": out.std().detach()}


@case("counter", REPORT, FIT, MICRO, says=r"\bcalls\b")
class Counter(Base):
    calls = 0

    def losses(self, x, b):
        self.calls += 1
        self.effects.append(self.calls)
        return {"loss": self.loss(self.net(x), b) * min(1.0, self.calls / 3)}


@case("queue", REPORT, FIT, MICRO, says=r"\bqueue\b")
class Queue(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("queue", torch.zeros(16, 4))

    def loss(self, out, b):
        loss = F.mse_loss(out, b["y"]) + 0.1 * (out @ self.queue.clone().T).square().mean()
        self.queue.copy_(torch.cat([out.detach(), self.queue])[:16])
        return loss


@case("teacher averaged in the step", REPORT, FIT, MICRO, says=r"\bteacher\b")
class Teacher(Base):
    def __init__(self):
        super().__init__()
        self.teacher = nn.Linear(6, 4).requires_grad_(requires_grad=False)
        self.student = nn.Linear(6, 4)

    def losses(self, x, b):
        with torch.no_grad():
            for mine, theirs in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                mine.lerp_(theirs, 0.1)
        return {"loss": F.mse_loss(self.student(x), b["y"]) + F.mse_loss(self.student(x), self.teacher(x))}


@case("helper object", REPORT, FIT, MICRO, says=r"\bmeter\b|Meter|closure")
def helper():
    meter = {"seen": 0, "sizes": []}

    class Helped(Base):
        def losses(self, x, b):
            meter["seen"] += len(x)
            meter["sizes"].append(len(x))
            return super().losses(x, b)

    return Training(Helped(), effects=lambda: meter)


@DATASETS.register_module(force=True)
class CountsReads(FidelityRows):
    reads: ClassVar[list[int]] = []

    def __getitem__(self, index):
        self.reads.append(index)
        return super().__getitem__(index)


@case("dataset that counts reads", REPORT, FIT, MICRO, exact=True)
def counts_reads():
    CountsReads.reads.clear()
    return Training(
        Base(), {"train_dataloader": {"dataset": {"type": "CountsReads"}}}, effects=lambda: list(CountsReads.reads)
    )


@DATASETS.register_module(force=True)
class DrawsItself(FidelityRows):
    def __init__(self):
        super().__init__()
        self.rng = np.random.default_rng(3)

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        return {**sample, "inputs": sample["inputs"] + 0.1 * self.rng.normal()}


@case("dataset with a generator", REPORT, FIT, MICRO, exact=True)
def draws_itself():
    return Training(Base(), {"train_dataloader": {"dataset": {"type": "DrawsItself"}}})


@case("batch normalisation", REPORT, FIT, MICRO, says=r"normali[sz]ation|running|statistic")
class Normalised(Base):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def losses(self, x, b):
        return super().losses(self.norm(x), b)


@case("noise", says=DRAWS)
class Noisy(Base):
    def losses(self, x, b):
        return super().losses(x + 0.3 * torch.randn_like(x) * random.uniform(0.5, 1) * float(np.random.rand()), b)


@case("generator of the model", REPORT, FIT, MICRO, says=DRAWS)
def own_generator():
    class Own(Base):
        def __init__(self):
            super().__init__()
            self.rng = np.random.default_rng(3)

        def losses(self, x, b):
            return super().losses(x * float(self.rng.uniform(0.5, 1.5)), b)

    model = Own()
    return Training(model, effects=lambda: repr(model.rng.bit_generator.state))


@case("train_step of its own", says=r"train_step")
class OwnStep(Base):
    def train_step(self, data, optim_wrapper):
        with optim_wrapper.optim_context(self):
            data = self.data_preprocessor(data, training=True)
            loss, shown = self.parse_losses(self(**data, mode="loss"))
        self.effects.append(1)
        optim_wrapper.update_params(loss)
        return shown


@case("train_step of two optimizers", says=r"train_step|optimi[sz]er")
def two_optimizers():
    class Two(Base):
        def __init__(self):
            super().__init__()
            self.critic = nn.Linear(4, 1)

        def train_step(self, data, optim_wrapper):
            data = self.data_preprocessor(data, training=True)
            out = self.net(data["inputs"])
            one = F.mse_loss(out, data["data_samples"]["y"])
            optim_wrapper["net"].update_params(one)
            two = self.critic(out.detach()).square().mean()
            optim_wrapper["critic"].update_params(two)
            return {"loss_net": one, "loss_critic": two}

    def wrapped(parameters):
        from mmengine.optim import OptimWrapper

        return OptimWrapper(torch.optim.SGD(parameters, 0.05, momentum=0.9))

    from mmengine.optim import OptimWrapperDict

    model = Two()
    both = OptimWrapperDict(net=wrapped(model.net.parameters()), critic=wrapped(model.critic.parameters()))
    return Training(model, {"optim_wrapper": both})


def configured(name: str, *modes: str, make: Callable[[], Any] = Base, **config: Any) -> None:
    about = config.pop("about", {"exact": True})
    hooks = config.pop("hooks", list)
    case(name, *modes, **about)(lambda: Training(make(), dict(config), hooks=hooks()))


SGD = {"type": "SGD", "lr": 0.05, "momentum": 0.9}
configured("clips norms", REPORT, FIT, MICRO, TIGHT, optim_wrapper={"optimizer": SGD, "clip_grad": {"max_norm": 0.1}})
configured("clips values", optim_wrapper={"optimizer": SGD, "clip_grad": {"clip_value": 0.01, "type": "value"}})
configured(
    "accumulative_counts of three",
    REPORT,
    FIT,
    MICRO,
    optim_wrapper={"optimizer": SGD, "accumulative_counts": 3},
    train_cfg={"by_epoch": True, "max_epochs": 2},
)


COUNTED: list[int] = []


class Counts(Hook):
    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        COUNTED.append(batch_idx)


class Late(Base):
    """Another loss after two batches, told by nothing that is followed."""

    def loss(self, out: torch.Tensor, b: Any) -> torch.Tensor:
        loss = super().loss(out, b)
        return loss.sqrt() if len(COUNTED) >= 2 else loss


def late() -> Late:
    COUNTED.clear()
    return Late()


SQRT: dict[str, Any] = {"says": "sqrt"}  # hooks are played when it is planned: it is refused then
configured("a loss that becomes another one", MICRO, make=late, hooks=lambda: [Counts()], about=SQRT)
configured("several epochs", train_cfg={"by_epoch": True, "max_epochs": 3})
configured(
    "iterations",
    REPORT,
    FIT,
    MICRO,
    train_cfg={"by_epoch": False, "max_iters": 5},
    train_dataloader={"sampler": {"type": "InfiniteSampler", "shuffle": True, "seed": 3}},
)
configured(
    "iterations without shuffling",
    train_cfg={"by_epoch": False, "max_iters": 4},
    train_dataloader={"sampler": {"type": "InfiniteSampler", "shuffle": False}},
)
configured("last batch dropped", train_dataloader={"drop_last": True})


class OfLists(Base):
    def forward(self, inputs, data_samples, mode="loss"):
        return self.losses(torch.stack(inputs), {"y": torch.stack(data_samples["y"])})


configured("list of samples", make=OfLists, train_dataloader={"collate_fn": {"type": "pseudo_collate"}})
configured(
    "one cycle",
    param_scheduler=[{"type": "OneCycleLR", "eta_max": 0.1, "total_steps": 4, "by_epoch": False}],
)
configured(
    "warm-up, then cosine",
    train_cfg={"by_epoch": True, "max_epochs": 2},
    param_scheduler=[
        {"type": "LinearLR", "start_factor": 0.1, "by_epoch": False, "end": 3},
        {"type": "CosineAnnealingLR", "T_max": 5, "by_epoch": False, "begin": 3, "end": 8},
    ],
)
configured(
    "AdamW",
    optim_wrapper={"optimizer": {"type": "AdamW", "lr": 0.01, "eps": 1e-3}},
    about={"exact": True, "tolerance": 1e-4},
)
configured(
    "rates of parts",
    optim_wrapper={
        "optimizer": {**SGD, "weight_decay": 0.1},
        "paramwise_cfg": {"custom_keys": {"first": {"lr_mult": 0.1, "decay_mult": 0.0}}},
    },
)
configured("EMAHook", REPORT, FIT, MICRO, hooks=lambda: [EMAHook(momentum=0.3)])


class Edited(Hook):
    """Edits weights after every iteration."""

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        for parameter in runner.model.parameters():
            parameter.data.mul_(0.999)


configured("hook that edits weights", hooks=lambda: [Edited()])


class EditsBatch(Hook):
    """Draws before every iteration."""

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        data_batch["inputs"].add_(0.1 * torch.randn(()))


configured("hook that edits the batch", REPORT, MICRO, hooks=lambda: [EditsBatch()])


@case("train_step that leaves its loss in the batch", MICRO, says=r"batch\['seen'\]")
def left_in_the_batch():
    class Leaves(Base):
        def train_step(self, data, optim_wrapper):
            shown = super().train_step(data, optim_wrapper)
            data["seen"] = shown["loss"].detach()
            return shown

    class Reads(Hook):
        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            found.append(float(data_batch.get("seen", 0)))

    found: list[float] = []
    return Training(Leaves(), hooks=[Reads()], effects=lambda: str(found))


class FrozenPart(Base):
    def __init__(self):
        super().__init__()
        self.net.first.requires_grad_(requires_grad=False)


configured("frozen part", make=FrozenPart)


def blocks(name: str, block: type[nn.Module], *, exact: bool = False) -> None:
    def make() -> Base:
        model = Base()
        model.net = BlockNet(block)
        return model

    says = "" if exact else r"block|checkpoint|recomput|pure"
    case(f"block {name}", unchanged(name), CHECKPOINT, says=says)(make)


class PythonRandom(PureBlock):
    def change(self, x):
        return x * random.uniform(0.2, 2)


class Calls(PureBlock):
    calls = 0

    def change(self, x):
        self.calls += 1
        return x / self.calls


blocks("pure", PureBlock, exact=True)
blocks("Python random", PythonRandom)
blocks("call counter", Calls)
