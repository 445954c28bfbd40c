"""Lightning's side: a small module with one seam for each thing a case changes, and the driver."""

from __future__ import annotations

import collections
import logging
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from guard_arguments import in_advanced
from lightning.pytorch.loggers.logger import Logger
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from vram_guard_lightning import VramGuard

from .harness import (
    CHECKPOINT,
    FIT,
    MICRO,
    REPORT,
    SLICES,
    TIGHT,
    Case,
    Outcome,
    Suite,
    generator_states,
    listening,
    refusal,
    seed,
    unchanged,
)

SAMPLES, BATCH = 29, 8  # three whole batches and a short one
CASES: list[Case] = []
#: More of a Trainer's settings, for all trainings of this process.
MORE: dict[str, Any] = {}
#: Floats of a sample's intermediate results where a budget has to be worth something: 12 MiB for a batch of 8.
WIDE = 3 * 2**17

for name in ("lightning.pytorch", "pytorch_lightning", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)


# --- data ---------------------------------------------------------------------------------------------------


def drawn(number: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(number))


def whole(number: int, below: int, *shape: int) -> torch.Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(number))


class Rows(Dataset):  # type: ignore[type-arg]
    """Samples as dicts of the named fields."""

    def __init__(self, *names: str, samples: int = SAMPLES) -> None:
        self.fields = {name: FIELDS[name](samples) for name in names}

    def __len__(self) -> int:
        return len(next(iter(self.fields.values())))

    def __getitem__(self, index: int) -> Any:
        return {name: values[index] for name, values in self.fields.items()}


class Pairs(Rows):
    """Samples as (x, y)."""

    def __init__(self, samples: int = SAMPLES) -> None:
        super().__init__("x", "y", samples=samples)

    def __getitem__(self, index: int) -> Any:
        return self.fields["x"][index], self.fields["y"][index]


def _ignored(value: int) -> Callable[[int], torch.Tensor]:
    """Labels, of which the first of every four samples are ignored more often than the last."""

    def make(samples: int) -> torch.Tensor:
        labels = whole(5, 4, samples, 5)
        kept = whole(6, 4, samples, 5) <= (torch.arange(samples) % 4)[:, None]
        kept[:, 0] = True
        return torch.where(kept, labels, torch.full_like(labels, value))

    return make


def _few(value: int) -> Callable[[int], torch.Tensor]:
    def make(samples: int) -> torch.Tensor:
        labels = whole(5, 4, samples)
        labels[torch.arange(samples) % 5 < 2] = value
        return labels

    return make


FIELDS: dict[str, Callable[[int], torch.Tensor]] = {
    "x": lambda n: drawn(1, n, 6),
    "x2": lambda n: drawn(1, n, 6) + 0.1 * drawn(9, n, 6),
    "y": lambda n: drawn(1, n, 6) @ drawn(2, 6, 4),
    "label": lambda n: whole(3, 4, n),
    "tokens": lambda n: drawn(4, n, 5, 6),
    "token_255": _ignored(255),
    "token_0": _ignored(0),
    "token_-100": _ignored(-100),
    "label_255": _few(255),
    "label_-100": _few(-100),
    "mask": lambda n: _ignored(255)(n) != 255,
    "weight": lambda n: drawn(7, n).abs() + 0.1,
    "rank": lambda n: whole(8, 5, n).float(),
    "targets": lambda n: 1 + whole(8, 3, n, 2),
    "target_length": lambda n: 1 + (torch.arange(n) % 2),
}


def loader(dataset: Any = None, batch_size: int | None = BATCH, **options: Any) -> Any:
    return DataLoader(dataset if dataset is not None else Pairs(), batch_size=batch_size, **options)


# --- the module ---------------------------------------------------------------------------------------------


