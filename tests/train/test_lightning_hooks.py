"""Hooks, metrics and outputs in Lightning: once per batch and of the batch, with and without micro-batches."""

from __future__ import annotations

import importlib
from collections import Counter
from typing import Any

import pytest
import torch

pytest.importorskip("lightning")


import lightning_cases as cases
from guard_arguments import in_advanced

from vram_guard_lightning import VramGuard

# Lightning warns about small loaders and few workers; what the guard itself says stays an error.
pytestmark = pytest.mark.filterwarnings("ignore", "error:vram_guard")
PL = cases.NAMESPACE
LIGHTNING = importlib.import_module(PL)
HOOKS = (
    "on_after_backward", "on_before_zero_grad", "on_before_optimizer_step", "optimizer_zero_grad", "optimizer_step",
    "configure_gradient_clipping", "on_train_batch_start", "on_train_batch_end", "on_before_batch_transfer",
    "transfer_batch_to_device", "on_after_batch_transfer", "lr_scheduler_step",
)  # fmt: skip


def counting(base: type, counts: Counter[str], *, armed: bool) -> type:
    """The class with hooks that count their calls; armed: without those that keep recovery from being armed."""

    def counted(name: str) -> Any:
        def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
            counts[f"{base.__name__}.{name}"] += 1
            return getattr(base, name)(self, *args, **kwargs)

        return hook

    hooks = {name: counted(name) for name in HOOKS if hasattr(base, name) and not (armed and "zero_grad" in name)}
    hooks["on_train_start"] = lambda *_: counts.clear()  # the guard's own look at a batch is none of the training's
    return type(f"Counting{base.__name__}", (base,), hooks)


class Editing(type(cases.make_module(PL))):  # type: ignore[misc]
    """Edits the gradients after backward: clips them, and rounds them, neither of which may be done in pieces."""

    metrics_seen: list[float]

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.clamp_(-0.05, 0.05)
                parameter.grad.mul_(1 + parameter.grad.norm())
        self.metrics_seen.append(float(self.trainer.callback_metrics["train_loss_step"]))
        self.log("norm", sum(parameter.grad.norm() for parameter in self.parameters()))


def run(root: Any, module: Any, *guards: Any, callbacks: Any = (), samples: int = 37, **how: Any) -> Any:
    trainer = cases.make_trainer(PL, root, [*callbacks, *guards], **{"max_epochs": 2, **how})
    torch.manual_seed(3)
    trainer.fit(module, train_dataloaders=cases.loader(samples))
    return trainer


def guard(*, recover: bool = False, micro: int = 2, **settings: Any) -> VramGuard:
    pin = {"pin": {"micro_batch_size": micro}} if micro else {}
    return VramGuard(
        **in_advanced(
            {"budget": "64GiB", "remember": False, "recover": recover, "loss_weight": "mean", **pin, **settings}
        )
    )


HOW: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulating": {"accumulate_grad_batches": 3},
    "clipping": {"gradient_clip_val": 0.05},
    "lbfgs": {"optimizer": "lbfgs", "max_epochs": 1, "limit_train_batches": 2},  # its steps multiply rounding errors
    "scheduler": {"scheduler": "one_cycle"},
    "scaler": {"scaler": True},
}


