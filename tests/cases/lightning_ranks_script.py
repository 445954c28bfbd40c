"""One of two processes under DDP (gloo, CPU) whose batches differ in size, or whose step talks to the other one.

Run by test_lightning_ranks.py, once per rank.
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
import torch.distributed._functional_collectives as funcol
from guard_arguments import in_advanced
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from vram_guard_lightning import VramGuard

RANK = int(os.environ["LOCAL_RANK"])


class Uneven(torch.utils.data.Sampler):  # type: ignore[type-arg]
    """Full batches of eight samples on rank 0; shorter ones on rank 1, which differ."""

    batch_size = 8
    sizes = ((8, 8, 8, 8), (3, 4, 8, 1))[RANK]

    def __iter__(self) -> Any:
        for number, size in enumerate(self.sizes):
            yield list(range(number * 8, number * 8 + size))

    def __len__(self) -> int:
        return len(self.sizes)


class Module(pl.LightningModule):
    """A regression whose step does what its case asks for."""

    def __init__(self, kind: str, *, breaks: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 2))
        if kind == "norm":
            self.net.insert(1, nn.BatchNorm1d(32))
        self.kind, self.breaks = kind, breaks
        self.seen: list[int] = []
        self.steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        self.seen.append(len(x))
        self.steps += 1
        if self.breaks and RANK == 1 and self.steps == 3 and len(x) > 2:
            raise oom_cases.no_memory()
        loss = nn.functional.mse_loss(self.net(x), y)
        if self.kind.startswith("own"):
            largest = loss.detach().clone()
            torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX)
        if self.kind == "functional":
            funcol.all_reduce(loss.detach(), "max", torch.distributed.group.WORLD)
        if self.kind == "gather":
            self.all_gather(loss.detach())
        if self.kind == "seldom" and batch_idx == 2:  # the trace sees the first two batches
            torch.distributed.barrier()
        if self.kind.startswith("late") and batch_idx == 3:  # of eight samples here, and of one there
            if self.kind == "latefunctional":
                funcol.all_reduce(loss.detach(), "max", torch.distributed.group.WORLD)
            else:
                torch.distributed.barrier()
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True, batch_size=len(x))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def main(case: str, out: Path) -> None:
    kind, _, more = case.partition("+")
    settings: dict[str, Any] = {
        "budget": "64GiB",
        "remember": False,
        "loss_weight": "mean",
        "recover": "recover" in more,
    }
    if "split" in more:
        settings["pin"] = {"micro_batch_size": 4}
    callbacks = [VramGuard(**in_advanced(settings))] if "plain" not in more else []
    strategy = DDPStrategy(process_group_backend="gloo", timeout=timedelta(seconds=100), static_graph="static" in more)
    trainer = cases.make_trainer(
        "lightning.pytorch",
        out,
        callbacks,
        devices=2,
        strategy=strategy,
        use_distributed_sampler=False,
        sync_batchnorm=kind == "norm",
        max_epochs=2,
    )
    module = Module(kind, breaks="breaks" in more)
    pl.seed_everything(7)
    result: dict[str, Any] = {}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        loader = torch.utils.data.DataLoader(cases.Vectors(40), batch_sampler=Uneven())
        try:
            trainer.fit(module, loader)
        except Exception as error:
            if "breaks" in more:
                raise
            result["error"] = f"{type(error).__name__}: {error}"
    guard: Any = callbacks[0] if callbacks else None
    result |= {
        "seen": module.seen,
        "steps": trainer.global_step,
        "said": [str(one.message) for one in said],
    }
    result["splits"] = guard.plan.splits if guard is not None and guard.plan is not None else 0
    result["logged"] = {name: float(value) for name, value in trainer.callback_metrics.items()}
    torch.save(module.state_dict(), out / f"{case}-{RANK}.pt")
    (out / f"{case}-{RANK}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    for name in sys.argv[2:]:
        main(name, Path(sys.argv[1]))
    os._exit(0)  # a rank that stopped must not wait for the other one to leave
