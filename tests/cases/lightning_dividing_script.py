"""One of two processes whose training is divided otherwise than as written (gloo, CPU).

Run by test_lightning_dividing.py, once per rank. Each case trains as written, which tells what it takes, and then with
a little less memory.
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
import torch
from guard_arguments import in_advanced
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from lightning_sharded_script import RANK, OnCpu
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard

from vram_guard_lightning import VramGuard

WIDTH = 512
pinned = CPUOffloadPolicy.__init__
CPUOffloadPolicy.__init__ = lambda self, **_: pinned(self, pin_memory=False)  # type: ignore[method-assign] # no GPU


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cases.noted(self).append(len(x))
        return x + self.norm(self.narrow(torch.relu(self.wide(x))))


class Module(pl.LightningModule):
    def __init__(self, *, kept: bool = False) -> None:
        super().__init__()
        self.kept = kept
        torch.manual_seed(3 + RANK)  # under DDP rank 0's weights count
        self.first, self.last = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 2)
        self.blocks = nn.ModuleList(Block() for _ in range(5))

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(cases.Vectors(128), batch_size=32)

    def val_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(cases.Vectors(32), batch_size=16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = nn.functional.mse_loss(self(x), y)
        self.log("loss", loss, batch_size=len(x))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val", nn.functional.mse_loss(self(x), y), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.001, momentum=0.9)


class Net(Module):
    """Divides itself."""

    def configure_model(self) -> None:
        torch.manual_seed(3)
        for block in self.blocks:
            fully_shard(block, mesh=self.device_mesh["data_parallel"], reshard_after_forward=not self.kept)
        fully_shard(self, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return nn.functional.mse_loss(self(x), y)


def trained(case: str, out: Path, settings: dict[str, Any], **more: Any) -> tuple[Any, Any, Any]:
    kind = case.partition("+")[0]
    how: dict[str, Any] = {"process_group_backend": "gloo", "timeout": timedelta(seconds=100)}
    strategy: Any
    if kind.startswith("fsdp1"):
        kept = "SHARD_GRAD_OP" if kind.endswith("kept") else "FULL_SHARD"
        strategy = OnCpu(**how, auto_wrap_policy={Block}, sharding_strategy=kept)
    elif kind.startswith("fsdp2"):
        strategy = ModelParallelStrategy(2, 1, save_distributed_checkpoint=False, **how)
    else:
        strategy = DDPStrategy(**how)
    guard = VramGuard(**in_advanced({"remember": False, "margin": 0, **settings}))
    saves = ModelCheckpoint(
        out / case / ("more" if more else str(settings["mode"])), save_last=True, every_n_train_steps=2
    )
    trainer = cases.make_trainer(
        "lightning.pytorch", out, [guard, *([saves] if kind == "ddp" else [])], devices=2, strategy=strategy,
        enable_checkpointing=kind == "ddp",
        gradient_clip_val=0.5 if kind != "fsdp1" and "clip" in case else None, **{"max_epochs": 2, **more},
    )  # fmt: skip
    module = (Net if kind.startswith("fsdp2") else Module)(kept=kind.endswith("kept"))
    pl.seed_everything(7)
    return guard, trainer, module


RESUMED = (("resumed-report", "fit"), ("resumed-fit", "report"))


def main(case: str, out: Path) -> None:
    _kind, allow, *more = case.split("+")
    result: dict[str, Any] = {"said": []}
    kept: dict[str, dict[str, torch.Tensor]] = {}
    budget: Any = "8GiB"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        # Each way goes on from what the other one has saved.
        for way, other in (("report", ""), ("fit", ""), *(RESUMED if case == "ddp+shard" else ())):
            mode = way.removeprefix("resumed-")
            settings = {"mode": mode, "budget": budget, "allow": allow.split(",")}
            if "checkpoint" in allow and way == "fit":  # of this step the peak is elsewhere
                settings["pin"] = {"checkpoint": 2}
            guard, trainer, module = trained(case, out, settings, **({"max_epochs": 3} if other else {}))
            try:
                trainer.fit(module, ckpt_path=out / case / other / "last.ckpt" if other else None)
            except Exception as error:
                raise AssertionError([str(one.message) for one in said]) from error
            result["said"] += [str(one.message) for one in said]
            plan = guard.plan
            assert plan is not None, result["said"]
            budget = int(plan.before.peak_reserved * float((more or ["1"])[0])) - 1
            for part in module.modules():
                if isinstance(part, FSDPModule):
                    part.reshard()
            weights = {name: one.detach() for name, one in (*module.named_parameters(), *module.named_buffers())}
            weights = {name: getattr(one, "_local_tensor", one).clone() for name, one in weights.items()}
            kept[way] = weights
            result[way] = {
                "peak": plan.peak, "before": plan.before.peak_reserved, "fits": plan.fits, "steps": trainer.global_step,
                "changes": [list(one) for one in plan.changes()],
                "logged": {name: float(value) for name, value in trainer.callback_metrics.items()},
                "states": plan.estimate.breakdown.get("optimizer_states", 0),
                "forwards": [len(cases.noted(one)) for one in module.modules() if type(one).__name__.endswith("Block")],
                "kinds": sorted({type(one).__name__ for one in module.parameters()}),
            }  # fmt: skip
    torch.save(kept, out / f"{case}-{RANK}.pt")
    (out / f"{case}-{RANK}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    for name in sys.argv[2:]:
        main(name, Path(sys.argv[1]))
    os._exit(0)  # a rank that stopped must not wait for the other one to leave
