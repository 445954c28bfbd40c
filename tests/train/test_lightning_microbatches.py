"""Training in micro-batches inside Lightning's closure is the training that the user wrote."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

pytest.importorskip("lightning")

import gc
import weakref

import lightning.pytorch as lightning
import lightning_cases as cases
from guard_arguments import in_advanced

from vram_guard_lightning import VramGuard

# Lightning warns about small loaders and few workers; what the guard itself says stays an error.
pytestmark = pytest.mark.filterwarnings("ignore", "error:vram_guard")
QUIET = {"remember": False, "recover": False}


def splitting(micro: int = 2, loss_weight: Any = "mean") -> VramGuard:
    """A guard that does nothing but split the batches."""
    pin = {"micro_batch_size": micro}
    return VramGuard(**in_advanced({"budget": "64GiB", "pin": pin, "loss_weight": loss_weight, **QUIET}))


def train(root: Any, *, micro: int = 0, **how: Any) -> tuple[Any, Any]:
    """One training; micro=0: as Lightning does it by itself."""
    module = how.pop("module", None) or cases.make_module()
    data = how.pop("data", None) or {"train_dataloaders": cases.loader(40)}
    callbacks = [*how.pop("callbacks", ()), *([splitting(micro)] if micro else [])]
    trainer = cases.make_trainer("lightning.pytorch", root, callbacks, **how)
    torch.manual_seed(3)
    trainer.fit(module, **data)
    return module, trainer


def assert_same_training(plain: Any, split: Any) -> None:
    assert split.rates == plain.rates
    assert split.loaded == plain.loaded
    assert split.validated_at == plain.validated_at
    assert max(split.seen) < max(plain.seen)
    torch.testing.assert_close(cases.weights(split), cases.weights(plain), rtol=2e-5, atol=2e-6)


@dataclasses.dataclass
class Labelled:
    inputs: torch.Tensor
    targets: torch.Tensor


def labelled(samples: list[Any]) -> Labelled:
    return Labelled(*torch.utils.data.default_collate(samples))


@pytest.mark.parametrize("nested", [False, True])
def test_data_classes_are_traced_and_cut(tmp_path: Any, nested: bool) -> None:
    """Precision and micro-batches, where the step takes too much as written."""

    class Unpacking(type(cases.make_module())):  # type: ignore[misc]
        def unpack(self, batch: Any) -> Any:
            batch = batch["all"] if nested else batch
            return batch.inputs, batch.targets

    def run(guard: Any = None) -> tuple[Any, list[float]]:
        data = cases.loader(40, collate_fn=lambda samples: {"all": labelled(samples)} if nested else labelled(samples))
        module, _ = train(
            tmp_path,
            module=Unpacking(hidden=64),
            data={"train_dataloaders": data},
            callbacks=[guard] if guard else [],
        )
        return module, module.rates

    guard = VramGuard(budget="1GiB", pin={"micro_batch_size": 2, "precision": "32-true"})
    (plain, _), (split, _) = run(), run(guard)
    assert guard.plan is not None
    assert guard.plan.timeline.tier == "symbolic", "every tensor of the batch is on the simulated device"
    assert_same_training(plain, split)
    mixed = VramGuard(budget="1GiB", pin={"precision": "bf16-mixed"})
    assert len(run(mixed)[1]) == 15
    assert mixed.plan is not None
    assert mixed.plan.fits


class Watching(lightning.Callback):
    """What hooks and metrics saw: the logged values after every step and every epoch."""

    def __init__(self) -> None:
        self.step_values: list[dict[str, float]] = []
        self.epoch_values: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.step_values.append({k: float(v) for k, v in trainer.callback_metrics.items()})

    def on_train_epoch_end(self, trainer: Any, _module: Any) -> None:
        self.epoch_values.append({k: float(v) for k, v in trainer.callback_metrics.items()})


def watched(tmp_path: Any, module: Any, micro: int, samples: int = 37) -> Any:
    watch = Watching()
    data = {"train_dataloaders": cases.loader(samples)}
    train(tmp_path, module=module, micro=micro, data=data, callbacks=[watch], max_epochs=2)
    return watch


def logging_module() -> Any:
    base = type(cases.make_module())

    class Logging(base):  # type: ignore[misc, valid-type]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            x, _ = batch
            self.log("plain_mean", x.mean(), on_step=True, on_epoch=True)
            self.log("with_size", x.mean(), on_step=True, on_epoch=True, batch_size=len(x))
            self.log("count", float(len(x)), on_step=True, on_epoch=True, reduce_fx="sum")
            self.log("largest", x.max(), on_step=True, on_epoch=True, reduce_fx=torch.max)
            self.log("smallest", x.min(), on_step=False, on_epoch=True, reduce_fx="min")
            self.log("step", torch.tensor(batch_idx))
            return loss

    return Logging()


def test_logged_values_are_those_of_the_whole_batch(tmp_path: Any) -> None:
    plain, split = watched(tmp_path, logging_module(), 0), watched(tmp_path, logging_module(), 2)
    for one, other in zip(
        (*plain.step_values, *plain.epoch_values), (*split.step_values, *split.epoch_values), strict=True
    ):
        assert other == pytest.approx(one, rel=1e-4, abs=1e-5)
    assert split.step_values[0]["count_step"] == 8
    assert split.epoch_values[-1]["count_epoch"] == 37


def test_none_for_a_micro_batch_leaves_it_out(tmp_path: Any) -> None:
    base = type(cases.make_module())

    class Skipping(base):  # type: ignore[misc, valid-type]
        skip_all = False

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            skipped = batch[0].device.type == "cpu" and (self.skip_all or len(self.seen) % 4 == 1)
            return None if skipped else loss

    module = Skipping()
    before = cases.weights(module).clone()
    with pytest.warns(UserWarning, match="returned None for a micro-batch"):
        train(tmp_path, module=module, micro=2)
    assert not torch.equal(cases.weights(module), before)

    module = Skipping()
    module.skip_all = True
    before = cases.weights(module).clone()
    with pytest.warns(UserWarning, match="returned None for a micro-batch"):
        train(tmp_path, module=module, micro=2)
    assert torch.equal(cases.weights(module), before)


def test_a_summed_loss_and_a_loss_over_counted_positions(tmp_path: Any) -> None:
    base = type(cases.make_module())

    class Summed(base):  # type: ignore[misc, valid-type]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = self.unpack(batch)
            self.seen.append(len(x))
            return torch.nn.functional.mse_loss(self.net(x), y, reduction="sum")

    class Masked(base):  # type: ignore[misc, valid-type]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = self.unpack(batch)
            self.seen.append(len(x))
            kept = count(batch)
            return ((self.net(x) - y).square().mean(-1) * (x[:, 0] > -0.8)).sum() / kept

    def count(batch: Any) -> torch.Tensor:
        return (batch[0][:, 0] > -0.8).sum().clamp(min=1)

    for kind, weight in ((Summed, "sum"), (Masked, count)):
        plain, _ = train(tmp_path, module=kind())
        split, _ = train(tmp_path, module=kind(), callbacks=[splitting(4, weight)])
        assert_same_training(plain, split)


def test_a_batch_that_cannot_be_split_is_trained_on_whole(tmp_path: Any) -> None:
    data = {"train_dataloaders": {"a": cases.loader(32), "b": cases.loader(30)}}
    plain, _ = train(tmp_path, data=data)
    with pytest.warns(UserWarning, match=r"30|6 samples, where .* has 8.*trained without splitting it"):
        split, _ = train(tmp_path, data=data, micro=2)
    assert_same_training(plain, split)


def test_batches_no_larger_than_the_micro_batch_are_bit_identical(tmp_path: Any) -> None:
    plain, _ = train(tmp_path)
    split, _ = train(tmp_path, micro=8)
    assert torch.equal(cases.weights(plain), cases.weights(split))


# --- values that are logged, by themselves ------------------------------------------------------------------------


def test_logged_values_hold_no_activations_while_the_next_micro_batch_runs(tmp_path: Any) -> None:
    base = type(cases.make_module())

    class Beside(base):  # type: ignore[misc, valid-type]
        keeps = False

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.seen[-1:] == [4] and len(self.seen) % 2:  # not the first micro-batch of a loaded batch
                gc.collect()
                alive.append(predictions[-1]() is not None)
            prediction = self.net(batch[0])
            predictions.append(weakref.ref(prediction))
            size = prediction.pow(2).mean()  # not the loss: no backward frees what its graph holds
            self.log("size", size, enable_graph=True)
            own = prediction.detach().mean()
            self.log("own", own)
            own.zero_()  # Lightning's log has read it by now
            self.kept = size if self.keeps else None
            return super().training_step(batch, batch_idx)

    seen = []
    for micro in (0, 4):
        predictions, alive = [], []
        watch = Watching()
        train(tmp_path, module=Beside(), micro=micro, callbacks=[watch], max_epochs=1)
        seen.append([(values["size"], values["own"]) for values in watch.step_values])
    assert seen[1] == [pytest.approx(values, rel=1e-4, abs=1e-6) for values in seen[0]]
    assert alive == [False] * 5
    Beside.keeps, alive = True, []
    train(tmp_path, module=Beside(), micro=4, max_epochs=1)
    assert alive == [True] * 5, "the check above could not fail"
