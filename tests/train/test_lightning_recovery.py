"""After a real out-of-memory error the training is the one that had the smaller micro-batches from there on."""

from __future__ import annotations

import gc
import importlib
import random
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("lightning")

import lightning_cases as cases
import oom_cases
from guard_arguments import in_advanced

from vram_guard.errors import RecoveryFailedError
from vram_guard_lightning import VramGuard

pytestmark = pytest.mark.filterwarnings("ignore")
PL, INSTALLED = cases.NAMESPACE, cases.INSTALLED
BATCHES = 5
"""Loaded batches in an epoch of the loader below."""


def make_module(**settings: Any) -> Any:
    """State of every kind: BatchNorm, dropout, three random number generators, counters, lists, a buffer set anew."""

    class Stateful(importlib.import_module(PL).LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self, breaks: str = "", at: int = -1, capacity: int = 4, clip: float = 0.0) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.norm, self.last = nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16), nn.Linear(16, 2)
            self.drop = nn.Dropout(0.25)
            self.register_buffer("center", torch.zeros(6))
            self.breaks, self.at, self.capacity = breaks, at, capacity
            self.calls = 0
            self.losses: list[float] = []
            self.seen: list[int] = []
            self.rates: list[float] = []
            self.loaded = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.drop(torch.tanh(self.norm(self.first(x - self.center)))))

        def too_large(self, x: torch.Tensor, where: str) -> bool:
            return where == self.breaks and self.loaded - 1 >= self.at >= 0 and len(x) > self.capacity

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            if self.too_large(x, "start"):
                raise oom_cases.no_memory()
            self.calls += 1
            self.seen.append(len(x))
            self.center = 0.9 * self.center + 0.1 * x.mean(0)
            noise = random.random() + float(np.random.rand())
            prediction = self(x) + 0.01 * noise
            loss = nn.functional.mse_loss(prediction, y)
            self.log("train_loss", loss, on_step=True, on_epoch=True)
            self.log("count", float(len(x)), on_step=True, on_epoch=True, reduce_fx="sum")
            if self.too_large(x, "forward"):
                raise oom_cases.no_memory()
            self.losses.append(float(loss))
            if self.too_large(x, "backward"):  # the last layer has its gradients by then, the first has not
                hidden = oom_cases.breaks_in_backward(torch.tanh(self.norm(self.first(x - self.center))))
                loss = nn.functional.mse_loss(self.last(hidden), y)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            if self.breaks == "validation" and not self.trainer.sanity_checking:
                raise oom_cases.no_memory()
            self.log("val_loss", (self(x) - y).square().mean(), on_step=True, on_epoch=True)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.loaded += 1

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.rates.append(optimizer.param_groups[0]["lr"])

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
            scheduler = torch.optim.lr_scheduler.OneCycleLR(
                optimizer, max_lr=0.05, total_steps=self.trainer.estimated_stepping_batches
            )
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    return Stateful(**settings)