class Net(nn.Module):
    """A small perceptron; ``heavy`` adds wide intermediate results of every sample, which no parameter's size shows."""

    def __init__(self, width: int = 6, out: int = 4) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, 16), nn.Linear(16, out)
        self.heavy = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        if self.heavy:
            wide = hidden.flatten(1)[:, :1].mul(0.1).expand(-1, WIDE).mul(0.5)
            extra = wide.square().square().square().mean(1)
            hidden = hidden + extra.view(-1, *[1] * (hidden.ndim - 1))
        return self.last(hidden)


def widen(model: nn.Module, *, heavy: bool) -> None:
    """Make every such network heavy, or not; as no code that is looked at as a script's changes an attribute."""
    for part in model.modules():
        if isinstance(part, Net):
            vars(part)["heavy"] = heavy


class Base(pl.LightningModule):
    """Squared errors of a perceptron under SGD with momentum; a case overrides what it is about."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.effects: list[Any] = []

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return F.mse_loss(self.net(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05, momentum=0.9)


class BlockNet(Net):
    """With residual blocks, which are what is checkpointed."""

    def __init__(self, block: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block(16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        for block in self.blocks:
            hidden = block(hidden)
        return self.last(hidden)


@dataclass
class Training:
    """A module, what it is fitted to, and a Trainer's settings."""

    module: Any
    data: Any = None
    trainer: dict[str, Any] = field(default_factory=dict)
    callbacks: Iterable[Any] = ()
    effects: Callable[[], Any] = dict
    """What the training left behind outside of the module."""
    resume_after: int = 0
    """Steps after which it is stopped, saved and resumed from the checkpoint by a new Trainer."""


def case(name: str, *modes: str, **about: Any) -> Callable[[Callable[[], Any]], Any]:
    """Register a case: a module's class, or a function that makes a :class:`Training` (or a module)."""

    def register(make: Callable[[], Any]) -> Any:
        CASES.append(Case(name, make, (*(modes or (unchanged(name), MICRO)), SLICES), **about))
        return make

    return register


def of(module: Any) -> list[Case]:
    """The cases that a module of this package registers."""
    return [one for one in CASES if one.make.__module__ == module.__name__]


# --- the driver ---------------------------------------------------------------------------------------------


#: What trainings leave that name no folder.
FOLDER = tempfile.TemporaryDirectory()


class Log(Logger):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Any] = []

    name = version = "kept"  # type: ignore[assignment]
    save_dir = FOLDER.name  # type: ignore[assignment]

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        mine = {name: float(value) for name, value in metrics.items() if not name.startswith("vram_guard")}
        if mine:
            self.rows.append((step, mine))

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass


#: Called once for a batch, an optimizer step or an epoch, however the batch is cut.
HOOKS = (
    "on_train_start", "on_train_end", "on_train_epoch_start", "on_train_epoch_end", "on_train_batch_start",
    "on_train_batch_end", "on_before_optimizer_step", "on_validation_start", "on_validation_end",
)  # fmt: skip