@pytest.mark.parametrize("recover", [False, True], ids=["", "recovery armed"])
@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_hooks_run_once_a_batch_with_the_gradients_of_the_batch(tmp_path: Any, how: Any, recover: bool) -> None:
    found = []
    for guards in ([], [guard(recover=recover)]):
        settings = dict(how)
        if settings.pop("scaler", False):
            plugin = importlib.import_module(f"{PL}.plugins").MixedPrecision
            settings["plugins"] = [plugin("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**6))]
        counts: Counter[str] = Counter()
        given = {name: settings.pop(name) for name in ("optimizer", "scheduler") if name in settings}
        module = counting(Editing, counts, armed=recover)(**given)
        module.metrics_seen = []
        watching = counting(LIGHTNING.Callback, counts, armed=recover)()
        trainer = run(tmp_path, module, *guards, callbacks=[watching], **settings)
        assert not guards or trainer.callbacks[-1].plan.splits == 4
        found.append((module, counts, trainer.callback_metrics))
    (plain, counts, logged), (split, split_counts, split_logged) = found
    assert counts["Callback.on_after_backward"] >= 8
    assert split_counts == counts
    assert max(split.seen) == 2
    rounded = "scaler" in how or "optimizer" in how
    rough = {"rtol": 2e-2, "atol": 2e-3} if rounded else {"rtol": 1e-3, "atol": 1e-5}
    torch.testing.assert_close(cases.weights(split), cases.weights(plain), **rough)
    assert split.metrics_seen == pytest.approx(plain.metrics_seen, rel=rough["rtol"])
    assert float(split_logged["norm"]) == pytest.approx(float(logged["norm"]), rel=rough["rtol"])


# --- what cannot be once a batch keeps the batches whole -----------------------------------------------------------


def before_backward(module: Any, callbacks: list[Any], trainer: dict[str, Any]) -> None:
    kind = type(module)
    module.__class__ = type("Own", (kind,), {"on_before_backward": lambda _, loss: None})


def own_backward(module: Any, callbacks: list[Any], trainer: dict[str, Any]) -> None:
    kind = type(module)

    def backward(self: Any, loss: torch.Tensor) -> None:
        (loss**2).backward()

    module.__class__ = type("Own", (kind,), {"backward": backward})


def precision_plugin(module: Any, callbacks: list[Any], trainer: dict[str, Any]) -> None:
    class Own(importlib.import_module(f"{PL}.plugins").Precision):  # type: ignore[misc]
        def post_backward(self, *args: Any) -> Any:
            return super().post_backward(*args)

    trainer["plugins"] = [Own()]


def gradient_hook(module: Any, callbacks: list[Any], trainer: dict[str, Any]) -> None:
    module.net[0].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))


def module_hook(module: Any, callbacks: list[Any], trainer: dict[str, Any]) -> None:
    module.net[3].register_full_backward_hook(lambda _, given, __: tuple(g.clamp(-0.01, 0.01) for g in given))


REFUSED = {
    before_backward: "on_before_backward of Own is called with the loss of the whole batch",
    own_backward: "backward of Own is overridden",
    precision_plugin: "post_backward of Own is overridden",
    gradient_hook: r"net\.0\.weight has a hook",
    module_hook: r"net\.3 has a hook",
}


def changed(root: Any, change: Any, *guards: Any, at_start: bool = False) -> Any:
    """A training with one thing of the user's that runs with every backward, there from the beginning or late."""
    module, settings = cases.make_module(PL), {}
    callbacks: list[Any] = []
    if at_start:
        start = type("Start", (LIGHTNING.Callback,), {"on_train_start": lambda *_: change(module, [], {})})()
        callbacks.append(start)
    else:
        change(module, callbacks, settings)
    run(root, module, *guards, callbacks=callbacks, **settings)
    return module


@pytest.mark.parametrize("change", REFUSED, ids=lambda change: change.__name__)
def test_what_runs_with_every_backward_keeps_batches_whole(tmp_path: Any, change: Any) -> None:
    plain = changed(tmp_path, change)
    with pytest.warns(UserWarning, match=f"micro_batch_size is pinned.*{REFUSED[change]}"):
        pinned = changed(tmp_path, change, guard())
    watched = changed(tmp_path, change, guard(micro=0, recover=True))
    for module in (pinned, watched):
        assert set(module.seen) == {8, 5}
        assert torch.equal(cases.weights(module), cases.weights(plain))


@pytest.mark.parametrize("recover", [False, True], ids=["", "recovery armed"])
@pytest.mark.parametrize("change", [gradient_hook, module_hook, own_backward], ids=lambda change: change.__name__)
def test_what_comes_after_the_decision_keeps_batches_whole(tmp_path: Any, change: Any, recover: bool) -> None:
    plain = changed(tmp_path, change, at_start=True)
    with pytest.warns(UserWarning, match=f"{REFUSED[change]}.*this batch is trained without splitting it"):
        module = changed(tmp_path, change, guard(recover=recover), at_start=True)
    assert set(module.seen) == {8, 5}
    assert torch.equal(cases.weights(module), cases.weights(plain))


# --- metrics ------------------------------------------------------------------------------------------------------


