"""One of two processes under DeepSpeedStrategy (gloo, CPU). Run by test_lightning_deepspeed.py, once per rank."""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import lightning_cases as cases
import torch
from guard_arguments import in_advanced
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from torch import nn

from vram_guard_lightning import VramGuard

RANK = int(os.environ["LOCAL_RANK"])
WIDTH = 128
SMALL = 20_000

# It would be compiled; where it is not there, torch's collectives are used.
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]


class OnCpu(DeepSpeedStrategy):
    """Lightning insists on GPUs, and DeepSpeed does not."""

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu", 0)

    def setup_environment(self) -> None:
        DDPStrategy.setup_environment(self)

    def setup_distributed(self) -> None:
        self.set_world_ranks()
        self._init_deepspeed_distributed()


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = cases.Chain(WIDTH)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(cases.Vectors(128), batch_size=16)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        cases.noted(self).append(len(x))
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("loss", loss, batch_size=len(x))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.001)


def weights_of(module: Module, stage: int) -> dict[str, torch.Tensor]:
    import deepspeed

    named = dict(module.named_parameters())
    with deepspeed.zero.GatheredParameters(list(named.values()), enabled=stage == 3):
        return {name: one.detach().float().clone() for name, one in named.items()}


def main(case: str, out: Path) -> None:
    stage, *more = case.split("+")
    settings: dict[str, Any] = {"budget": "1GiB", "remember": False, "mode": "fit"}
    if "split" in more:
        settings["pin"] = {"micro_batch_size": 4}
    if "checkpoint" in more:
        settings["pin"] = {"checkpoint": 2}
    if "tight" in more:
        settings |= {"budget": "23MiB", "margin": 0.0, "allow": ("offload_optimizer",)}
    callbacks = [VramGuard(**in_advanced(settings))] if "plain" not in more else []
    strategy = OnCpu(
        stage=int(stage),
        process_group_backend="gloo",
        allgather_bucket_size=SMALL,
        reduce_bucket_size=SMALL,
        overlap_comm=False,
        logging_level=logging.ERROR,
    )
    trainer = cases.make_trainer(
        "lightning.pytorch",
        out,
        callbacks,
        devices=2,
        strategy=strategy,
        max_epochs=1,
        gradient_clip_val=0.1,
        accumulate_grad_batches=2,
    )
    module, result = Module(), dict[str, Any]()
    config = dict(strategy.config or {})
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            trainer.fit(module)
        except Exception as error:  # noqa: BLE001 - whatever it was, the test wants to know
            result["error"] = f"{type(error).__name__}: {error}"
    plan = callbacks[0].plan if callbacks else None
    result |= {
        "seen": list(cases.noted(module)),
        "said": [str(one.message) for one in said],
        "steps": trainer.global_step,
    }
    result["forwards"] = [len(cases.noted(one)) for one in module.net.blocks]
    result["kept"] = (strategy.config or {}).get("zero_optimization") == config.get("zero_optimization")
    if plan is not None:
        sharding = plan.recipe.sharding
        result |= {
            "fits": plan.fits,
            "splits": plan.splits,
            "on_host": sharding is not None and sharding.states_on_host,
            "kind": plan.timeline_before.parallel.kind if RANK == 0 else None,  # it has planned for both
            "breakdown": dict(plan.before.breakdown),
            "reserved": [plan.before.peak_reserved, plan.estimate.peak_reserved],
        }
    torch.save(weights_of(module, int(stage)), out / f"{case}-{RANK}.pt")
    (out / f"{case}-{RANK}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    for name in sys.argv[2:]:
        main(name, Path(sys.argv[1]))
    os._exit(0)  # a rank that stopped must not wait for the other one to leave