class Recorder(pl.Callback):
    """Counts hooks, and keeps the values that callbacks see after each batch."""

    def __init__(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self.values: list[dict[str, float]] = []
        self.outputs: list[Any] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.counts["on_train_batch_end"] += 1
        self.values.append({name: float(value) for name, value in trainer.callback_metrics.items()})
        self.outputs.append({k: v for k, v in outputs.items() if k != "loss"} if isinstance(outputs, dict) else None)


def _counting(name: str) -> Any:
    def count(self: Recorder, *_: Any) -> None:
        self.counts[name] += 1

    return count


for name in set(HOOKS) - {"on_train_batch_end"}:
    setattr(Recorder, name, _counting(name))


def guard(mode: str, about: Case, peak: int) -> VramGuard:
    settings: dict[str, Any] = {
        REPORT: {"mode": "report"},
        FIT: {},
        MICRO: {"pin": {"micro_batch_size": about.micro}},
        CHECKPOINT: {"pin": {"checkpoint": "all"}},
        # Mixed precision is another training by intention, and always said.
        SLICES: {"budget": int(0.6 * peak) or "64GiB", "margin": 0.0, "allow": ("slices",)},
        TIGHT: {"budget": int(0.9 * peak), "margin": 0.0, "allow": ("accumulate", "checkpoint", "offload", "foreach")},
    }[mode]
    return VramGuard(**in_advanced({"budget": "64GiB", "remember": False, **settings}))


def train(about: Case, mode: str | None, *, heavy: bool = False, peak: int = 0) -> Outcome:
    """One training; mode None: without the guard."""
    outcome = Outcome()
    seed()
    made = about.make()
    run = made if isinstance(made, Training) else Training(made)
    widen(run.module, heavy=heavy)
    watch = guard(mode, about, peak) if mode else None
    recorder, log = Recorder(), Log()
    with listening(outcome):
        try:
            trainer = _fit(run, watch, recorder, log)
        except Exception as error:
            if watch is None:
                raise
            said = refusal(error)
            if recorder.counts["on_train_batch_start"]:  # too late: only words before training help
                outcome.crash = said[0]
            else:
                outcome.words += said
            return _told(outcome, watch)
    outcome.record = {
        "weights": {name: value.clone() for name, value in run.module.state_dict().items()},
        "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
        "schedulers": [_plain_state(config.scheduler.state_dict()) for config in trainer.lr_scheduler_configs],
        "hooks": dict(recorder.counts),
        "values": recorder.values,
        "outputs": recorder.outputs,
        "logged": log.rows,
        "steps": trainer.global_step,
        "generators": generator_states(),
        "effects": (getattr(run.module, "effects", None), run.effects()),
    }
    return _told(outcome, watch)


def _fit(run: Training, watch: VramGuard | None, recorder: Recorder, log: Log) -> Any:
    quiet: dict[str, Any] = {
        "accelerator": "cpu", "devices": 1, "max_epochs": 1, "enable_checkpointing": False, "num_sanity_val_steps": 0,
        "enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 1, "logger": log,
        **MORE,
    }  # fmt: skip
    guards = [watch] if watch else []
    data = run.data if run.data is not None else loader()
    if not isinstance(data, pl.LightningDataModule):
        data = {"train_dataloaders": data} if not (isinstance(data, dict) and "train_dataloaders" in data) else data
    else:
        data = {"datamodule": data}
    if not run.resume_after:
        trainer = pl.Trainer(**quiet | run.trainer, callbacks=[*guards, *run.callbacks, recorder])
        seed()
        trainer.fit(run.module, **data)
        return trainer
    with tempfile.TemporaryDirectory() as folder:
        first = pl.Trainer(**quiet | run.trainer | {"max_steps": run.resume_after}, callbacks=[*guards, *run.callbacks])
        seed()
        first.fit(run.module, **data)
        first.save_checkpoint(f"{folder}/half.ckpt")
        trainer = pl.Trainer(**quiet | run.trainer, callbacks=[*guards, *run.callbacks, recorder])
        trainer.fit(run.module, **data, ckpt_path=f"{folder}/half.ckpt")
    return trainer


def _plain_state(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if not callable(value) and name != "lr_lambdas"}


def _told(outcome: Outcome, watch: VramGuard | None) -> Outcome:
    if watch is not None and watch.plan is not None:
        plan = watch.plan
        outcome.peak = plan.before.peak_reserved
        outcome.applied = watch.settings.mode == "fit" and plan.fits and plan.changed and outcome.record is not None
    return outcome


class PureBlock(nn.Module):
    """A residual block without state."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(self.change(x))

    def change(self, x: torch.Tensor) -> torch.Tensor:
        return x


def _control(net: Callable[[], nn.Module]) -> Case:
    def make() -> Base:
        module = Base()
        module.net = net()
        return module

    return Case("control", make)


BLOCKS = _control(lambda: BlockNet(PureBlock))
SUITE = Suite("Lightning", train, {CHECKPOINT: BLOCKS}, _control(Net))
