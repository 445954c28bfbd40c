"""MMEngine's side: a small model under a Runner's config, and the driver."""

from __future__ import annotations

import itertools
import logging
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from guard_arguments import in_advanced
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.registry import DATASETS
from mmengine.runner import Runner
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import vram_guard_mmengine

from . import bridge, lightning
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
from .lightning import BLOCKS, FIELDS, BlockNet, Net, PureBlock, widen

CASES: list[Case] = []
_NUMBERS = itertools.count()


@DATASETS.register_module(force=True)
class FidelityRows(Dataset):  # type: ignore[type-arg]
    """Samples of the named fields, packed as ``inputs`` and ``data_samples``."""

    def __init__(self, names: tuple[str, ...] = ("x", "y"), samples: int = 29) -> None:
        self.fields = {name: FIELDS[name](samples) for name in names}
        self.names = names

    def __len__(self) -> int:
        return len(next(iter(self.fields.values())))

    def __getitem__(self, index: int) -> Any:
        first, *others = self.names
        return {
            "inputs": self.fields[first][index],
            "data_samples": {name: self.fields[name][index] for name in others},
        }


class Base(BaseModel):
    """Losses of a perceptron; a case overrides what it is about."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.effects: list[Any] = []

    def forward(self, inputs: torch.Tensor, data_samples: Any, mode: str = "loss") -> Any:
        return self.losses(inputs, data_samples)

    def losses(self, x: torch.Tensor, b: Any) -> dict[str, Any]:
        return {"loss": self.loss(self.net(x), b)}

    def loss(self, out: torch.Tensor, b: Any) -> torch.Tensor:
        return F.mse_loss(out, b["y"])


@dataclass
class Training:
    """A model and the parts of a config that are its own."""

    model: Any
    config: dict[str, Any] = field(default_factory=dict)
    effects: Callable[[], Any] = dict
    hooks: list[Any] = field(default_factory=list)
    dataset: Any = None


def case(name: str, *modes: str, **about: Any) -> Callable[[Any], Any]:
    def register(make: Any) -> Any:
        CASES.append(Case(name, make, (*(modes or (unchanged(name), MICRO)), SLICES), **about))
        return make

    return register


class Bridged(BaseModel):
    """Lightning's module as a part of a model."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.effects = module, module.effects

    def forward(self, inputs: Any, mode: str = "loss") -> Any:
        return {"loss": self.module.loss(inputs)}


class Tells(Hook):
    """What a case of Lightning's does after each batch."""

    def __init__(self, run: Any) -> None:
        self.run = run

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        bridge.told(self.run, data_batch["inputs"], batch_idx)


def of_lightning(case: Case) -> Case:
    """A case of Lightning's as one of MMEngine's."""

    def make() -> Training:
        run = bridge.parts(case)
        own = run.data.collate_fn
        run.data.collate_fn = lambda samples: {"inputs": own(samples)}
        return Training(Bridged(run.module), {"train_dataloader": run.data}, run.effects, [Tells(run)])

    # Hooks are played when it is planned: that the loss becomes another one is known then.
    played = {"says": "sqrt", "exact": False} if case.name == "later a list of the process" else {}
    return replace(case, make=make, **played)


class Recorder(Hook):
    """What hooks see: losses of iterations, rates, how often each was called."""

    priority = "LOWEST"

    def __init__(self) -> None:
        self.values: list[Any] = []
        self.counts = {"iter": 0, "epoch": 0}

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        self.counts["iter"] += 1
        shown = {name: value.detach().clone() for name, value in (outputs or {}).items() if torch.is_tensor(value)}
        self.values.append((batch_idx, shown, runner.optim_wrapper.get_lr()))

    def after_train_epoch(self, runner: Any) -> None:
        self.counts["epoch"] += 1


def guard(mode: str, about: Case, peak: int, *, recover: bool) -> Any:
    settings: dict[str, Any] = {
        REPORT: {"mode": "report"},
        FIT: {},
        MICRO: {"pin": {"micro_batch_size": about.micro}},
        CHECKPOINT: {"pin": {"checkpoint": "all"}},
        SLICES: {"budget": int(0.6 * peak) or "64GiB", "margin": 0.0, "allow": ["slices"]},
        TIGHT: {"budget": int(0.9 * peak), "margin": 0.0, "allow": ["accumulate", "checkpoint", "offload", "foreach"]},
    }[mode]
    return vram_guard_mmengine.VramGuardHook(
        **in_advanced({"budget": "64GiB", "remember": False, "recover": recover, **settings})
    )


