"""One of two processes under FSDPStrategy or ModelParallelStrategy (gloo, CPU).

Run by test_lightning_layouts.py, once per rank.
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
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from lightning_ranks_script import Uneven
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import wrap
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from vram_guard.guard import evaluation
from vram_guard_lightning import VramGuard, _callback

RANK = int(os.environ["LOCAL_RANK"])
PROCESS = os.getpid()

as_written = FullyShardedDataParallel.__init__


def on_cpu(self: Any, *args: Any, **kwargs: Any) -> None:
    """FullyShardedDataParallel runs on the CPU where it is told to, and Lightning tells it the number of a GPU."""
    if kwargs.get("device_id") is None:
        kwargs["device_id"] = torch.device("cpu")
    as_written(self, *args, **kwargs)


FullyShardedDataParallel.__init__ = on_cpu  # type: ignore[method-assign]


class OnCpu(FSDPStrategy):
    """Lightning insists on GPUs for its own class, and on nothing for others."""


class Plain(pl.LightningModule):
    """A regression whose model the strategy alone divides."""

    def __init__(self, kind: str, *, breaks: bool = False, uneven: bool = False) -> None:
        super().__init__()
        self.kind, self.breaks, self.uneven = kind, breaks, uneven
        self.net = None if kind in ("meta", "wrapped") else cases.Chain()

    def train_dataloader(self) -> Any:
        if self.breaks and RANK == 1 and os.getpid() != PROCESS:  # the copy in which the guard looks at it
            raise RuntimeError("no such file on this machine")
        if self.uneven:
            return torch.utils.data.DataLoader(cases.Vectors(128), batch_sampler=Uneven())
        return torch.utils.data.DataLoader(cases.Vectors(128), batch_size=32)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        cases.noted(self).append(len(x))
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("loss", loss, batch_size=len(x))
        return loss

    def test_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(cases.Vectors(128), batch_size=32)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.net(batch[0])

    def configure_optimizers(self) -> Any:
        # On a GPU, lists of tensors of both kinds are an error of torch's. By itself, AdamW divides what rounding
        # leaves of a gradient of zero by its own size.
        foreach = False if self.kind == "tensor" else None
        return torch.optim.AdamW(self.parameters(), lr=0.001, eps=1e-4, foreach=foreach)


class Module(Plain):
    """A regression that divides its model itself, as its case says."""

    def configure_model(self) -> None:
        if self.kind == "wrapped":
            self.net = wrap(cases.Chain())
            return
        if self.kind == "meta":
            with torch.device("meta"):
                self.net = cases.Chain()
        if self.kind == "tensor":
            plan = {"wide": ColwiseParallel(), "narrow": RowwiseParallel()}
            for block in self.net.blocks:
                parallelize_module(block, self.device_mesh["tensor_parallel"], plan)
            return
        for block in self.net.blocks:
            fully_shard(block, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


def tested(trainer: Any, module: Any) -> dict[str, Any]:
    """The phases of a test of a module that no strategy has divided yet, as they are predicted."""
    predicted: list[Any] = []

    def foresee(*args: Any) -> Any:
        predicted.append(evaluation.foresee(*args))
        return predicted[-1]

    _callback.foresee = foresee
    trainer.test(module, verbose=False)
    (found,) = predicted
    return {} if found is None else {phase.name: phase.peak_allocated for phase in found.estimate.phases}


def strategy_of(kind: str) -> Any:
    how: dict[str, Any] = {"process_group_backend": "gloo", "timeout": timedelta(seconds=100)}
    if kind in ("fsdp", "wrapped"):
        return OnCpu(**how, **({"auto_wrap_policy": {cases.ChainBlock}} if kind == "fsdp" else {}))
    sizes = (1, 2) if kind == "tensor" else (2, 1)
    return ModelParallelStrategy(data_parallel_size=sizes[0], tensor_parallel_size=sizes[1], **how)


def main(case: str, out: Path) -> None:
    kind, *more = case.split("+")
    settings: dict[str, Any] = {"budget": "1GiB", "remember": False, "recover": False, "mode": "report"}
    if "split" in more:
        settings |= {"mode": "fit", "pin": {"micro_batch_size": 4 if "uneven" in more else 8}}
    if "checkpoint" in more:
        settings |= {"mode": "fit", "pin": {"checkpoint": 2}}
    if "dies" in more:
        settings["mode"] = "strict"
    if "poor" in more:  # one rank has less memory
        settings |= {"budget": "64GiB" if RANK == 0 else "1MiB"}
    callbacks = [VramGuard(**in_advanced(settings))] if "plain" not in more else []
    # On the CPU, torch's FullyShardedDataParallel dies of saving for real.
    saving = [pl.callbacks.ModelCheckpoint(out / case, every_n_epochs=5 if kind == "fsdp" else 1)]
    trainer = cases.make_trainer(
        "lightning.pytorch",
        out,
        [*callbacks, *(saving if "saved" in more else ())],
        enable_checkpointing="saved" in more,
        devices=2,
        strategy=strategy_of(kind),
        max_epochs=1,
        use_distributed_sampler="uneven" not in more,
    )
    module = (Plain if kind == "fsdp" else Module)(kind, breaks="dies" in more, uneven="uneven" in more)
    pl.seed_everything(7)
    result: dict[str, Any] = {}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            if "tested" in more:
                result["tested"] = tested(trainer, module)
            else:
                trainer.fit(module)
        except Exception as error:  # noqa: BLE001 - whatever it was, the test wants to know
            result["error"] = f"{type(error).__name__}: {error}"
    result["forwards"] = [len(cases.noted(one)) for one in module.modules() if type(one) is cases.ChainBlock]
    plan = callbacks[0].plan if callbacks else None
    result |= {
        "seen": list(cases.noted(module)),
        "said": [str(one.message) for one in said],
        "steps": trainer.global_step,
    }
    result["logged"] = {name: float(value) for name, value in trainer.callback_metrics.items()}
    if plan is not None:
        before = plan.before
        result |= {
            "splits": plan.splits,
            "checkpointed": list(plan.recipe.checkpoint),
            "usable": plan.budget.usable,
            "reserved": before.peak_reserved,
            "phases": {phase.name: phase.peak_allocated for phase in before.phases},
            "notes": [str(note) for note in before.notes],
            "breakdown": dict(before.breakdown),
        }
        if RANK == 0:  # which has planned for both
            layout = plan.timeline_before.parallel
            result["layout"] = {"gpus": layout.gpus, "tensor": layout.tensor}
            result["dimensions"] = sorted({one.dimension for one in plan.timeline_before.collectives})
    weights = {name: getattr(one.detach(), "_local_tensor", one.detach()) for name, one in module.named_parameters()}
    torch.save({name: value.clone() for name, value in weights.items()}, out / f"{case}-{RANK}.pt")
    (out / f"{case}-{RANK}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    for name in sys.argv[2:]:
        main(name, Path(sys.argv[1]))
    os._exit(0)  # a rank that stopped must not wait for the other one to leave
