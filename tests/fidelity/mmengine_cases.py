"""Trainings under MMEngine's Runner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch
from mmengine.hooks import EMAHook, Hook
from mmengine.registry import DATASETS
from torch import nn
from torch.nn import functional as F

from .harness import FIT, MICRO, REPORT, TIGHT
from .mmengine import Base, FidelityRows, Training, case


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
