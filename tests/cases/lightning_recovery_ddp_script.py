"""One of two processes under DDP (gloo, CPU), of which rank 1 runs out of memory, in one training after the other.

Run by test_lightning_recovery_ddp.py, once per rank.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import lightning_cases as cases
import oom_cases
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from vram_guard.apply.microbatch import Splitter
from vram_guard.errors import UnsupportedStepError
from vram_guard_lightning import VramGuard, _closure, _training

warnings.simplefilter("ignore")
AT = 2
"""The loaded batch that breaks, on rank 1 only; it ends the second of the optimizer steps where two accumulate."""


class Module(pl.LightningModule):
    """BatchNorm (whose buffers DDP shares), a parameter that stays unused, a logged value that waits for all ranks."""

    def __init__(self, case: str, rank: int, batches: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 32, bias=False), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 2))
        if case == "hopeless":
            self.net[1] = nn.Identity()  # a micro-batch of one sample has no variance
        self.case, self.batches, self.breaks = case, batches, rank == 1
        self.loaded, self.seen = 0, []
        self.rates: list[float] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.loaded += 1

    def on_train_start(self) -> None:
        self.trainer.optimizers[0].armed = self.case.startswith("step") and self.breaks

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        self.seen.append(len(x))
        breaks = self.breaks and self.loaded == AT + 1 and len(x) > 4
        if self.breaks and self.loaded == AT + 1 and self.case in ("user error", "hopeless"):
            raise ValueError("my own mistake") if self.case == "user error" else oom_cases.no_memory()
        hidden = self.net[:3](x)
        if breaks and self.case == "forward":
            raise oom_cases.no_memory()
        if breaks and self.case == "backward":
            hidden = oom_cases.breaks_in_backward(hidden)
        if self.case == "gather":  # waits for the other rank, after this one may have failed
            if breaks:
                raise oom_cases.no_memory()
            self.all_gather(hidden.detach().mean())
        loss = nn.functional.mse_loss(self.net[3](hidden), y)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        if self.case == "validation" and self.breaks and len(x) > 4:
            raise oom_cases.no_memory()
        self.log("val_loss", nn.functional.mse_loss(self.net(x), y), sync_dist=True)

    def configure_optimizers(self) -> Any:
        half_way = self.case == "step half-way"
        groups = [
            {"params": self.net[0].parameters()},
            {"params": [*self.net[1].parameters(), *self.net[3].parameters()]},
        ]
        settings = {"at": 1 if half_way else 0, "half_way": half_way}
        return oom_cases.BreakingAdamW(groups, lr=0.02, foreach=True, **settings)


class SplitsFrom(pl.Callback):
    """The undisturbed run: the same micro-batches from the same batch on, under Lightning's own DDP."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if module.loaded == AT:
            _closure.install(trainer, Splitter(8, 4))


def refuse(*_: Any) -> Any:
    raise UnsupportedStepError("the prediction is not what this is about")


def main(case: str, out: Path) -> None:
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    _training.capture = refuse
    kind, _, more = case.partition("+")
    callbacks: list[Any] = (
        []
        if kind == "plain"
        else [VramGuard(budget="64GiB", allow=("accumulate",), advanced={"remember": False}, loss_weight="mean")]
    )
    if kind == "split":
        callbacks = [SplitsFrom()]
    strategy = DDPStrategy(process_group_backend="gloo", timeout=timedelta(seconds=200))
    trainer = cases.make_trainer(
        "lightning.pytorch",
        out,
        callbacks,
        devices=2,
        strategy=strategy,
        max_epochs=2,
        accumulate_grad_batches=2 if more == "accumulating" else 1,
    )
    module = Module(kind, rank, 5)
    pl.seed_everything(7)
    result: dict[str, Any] = {}
    try:
        trainer.fit(module, cases.loader(80), cases.loader(32, shuffle=False))
    except Exception as error:  # noqa: BLE001 - whatever it was, the test wants to know
        result["error"] = f"{type(error).__name__}: {error}"
    result |= {"seen": module.seen, "rates": module.rates, "steps": trainer.global_step}
    result["logged"] = {name: float(value) for name, value in trainer.callback_metrics.items()}
    torch.save(module.state_dict(), out / f"{case}-{rank}.pt")
    (out / f"{case}-{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    for name in sys.argv[2:]:
        main(name, Path(sys.argv[1]))
    os._exit(0)  # a rank that stopped must not wait for the other one to leave