def metric_module() -> Any:
    torchmetrics = pytest.importorskip("torchmetrics")
    classification = importlib.import_module("torchmetrics.classification")

    class Twofold(torchmetrics.Metric):  # type: ignore[misc, name-defined]
        """Two values at once, of a state that needs the whole of it while it is updated."""

        full_state_update = True

        def __init__(self) -> None:
            super().__init__()
            self.add_state("values", [], dist_reduce_fx="cat")

        def update(self, values: torch.Tensor) -> None:
            self.values.append(values.flatten())

        def compute(self) -> dict[str, torch.Tensor]:
            values = torch.cat(self.values)
            return {"spread": values.std(), "median": values.median()}

    class WithMetrics(type(cases.make_module(PL))):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.f1 = classification.BinaryF1Score()
            self.roc = classification.BinaryAUROC()
            self.returned = classification.BinaryF1Score()
            self.twice = torchmetrics.MeanSquaredError(squared=False)
            self.updated = torchmetrics.MeanSquaredError()
            self.both = torchmetrics.MeanSquaredError() + torchmetrics.MeanAbsoluteError()
            self.twofold = Twofold()
            made = {"f1": classification.BinaryF1Score(), "precision": classification.BinaryPrecision()}
            self.logged = torchmetrics.MetricCollection(made, prefix="logged_")
            self.called = torchmetrics.MetricCollection(made, prefix="called_").clone()
            self.never = torchmetrics.MeanSquaredError()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            prediction = self.net(x)
            guess, truth = torch.sigmoid(prediction[:, 0]), (y[:, 0] > 0.3).long()
            every: dict[str, Any] = {"on_step": True, "on_epoch": True}
            self.f1(guess, truth)
            self.roc(guess, truth)
            self.log("f1", self.f1, **every)
            self.log("roc", self.roc, **every)
            self.log(name="returned", value=self.returned(guess, truth), on_step=True)
            self.log("first", self.twice(prediction[:, 0], y[:, 0]))
            self.twice(prediction[:, 1], y[:, 1])
            self.log("twice", self.twice, **every)
            self.updated.update(prediction, y)
            self.log("updated", self.updated, on_step=False, on_epoch=True)
            self.log("both", self.both(prediction, y))
            self.log_dict(self.twofold(prediction), on_step=True)
            self.logged(guess, truth)
            self.log_dict(self.logged, **every)
            self.log_dict(self.called(guess, truth))
            return super().training_step(batch, batch_idx)

    return WithMetrics()


class Logged(LIGHTNING.Callback):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        self.values: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.values.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    on_train_epoch_end = on_train_batch_end


def test_a_steps_value_of_a_metric_is_that_of_the_batch(tmp_path: Any) -> None:
    found = []
    for guards in ([], [guard(recover=True)]):
        module, logged = metric_module(), Logged()
        run(tmp_path, module, *guards, callbacks=[logged])
        assert not guards or guards[0].plan is not None
        found.append((module, logged.values))
    (_, values), (split, split_values) = found
    assert max(split.seen) == 2
    assert {"f1_step", "roc_step", "first", "logged_f1_step", "called_f1", "spread"} <= values[0].keys()
    for one, other in zip(values, split_values, strict=True):
        assert other == pytest.approx(one, rel=1e-4, abs=1e-5)
    assert not any("forward" in vars(part) for part in split.modules())
    assert split.never._update_count == 0


# --- outputs ------------------------------------------------------------------------------------------------------


def test_hooks_get_all_kinds_of_outputs_of_the_whole_batch(tmp_path: Any) -> None:
    class Returning(type(cases.make_module(PL))):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            x, y = batch
            wrong = (self.net(x) - y).abs().detach()
            return {
                "loss": loss,
                "names": [f"{first:.3f}" for first in x[:, 0].tolist()],
                "array": wrong.numpy(),
                "nested": {"pair": (wrong, float(wrong.mean())), "error": wrong.mean().numpy()},
                "epoch": 100 + self.current_epoch,
                "stage": "train",
                "nothing": None,
            }

    class Outputs(LIGHTNING.Callback):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
            self.seen.append(outputs)

    found = []
    for guards in ([], [guard()]):
        outputs = Outputs()
        run(tmp_path, Returning(), *guards, callbacks=[outputs])
        found.append(outputs.seen)
    assert len(found[0]) == 10
    for one, other in zip(*found, strict=True):
        assert other.keys() == one.keys()
        assert other["names"] == one["names"]
        assert (other["epoch"], other["stage"], other["nothing"]) == (one["epoch"], "train", None)
        for name in ("loss", "array", "nested"):
            torch.testing.assert_close(other[name], one[name], rtol=1e-4, atol=1e-5)
