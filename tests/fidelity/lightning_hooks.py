"""Hooks, logged values, metrics and outputs: what is called or shown once for a batch."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torchmetrics
from torch.nn import functional as F

from .harness import FIT, MICRO, REPORT, TIGHT
from .lightning import Base, Rows, Training, case, loader


def hook(name: str, *modes: str, says: str = "", **about: Any) -> Any:
    """A case that is equal, or whose words name the hook."""
    return case(f"hook {name}", *modes, says=says or rf"\b{name.split(maxsplit=1)[0]}\b", **about)


# --- around backward --------------------------------------------------------------------------------------------


@hook("on_before_backward counted", REPORT, FIT, MICRO, TIGHT)
class BeforeBackward(Base):
    def on_before_backward(self, loss):
        self.effects.append(float(loss.detach()))


@hook("on_after_backward counted")
class AfterBackward(Base):
    def on_after_backward(self):
        self.effects.append(1)


@hook("on_after_backward halves gradients", REPORT, FIT, MICRO, TIGHT)
class HalvedGradients(Base):
    def on_after_backward(self):
        for parameter in self.parameters():
            parameter.grad.mul_(0.5)


@hook("on_after_backward takes signs")
class SignedGradients(Base):
    def on_after_backward(self):
        for parameter in self.parameters():
            parameter.grad.sign_()


@hook("on_after_backward clips")
class ClippedGradients(Base):
    def on_after_backward(self):
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.05)


@hook("on_after_backward adds noise")
class NoisyGradients(Base):
    def on_after_backward(self):
        for parameter in self.parameters():
            parameter.grad.add_(torch.randn_like(parameter.grad), alpha=0.1)


@hook("backward of its own", REPORT, FIT, MICRO)
class OwnBackward(Base):
    def backward(self, loss, *args, **kwargs):
        self.effects.append(1)
        super().backward(2 * loss, *args, **kwargs)


@hook("backward with a penalty added")
class PenaltyInBackward(Base):
    def backward(self, loss, *args, **kwargs):
        (loss + 1e-2 * sum(p.square().sum() for p in self.parameters())).backward()


@hook("backward that accumulates its own average")
class AverageInBackward(Base):
    average = 0.0

    def backward(self, loss, *args, **kwargs):
        self.average = 0.5 * self.average + 0.5 * float(loss.detach())
        super().backward(loss / (1 + self.average), *args, **kwargs)


class Watching(pl.Callback):
    def __init__(self):
        self.seen: list[Any] = []

    def on_before_backward(self, trainer, pl_module, loss):
        self.seen.append(("before", float(loss.detach())))

    def on_after_backward(self, trainer, pl_module):
        self.seen.append(("after", float(pl_module.net.first.weight.grad.norm())))


@hook("callback before and after backward", says=r"on_(before|after)_backward")
def watched():
    watching = Watching()
    return Training(Base(), callbacks=[watching], effects=lambda: watching.seen)


@hook("register_hook counts", says=r"hook")
class TensorHook(Base):
    def __init__(self):
        super().__init__()
        self.net.first.weight.register_hook(lambda grad: self.effects.append(1))


@hook("register_hook clips", says=r"hook|gradient of")
class TensorHookClips(Base):
    def __init__(self):
        super().__init__()
        self.net.first.weight.register_hook(lambda grad: grad.clamp(-1e-2, 1e-2))


@hook("register_post_accumulate_grad_hook", says=r"hook")
class PostAccumulate(Base):
    def __init__(self):
        super().__init__()
        self.net.last.weight.register_post_accumulate_grad_hook(lambda p: self.effects.append(float(p.grad.norm())))


@hook("register_full_backward_hook scales", says=r"hook|gradient of")
class ModuleBackwardHook(Base):
    def __init__(self):
        super().__init__()
        self.net.last.register_full_backward_hook(lambda module, given, got: (given[0] / given[0].norm(),))


@hook("forward hooks of modules", says=r"hook|attribute|training_step|kept")
class ForwardHook(Base):
    def __init__(self):
        super().__init__()
        self.kept = []
        self.net.register_forward_hook(lambda module, given, out: self.effects.append(tuple(out.shape)))


class Reading(pl.Callback):
    """Keeps what the step left at the module for the batch."""

    def __init__(self):
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen.append(pl_module.kept.clone())


def kept_for_the_end(make: Any) -> Any:
    reading = Reading()
    return Training(make(), callbacks=[reading], effects=lambda: reading.seen)


@hook("features that a forward hook keeps for on_train_batch_end", says=r"kept")
def kept_by_hook():
    class Kept(Base):
        def __init__(self):
            super().__init__()
            self.net.first.register_forward_hook(lambda module, given, out: setattr(self, "kept", out.detach()))

    return kept_for_the_end(Kept)


@hook("features that the step keeps for on_train_batch_end", says=r"kept")
def kept_by_step():
    class Kept(Base):
        def loss(self, batch):
            self.kept = batch[0]
            return super().loss(batch)

    return kept_for_the_end(Kept)


@hook("features that a callback may read later", says=r"kept")
class KeptForWhoReads(Base):
    def loss(self, batch):
        self.kept = batch[0]
        return super().loss(batch)


@hook("entries that the step writes to its batch", says=r"batch")
def written_to_batch():
    class Written(Base):
        def loss(self, batch):
            batch["features"] = self.net.first(batch["x"]).detach()
            return super().loss((batch["x"], batch["y"]))

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.effects.append(batch["features"].clone())

    return Training(Written(), loader(Rows("x", "y")))


@hook("hook of an intermediate result", says=r"hook|gradient of")
class ResultHook(Base):
    def loss(self, batch):
        x, y = batch
        out = self.net(x)
        out.register_hook(lambda grad: grad / grad.norm())
        return F.mse_loss(out, y)


# --- around batches and steps -----------------------------------------------------------------------------------


@hook("on_train_batch_start counted", exact=True)
class BatchStart(Base):
    def on_train_batch_start(self, batch, batch_idx):
        self.effects.append((batch_idx, len(batch[0])))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.effects.append((batch_idx, len(batch[0]), float(outputs["loss"].detach())))


@hook("on_train_batch_start that ends the epoch", exact=True)
class EarlyEnd(Base):
    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 2 else None


@hook("on_before_optimizer_step edits gradients", exact=True)
class EditedBeforeStep(Base):
    def on_before_optimizer_step(self, optimizer):
        self.effects.append(float(self.net.first.weight.grad.norm()))
        for parameter in self.parameters():
            parameter.grad.sign_()


@hook("optimizer_step warms up", exact=True)
class WarmingUp(Base):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * min(1.0, (self.trainer.global_step + 1) / 3)
        self.effects.append(batch_idx)
        optimizer.step(closure=optimizer_closure)


@hook("optimizer_step skips every second one")
class Skipping(Base):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        if batch_idx % 2:
            optimizer_closure()
        else:
            optimizer.step(closure=optimizer_closure)


@hook("configure_gradient_clipping", exact=True)
class OwnClipping(Base):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.effects.append(float(self.net.last.bias.grad.norm()))
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")


@hook("optimizer_zero_grad", exact=True)
class ZeroGrad(Base):
    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        self.effects.append(batch_idx)
        optimizer.zero_grad(set_to_none=False)


@hook("on_before_zero_grad", exact=True)
class BeforeZeroGrad(Base):
    def on_before_zero_grad(self, optimizer):
        self.effects.append([p.grad is None for p in self.parameters()])


@hook("on_after_batch_transfer augments", exact=True)
class Augmented(Base):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        return x + 0.1 * torch.randn_like(x), y


@hook("transfer_batch_to_device counted", exact=True)
class Transferred(Base):
    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        self.effects.append(len(batch[0]))
        return super().transfer_batch_to_device(batch, device, dataloader_idx)


@hook("on_train_epoch_end logs", exact=True)
class EpochEnd(Base):
    def on_train_start(self):
        self.sizes = []

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.sizes.append(float(outputs["loss"]))

    def on_train_epoch_end(self):
        self.log("mean_of_batches", sum(self.sizes) / len(self.sizes))


@hook("setup and configure_model build the rest", exact=True)
class BuiltLate(Base):
    def configure_model(self):
        if not hasattr(self, "late"):
            self.late = torch.nn.Linear(4, 4)

    def loss(self, batch):
        return F.mse_loss(self.late(self.net(batch[0])), batch[1])


@hook("batch_idx and global_step are read")
class ReadsSteps(Base):
    def training_step(self, batch, batch_idx):
        return self.loss(batch) * (1 + batch_idx / 10 + self.trainer.global_step / 20 + self.current_epoch)


# --- logged values ----------------------------------------------------------------------------------------------


def logged(name: str, *modes: str, says: str = r"\blog|metric", **about: Any) -> Any:
    return case(f"logged {name}", *modes, says=says, **about)


@logged("on step and on epoch", exact=True)
class OnBoth(Base):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("both", loss, on_step=True, on_epoch=True, batch_size=len(batch[0]))
        self.log_dict({"a": loss, "b": 2 * loss.detach()}, on_step=False, on_epoch=True, batch_size=len(batch[0]))
        return loss


@logged("with a constant batch size")
class ConstantSize(Base):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("named", loss, on_step=True, on_epoch=True, batch_size=8)
        return loss


@logged("largest, smallest and sums", exact=True)
class Reduced(Base):
    def training_step(self, batch, batch_idx):
        x, _ = batch
        self.log("count", float(len(x)), reduce_fx="sum", on_epoch=True, on_step=True)
        self.log("largest", x.max(), reduce_fx=torch.max, on_epoch=True, on_step=True, batch_size=len(x))
        self.log("smallest", x.min(), reduce_fx="min", on_epoch=True, on_step=True, batch_size=len(x))
        return self.loss(batch)


@logged("length of the batch")
class Length(Base):
    def training_step(self, batch, batch_idx):
        self.log("length", float(len(batch[0])))
        return self.loss(batch)


@logged("spread of the batch")
class Spread(Base):
    def training_step(self, batch, batch_idx):
        self.log("spread", self.net(batch[0]).std())
        self.log("root", F.mse_loss(self.net(batch[0]), batch[1]).sqrt())
        return self.loss(batch)


@logged("rate and other facts", says="trainer.global_step")
class Facts(Base):
    def training_step(self, batch, batch_idx):
        self.log("rate", self.optimizers().param_groups[0]["lr"])
        self.log("step", float(self.global_step), prog_bar=True)
        return self.loss(batch)


@logged("by the logger itself", says=r"\blog|metric|writ|training_step")
class ByLogger(Base):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.logger.log_metrics({"own": float(loss.detach())}, step=batch_idx)
        return loss


def metric(name: str, **about: Any) -> Any:
    return case(f"metric {name}", says=r"\blog|metric|state", **about)


class Labelled(Base):
    def __init__(self):
        super().__init__()
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=4)

    def loss(self, batch):
        return F.cross_entropy(self.net(batch["x"]), batch["label"])

    def scores(self, batch):
        return self.net(batch["x"]).detach(), batch["label"]


def of_labels(kind: type[Base]) -> Training:
    return Training(kind(), loader(Rows("x", "label")))


@metric("object on step")
def metric_on_step():
    class OnStep(Labelled):
        def training_step(self, batch, batch_idx):
            self.accuracy(*self.scores(batch))
            self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
            return self.loss(batch)

    return of_labels(OnStep)


@metric("object on epoch", exact=True)
def metric_on_epoch():
    class OnEpoch(Labelled):
        def training_step(self, batch, batch_idx):
            self.accuracy.update(*self.scores(batch))
            self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
            return self.loss(batch)

    return of_labels(OnEpoch)


@metric("value of a step")
def metric_value():
    class Value(Labelled):
        def training_step(self, batch, batch_idx):
            self.log("accuracy", self.accuracy(*self.scores(batch)))
            return self.loss(batch)

    return of_labels(Value)


@metric("of a root")
def metric_root():
    class Root(Base):
        def __init__(self):
            super().__init__()
            self.error = torchmetrics.MeanSquaredError(squared=False)

        def training_step(self, batch, batch_idx):
            self.error(self.net(batch[0]).detach(), batch[1])
            self.log("error", self.error, on_step=True, on_epoch=True)
            return self.loss(batch)

    return Training(Root())


@metric("collection, computed by hand at the end of an epoch", exact=True)
def metric_collection():
    class Collected(Labelled):
        def __init__(self):
            super().__init__()
            kinds = {"f1": torchmetrics.F1Score(task="multiclass", num_classes=4), "accuracy": self.accuracy}
            self.kinds = torchmetrics.MetricCollection(kinds)

        def training_step(self, batch, batch_idx):
            self.kinds.update(*self.scores(batch))
            return self.loss(batch)

        def on_train_epoch_end(self):
            self.log_dict(self.kinds.compute())
            self.kinds.reset()

    return of_labels(Collected)


@metric("computed and reset in every step")
def metric_reset():
    class Reset(Labelled):
        def training_step(self, batch, batch_idx):
            self.accuracy.update(*self.scores(batch))
            self.effects.append(float(self.accuracy.compute()))
            self.accuracy.reset()
            return self.loss(batch)

    return of_labels(Reset)


# --- outputs ----------------------------------------------------------------------------------------------------


def outputs(name: str, **about: Any) -> Any:
    return case(f"outputs {name}", says=r"output|return|entr", **about)


@outputs("tensors of samples", exact=True)
class PerSample(Base):
    def training_step(self, batch, batch_idx):
        out = self.net(batch[0])
        return {"loss": F.mse_loss(out, batch[1]), "scores": out.detach(), "error": (out - batch[1]).abs().mean()}


@outputs("lists and strings")
class Others(Base):
    def training_step(self, batch, batch_idx):
        x, y = batch
        ids = [round(float(value), 4) for value in y[:, 0].detach()]
        return {"loss": self.loss(batch), "ids": ids, "names": [f"n{i}" for i in range(len(x))], "length": len(x)}


@outputs("numbers of the whole batch")
class Numbers(Base):
    def training_step(self, batch, batch_idx):
        return {"loss": self.loss(batch), "count": torch.tensor(len(batch[0])), "what": "train"}


@outputs("none for some batches")
class NoneSometimes(Base):
    def training_step(self, batch, batch_idx):
        return None if batch_idx == 1 else self.loss(batch)


@outputs("none for some samples")
class NoneForSome(Base):
    def training_step(self, batch, batch_idx):
        return None if float(batch[1][:, 0].detach().sum()) > 1 else self.loss(batch)