class _Lines(logging.Handler):
    """MMEngine's guard speaks through the runner's logger."""

    def emit(self, record: logging.LogRecord) -> None:
        print(record.getMessage())


def train(about: Case, mode: str | None, *, heavy: bool = False, peak: int = 0) -> Outcome:
    """One training; mode None: without the guard."""
    outcome, recorder, watch = Outcome(), Recorder(), None
    seed()
    made = about.make()
    run = made if isinstance(made, Training) else Training(made)
    widen(run.model, heavy=heavy)
    loader = {
        "batch_size": 8,
        "num_workers": 0,
        "sampler": {"type": "DefaultSampler", "shuffle": True, "seed": 3},
        "collate_fn": {"type": "default_collate"},
        "dataset": {"type": "FidelityRows"},
    }
    config = {
        "train_cfg": {"by_epoch": True, "max_epochs": 1},
        "optim_wrapper": {"optimizer": {"type": "SGD", "lr": 0.05, "momentum": 0.9}},
        "default_hooks": {"logger": None, "checkpoint": None, "runtime_info": {"type": "RuntimeInfoHook"}},
        **run.config,
    }
    given = run.config.get("train_dataloader", {})
    config["train_dataloader"] = {**loader, **given} if isinstance(given, dict) else given
    with tempfile.TemporaryDirectory() as folder, listening(outcome):
        runner = Runner(
            model=run.model,
            work_dir=folder,
            experiment_name=f"fidelity_{next(_NUMBERS)}",
            log_level="INFO" if mode else "ERROR",
            randomness={"seed": 3},
            cfg=Config({name: value for name, value in config.items() if isinstance(value, (dict, list))}),
            **config,
        )
        runner.logger.handlers[:] = [_Lines()]
        runner.register_hook(recorder)
        for one in run.hooks:
            runner.register_hook(one)
        if mode:
            # By default here, a loss that becomes another one ends the training with an error of that name.
            watch = guard(mode, about, peak, recover=isinstance(run.model, Bridged))
            runner.register_hook(watch)
        try:
            runner.train()
        except Exception as error:
            if watch is None:
                raise
            said = refusal(error)
            if recorder.counts["iter"]:
                outcome.crash = said[0]
            else:
                outcome.words += said
        else:
            outcome.record = {
                "weights": {name: value.clone() for name, value in run.model.state_dict().items()},
                "optimizer": _state(runner.optim_wrapper),
                "values": recorder.values,
                "hooks": recorder.counts,
                "history": {
                    name: torch.tensor([float(value) for value in buffer.data[0]])
                    for name, buffer in runner.message_hub.log_scalars.items()
                    if name.startswith("train/") and "time" not in name and "memory" not in name
                },
                "steps": (runner.iter, runner.epoch),
                "generators": generator_states(),
                "effects": (run.model.effects, run.effects()),
            }
    runner.logger.handlers.clear()
    if watch is not None and watch.plan is not None:
        outcome.peak = watch.plan.before.peak_reserved
        outcome.applied = mode != REPORT and watch.plan.fits and watch.plan.changed and outcome.record is not None
    return outcome


def _state(wrapper: Any) -> Any:
    parts = wrapper.items() if hasattr(wrapper, "optim_wrappers") else [("", wrapper)]
    return {name: part.optimizer.state_dict() for name, part in parts}


def _control(net: Callable[[], nn.Module]) -> Case:
    def make() -> Base:
        model = Base()
        model.net = net()
        return model

    return Case("control", make)


SUITE = Suite("MMEngine", train, {CHECKPOINT: _control(lambda: BlockNet(PureBlock))}, _control(Net))
BRIDGED = Suite("MMEngine", train, {CHECKPOINT: of_lightning(BLOCKS)}, of_lightning(lightning.SUITE.control))