class Written(importlib.import_module(PL).Callback):  # type: ignore[misc]
    """Writes down what was logged."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.epochs: list[dict[str, float]] = []
        self.weights: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.weights.append(cases.weights(module).clone())
        self.steps.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        self.epochs.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def train(root: Any, module: Any, guard: Any = None, *, validate: bool = False, **how: Any) -> Any:
    """The module, the Trainer, what was logged, and the state of the random number generators at the end."""
    written, settings = Written(), {"max_epochs": 2, **how}
    trainer = cases.make_trainer(PL, root, [*([guard] if guard else []), written], **settings)
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    loaders = {"val_dataloaders": cases.loader(12, 12, shuffle=False)} if validate else {}
    trainer.fit(module, train_dataloaders=cases.loader(8 * BATCHES), **loaders)
    return module, trainer, written, (random.getstate(), str(np.random.get_state()), torch.get_rng_state())


def guard(**settings: Any) -> Any:
    return VramGuard(
        **in_advanced(
            {"budget": "64GiB", "allow": ("accumulate",), "remember": False, "loss_weight": "mean", **settings}
        )
    )


def assert_same_run(one: Any, other: Any) -> None:
    assert one[0].rates == other[0].rates
    assert one[0].loaded == other[0].loaded
    for name, value in other[0].state_dict().items():
        assert torch.equal(one[0].state_dict()[name], value), name
    assert one[0].calls == other[0].calls
    assert one[0].seen == other[0].seen
    assert one[0].losses == other[0].losses
    for mine, theirs in zip(one[2].steps + one[2].epochs, other[2].steps + other[2].epochs, strict=True):
        assert mine == theirs
    assert one[3][:2] == other[3][:2]
    assert torch.equal(one[3][2], other[3][2])
    assert one[1].global_step == other[1].global_step
    progress = [run[1].fit_loop.epoch_loop.automatic_optimization.optim_progress.state_dict() for run in (one, other)]
    assert progress[0] == progress[1]


# --- nothing happens ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "how", [{}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}], ids=["", "accumulating"]
)
def test_an_armed_training_without_errors_is_bit_identical(tmp_path: Any, how: Any) -> None:
    plain = train(tmp_path, make_module(), validate=True, **how)
    assert_same_run(train(tmp_path, make_module(), guard(), validate=True, **how), plain)


def test_the_trainer_is_given_back_as_it_was(tmp_path: Any) -> None:
    module = make_module(breaks="forward", at=1)
    _, trainer, _, _ = train(tmp_path, module, guard())
    strategy = trainer.strategy
    assert "setup" not in vars(strategy)
    assert "run" not in vars(trainer.fit_loop)
    assert "_make_closure" not in vars(trainer.fit_loop.epoch_loop.automatic_optimization)


# --- forward and backward -----------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_batch_runs_again_in_smaller_micro_batches(tmp_path: Any, where: str, at: int) -> None:
    """As where memory runs out before the batch changed anything, and as where every batch was cut from the start."""
    reference = train(tmp_path, make_module(breaks="start", at=at), guard())
    with pytest.warns(UserWarning, match=rf"out of memory in {where} of the batch after {at} optimizer steps"):
        recovered = train(tmp_path, make_module(breaks=where, at=at), guard())
    assert_same_run(recovered, reference)
    assert recovered[0].seen == [8] * at + [4] * 2 * (10 - at), "nothing lost, nothing repeated"
    if at == 0:
        assert_same_run(recovered, train(tmp_path, make_module(), guard(pin={"micro_batch_size": 4})))


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_gradient_scaler_goes_on(tmp_path: Any, where: str) -> None:
    def run(breaks: str) -> Any:
        made = importlib.import_module(f"{PL}.plugins.precision").MixedPrecision
        plugin = made("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3))
        return train(tmp_path, make_module(breaks=breaks, at=3), guard(), plugins=[plugin])

    recovered, reference = run(where), run("start")
    assert_same_run(recovered, reference)
    scalers = [run[1].precision_plugin.scaler.state_dict() for run in (recovered, reference)]
    assert scalers[0] == scalers[1]
    assert scalers[0]["scale"] > 1024.0


def test_batches_that_were_split_before(tmp_path: Any) -> None:
    recovered, reference = (
        train(tmp_path, make_module(breaks=where, at=3, capacity=2), guard(pin={"micro_batch_size": 4}))
        for where in ("backward", "start")
    )
    assert recovered[0].seen == [4] * 2 * 3 + [2] * 4 * 7
    assert_same_run(recovered, reference)


# --- the end of it ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_no_smaller_micro_batch_is_a_clear_error_with_the_weights_of_the_last_step(tmp_path: Any, where: str) -> None:
    module, reference = make_module(breaks=where, at=3, capacity=0), make_module()
    for one in (module, reference):
        one.norm = nn.Identity()  # a micro-batch of one sample has no variance
    _, _, written, _ = train(tmp_path, reference)
    with pytest.raises(RecoveryFailedError) as caught:
        train(tmp_path, module, guard())
    assert oom_cases.TEXT in str(caught.value)
    assert "What was predicted" in str(caught.value)
    assert torch.equal(cases.weights(module), written.weights[2])


@pytest.mark.parametrize("settings", [{"recover": False}, {"mode": "report"}])
def test_switched_off(tmp_path: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        train(tmp_path, make_module(breaks="forward", at=3), guard(**in_advanced(settings)))


def clip(*_: Any, **__: Any) -> None:
    raise oom_cases.no_memory()


@pytest.mark.parametrize(
    ("settings", "changed", "why"),
    [
        ({"allow": ("precision",)}, {"breaks": "forward", "at": 3}, "smaller micro-batches are not allowed"),
        ({}, {"breaks": "forward", "at": 3, "optimizer_zero_grad": lambda *_: None}, "on_before_zero_grad"),
        ({}, {"breaks": "validation"}, "outside a batch's forward and backward pass"),
        ({}, {"configure_gradient_clipping": clip}, "outside a batch's forward and backward pass"),
    ],
    ids=["not allowed", "a hook in the middle", "validation", "clipping"],
)
def test_what_is_not_repeated_ends_with_the_plan_to_use(tmp_path: Any, settings: Any, changed: Any, why: str) -> None:
    made = type(make_module())
    module = type("Changed", (made,), {name: one for name, one in changed.items() if callable(one)})(
        **{name: one for name, one in changed.items() if not callable(one)}
    )
    with pytest.raises(RecoveryFailedError, match=f"{why}[\\s\\S]*last checkpoint[\\s\\S]*budget=") as caught:
        train(tmp_path, module, guard(**settings), validate=True)
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


def test_batch_size_finder_gets_its_errors(tmp_path: Any) -> None:
    finder = importlib.import_module(f"{PL}.callbacks").BatchSizeFinder
    trainer = cases.make_trainer(PL, tmp_path, [guard(), finder(init_val=2)], max_steps=1)
    module = make_module(breaks="forward", at=0)
    module.batch_size = 2
    module.train_dataloader = module.val_dataloader = lambda: cases.loader(40, module.batch_size)
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.1)
    trainer.fit(module)
    assert module.batch_size == 4


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        ValueError("my own mistake"),
        MemoryError(),
    ],
    ids=["illegal access", "user", "host"],
)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_another_error_is_raised_as_it_is(tmp_path: Any, where: str, error: Exception) -> None:
    module = make_module()
    own = module.training_step

    def training_step(batch: Any, batch_idx: int) -> Any:
        loss = own(batch, batch_idx)
        if module.loaded != 3:  # nor while the step is predicted
            return loss
        if where == "forward":
            raise error
        return oom_cases.breaks_in_backward(loss, error)

    module.training_step = training_step
    with pytest.raises(type(error)) as caught:
        train(tmp_path, module, guard())
    assert caught.value is error
    assert "oom_cases" in str(caught.traceback[-1].path) or "test_lightning_recovery" in str(caught.traceback[-1].path)
    assert module.calls == 3, "it was not tried again"


def test_a_batch_that_cannot_be_split_is_a_clear_error(tmp_path: Any) -> None:
    module = make_module(breaks="forward", at=0, capacity=0)
    own = module.training_step
    module.training_step = lambda batch, batch_idx: own(batch["pair"], batch_idx)
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.1)
    trainer = cases.make_trainer(PL, tmp_path, [guard()], max_epochs=1)
    rows = [(torch.randn(8, 6), torch.randn(8, 2)) for _ in range(3)]
    data = torch.utils.data.DataLoader(
        rows, batch_size=None, collate_fn=lambda row: {"pair": row, "other": torch.zeros(5)}
    )
    with pytest.raises(RecoveryFailedError):
        trainer.fit(module, train_dataloaders=data)


class LetGo:
    """A callback that writes down how many of the tensors of earlier batches are still there when one begins."""

    def __new__(cls) -> Any:
        class Callback(importlib.import_module(PL).Callback):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                self.seen: list[weakref.ref[torch.Tensor]] = []
                self.left: list[int] = []

            def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
                self.left.append(sum(one() is not None for one in self.seen))
                self.seen += map(weakref.ref, batch)

        return Callback()


@pytest.mark.parametrize("settings", [{}, {"pin": {"micro_batch_size": 4}}, {"recover": False}])
def test_a_batch_is_gone_when_the_next_one_comes(settings: dict[str, Any], tmp_path: Any) -> None:
    """On the GPU, one that waits for Python's garbage collector would take memory that no plan counts."""
    watching = LetGo()
    guard = VramGuard(**in_advanced({"budget": "64GiB", "loss_weight": "mean", "remember": False, **settings}))
    trainer = cases.make_trainer(PL, tmp_path, [guard, watching], max_epochs=1)
    gc.collect()
    gc.disable()
    try:
        trainer.fit(make_module(), cases.loader())
    finally:
        gc.enable()
    assert watching.left == [0] * BATCHES
