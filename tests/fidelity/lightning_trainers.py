"""Schedulers, callbacks, clipping, accumulation, optimizers, precisions, resuming: what a Trainer is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import callbacks as pl_callbacks
from torch.nn import functional as F

from vram_guard.torch_release import torch_release

from .harness import FIT, MICRO, REPORT, TIGHT
from .lightning import Base, Pairs, Training, case, loader

lr = torch.optim.lr_scheduler


def trains(name: str, *modes: str, **about: Any) -> Any:
    return case(name, *modes, **{"exact": True, **about})


# --- schedulers -------------------------------------------------------------------------------------------------


def scheduled(name: str, make: Callable[[Any], Any], **config: Any) -> None:
    def training() -> Training:
        class Scheduled(Base):
            def training_step(self, batch, batch_idx):
                loss = self.loss(batch)
                self.log("train_loss", loss, on_epoch=True, on_step=False, batch_size=len(batch[0]))
                return loss

            def on_before_optimizer_step(self, optimizer):
                self.effects.append(optimizer.param_groups[0]["lr"])

            def configure_optimizers(self):
                optimizer = super().configure_optimizers()
                return {"optimizer": optimizer, "lr_scheduler": {"scheduler": make(optimizer), **config}}

        return Training(Scheduled(), loader(shuffle=True), trainer={"max_epochs": 2})

    training.__module__ = __name__
    trains(f"schedule {name}")(training)


scheduled("one cycle", lambda o: lr.OneCycleLR(o, 0.1, total_steps=8), interval="step")
scheduled("plateau", lambda o: lr.ReduceLROnPlateau(o, patience=0, threshold=9.0), monitor="train_loss")
scheduled("steps", lambda o: lr.StepLR(o, 2, gamma=0.5), interval="step")
scheduled("epochs", lambda o: lr.StepLR(o, 1, gamma=0.5))
scheduled("lambda", lambda o: lr.LambdaLR(o, lambda step: 0.9**step), interval="step")
scheduled("every second step", lambda o: lr.ExponentialLR(o, 0.7), interval="step", frequency=2)
scheduled("cosine with restarts", lambda o: lr.CosineAnnealingWarmRestarts(o, 3), interval="step")
scheduled(
    "warm-up and cosine",
    lambda o: lr.SequentialLR(o, [lr.LinearLR(o, 0.1, total_iters=3), lr.CosineAnnealingLR(o, 5)], [3]),
    interval="step",
)
scheduled("cyclic momentum", lambda o: lr.CyclicLR(o, 0.01, 0.1, step_size_up=2), interval="step")


# --- optimizers -------------------------------------------------------------------------------------------------


def optimized(name: str, make: Callable[[Any], Any], **about: Any) -> None:
    def training() -> Training:
        class Optimized(Base):
            def configure_optimizers(self):
                return make(self)

        return Training(Optimized(), loader(shuffle=True))

    training.__module__ = __name__
    trains(f"optimizer {name}", **about)(training)


# Adam's step is the sign of what is all but zero: its rounding errors are larger than a sum's.
optimized("AdamW", lambda m: torch.optim.AdamW(m.parameters(), 0.01, eps=1e-3), tolerance=1e-4)
optimized("Adam with amsgrad", lambda m: torch.optim.Adam(m.parameters(), 0.01, eps=1e-3, amsgrad=True), tolerance=1e-4)
optimized("RMSprop", lambda m: torch.optim.RMSprop(m.parameters(), 0.01, eps=1e-3), tolerance=1e-4)
optimized("Adagrad", lambda m: torch.optim.Adagrad(m.parameters(), 0.01, eps=1e-3), tolerance=1e-4)
optimized("SGD without momentum", lambda m: torch.optim.SGD(m.parameters(), 0.1))
optimized("averaged SGD", lambda m: torch.optim.ASGD(m.parameters(), 0.05))
optimized("LBFGS", lambda m: torch.optim.LBFGS(m.parameters(), 0.1, max_iter=3), tolerance=1e-3)
optimized(
    "groups",
    lambda m: torch.optim.SGD(
        [{"params": m.net.first.parameters(), "lr": 0.1, "weight_decay": 0.1}, {"params": m.net.last.parameters()}],
        0.02,
        momentum=0.5,
        nesterov=True,
    ),
)


class Lookahead(torch.optim.SGD):
    """An optimizer with a step of its own, which counts."""

    def __init__(self, parameters):
        super().__init__(parameters, 0.05)
        self.taken = 0
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    def step(self, closure=None):
        loss = super().step(closure)
        self.taken += 1
        with torch.no_grad():
            for p, slow in zip(self.param_groups[0]["params"], self.slow, strict=True):
                slow.lerp_(p, 0.5)
                if self.taken % 2 == 0:
                    p.copy_(slow)
        return loss


optimized("of its own", lambda m: Lookahead(list(m.parameters())))


class Sharp(torch.optim.SGD):
    """Two evaluations of a step, as sharpness-aware minimisation makes them."""

    def step(self, closure=None):
        loss = closure()
        parameters = [p for group in self.param_groups for p in group["params"]]
        moved = [0.05 * p.grad / (p.grad.norm() + 1e-6) for p in parameters]
        with torch.no_grad():
            torch._foreach_add_(parameters, moved)
        closure()
        with torch.no_grad():
            torch._foreach_sub_(parameters, moved)
        super().step()
        return loss


optimized(
    "with two evaluations",
    lambda m: Sharp(m.parameters(), 0.05),
    exact=False,
    says=r"closure|evaluat|optimi[sz]er|step",
)


@trains("optimizer steps over frozen parts")
class PartlyFrozen(Base):
    def __init__(self):
        super().__init__()
        self.net.first.requires_grad_(requires_grad=False)


@trains("parameter that gets no gradient", REPORT, FIT, MICRO, TIGHT)
class Unused(Base):
    def __init__(self):
        super().__init__()
        self.unused = torch.nn.Linear(3, 3)


@trains("parts that take turns", exact=False, says="batch_idx")
class Alternating(Base):
    def training_step(self, batch, batch_idx):
        self.net.first.requires_grad_(batch_idx % 2 == 0)
        return self.loss(batch)


@trains("manual optimization", REPORT, FIT, MICRO, exact=False, says=r"manual optimi[sz]ation")
class Manual(Base):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


@trains("manual optimization of two players", exact=False, says=r"manual optimi[sz]ation")
class Players(Base):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.critic = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        one, two = self.optimizers()
        x, y = batch
        made = self.net(x)
        two.zero_grad()
        self.manual_backward(F.softplus(self.critic(made.detach())).mean() + F.softplus(-self.critic(y)).mean())
        two.step()
        one.zero_grad()
        self.manual_backward(F.softplus(-self.critic(made)).mean())
        one.step()

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), 0.1), torch.optim.SGD(self.critic.parameters(), 0.1)


# --- the Trainer's settings -------------------------------------------------------------------------------------


def settings(name: str, *modes: str, samples: int = 29, shuffle: bool = True, **trainer: Any) -> None:
    about = trainer.pop("about", {})

    def training() -> Training:
        return Training(Base(), loader(Pairs(samples), shuffle=shuffle), trainer=trainer)

    training.__module__ = __name__
    trains(f"trainer {name}", *modes, **about)(training)


settings("clips norms", REPORT, FIT, MICRO, TIGHT, gradient_clip_val=0.1)
settings("clips values", gradient_clip_val=0.01, gradient_clip_algorithm="value")
settings(
    "accumulates three, short last batch",
    REPORT,
    FIT,
    MICRO,
    TIGHT,
    samples=37,
    accumulate_grad_batches=3,
    max_epochs=2,
)
settings("accumulates two and clips", samples=37, accumulate_grad_batches=2, gradient_clip_val=0.1)
settings("max_steps", max_steps=3)
settings("limit_train_batches", limit_train_batches=2, max_epochs=2)
settings("overfit_batches", overfit_batches=2, max_epochs=2)
settings("detects anomalies", detect_anomaly=True)
settings("last batch of one", samples=25)
settings("several epochs", max_epochs=3)
settings("min_epochs and max_steps", min_epochs=2, max_steps=9, max_epochs=5)
settings("plugs no sampler in", use_distributed_sampler=False)
settings(
    "bf16-mixed",
    precision="bf16-mixed",
    about={"exact": False, "says": r"bf16|bfloat16|precision|rounding", "tolerance": 0.05},
)
if torch_release() >= (2, 5):  # before, the CPU has no kernel for the mean squared error in bfloat16
    settings(
        "bf16-true",
        precision="bf16-true",
        about={"exact": False, "says": r"bf16|bfloat16|precision|rounding", "tolerance": 0.1},
    )
settings("64-true", precision="64-true", about={"exact": False, "says": "64-true"})


@trains("trainer validates twice an epoch", REPORT, FIT, MICRO)
def validating():
    class Validating(Base):
        def validation_step(self, batch, batch_idx):
            self.log("val", self.loss(batch))
            self.effects.append((self.trainer.global_step, batch_idx))

    data = {"train_dataloaders": loader(Pairs(32), shuffle=True), "val_dataloaders": loader(Pairs(16))}
    return Training(Validating(), data, trainer={"val_check_interval": 0.5, "max_epochs": 2, "num_sanity_val_steps": 1})


def with_callbacks(name: str, make: Callable[[], list[Any]], *modes: str, **trainer: Any) -> None:
    def training() -> Training:
        made = make()

        class Monitored(Base):
            def training_step(self, batch, batch_idx):
                loss = self.loss(batch)
                self.log("train_loss", loss, on_epoch=True, batch_size=len(batch[0]))
                return loss

        def effects() -> Any:
            keys = ("best", "wait_count", "stopped_epoch", "seen", "lrs", "best_model_score")
            return [{key: getattr(one, key) for key in keys if hasattr(one, key)} for one in made]

        return Training(Monitored(), loader(shuffle=True), {"max_epochs": 3} | trainer, made, effects)

    training.__module__ = __name__
    trains(f"callback {name}", *modes)(training)


with_callbacks("EarlyStopping", lambda: [pl_callbacks.EarlyStopping("train_loss_epoch", patience=1, min_delta=0.3)])
with_callbacks("EarlyStopping by step", lambda: [pl_callbacks.EarlyStopping("train_loss", patience=1)])
with_callbacks("StochasticWeightAveraging", lambda: [pl_callbacks.StochasticWeightAveraging(0.01, swa_epoch_start=1)])
with_callbacks("LearningRateMonitor", lambda: [pl_callbacks.LearningRateMonitor("step")])
with_callbacks("GradientAccumulationScheduler", lambda: [pl_callbacks.GradientAccumulationScheduler({0: 1, 1: 3})])
with_callbacks(
    "ModelCheckpoint",
    lambda: [Checkpoints(monitor="train_loss", save_top_k=2, every_n_train_steps=2)],
    enable_checkpointing=True,
)
with_callbacks("Timer and DeviceStats", lambda: [pl_callbacks.Timer(), Gradients()])
with_callbacks("WeightAveraging", lambda: [pl_callbacks.EMAWeightAveraging(decay=0.5)], enable_checkpointing=True)


class Checkpoints(pl_callbacks.ModelCheckpoint):
    """Keeps what it would have written."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(dirpath="nowhere", **settings)
        self.seen: list[Any] = []

    def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
        self.seen.append(
            (trainer.global_step, {k: v.clone() for k, v in trainer.lightning_module.state_dict().items()})
        )
        self._last_global_step_saved = trainer.global_step

    def _remove_checkpoint(self, trainer: Any, filepath: str) -> None:
        pass


class Gradients(pl.Callback):
    """Norms before the optimizer's step, and weights after each batch."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.seen.append(float(pl_module.net.first.weight.grad.norm()))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen.append(float(pl_module.net.first.weight.norm()))


# --- resuming ---------------------------------------------------------------------------------------------------


def resumed(name: str, after: int, make: Callable[[], Base] = Base, **trainer: Any) -> None:
    def training() -> Training:
        data = loader(Pairs(32), shuffle=False)
        return Training(make(), data, {"max_epochs": 3} | trainer, resume_after=after)

    training.__module__ = __name__
    trains(f"resumed {name}", REPORT, FIT, MICRO)(training)


class Warmed(Base):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        cycle = lr.OneCycleLR(optimizer, 0.1, total_steps=12)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cycle, "interval": "step"}}


resumed("after an epoch", 4)
resumed("in an epoch", 6)
resumed("under one cycle", 6, Warmed)
resumed("in an accumulation", 3, accumulate_grad_batches=3)
