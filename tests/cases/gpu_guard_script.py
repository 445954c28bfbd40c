"""One Lightning training on a device, with or without the guard; prints what the test compares, as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from lightning import pytorch as lightning
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from vram_guard_lightning import VramGuard

WIDTH, BATCH = 1024, 4096


class Deep(lightning.LightningModule):
    """Activations take far more than weights: 16 MiB a layer and tensor at a batch of 4096."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(16)))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return F.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(accelerator: str, guard: VramGuard | None) -> Deep:
    torch.manual_seed(0)
    module = Deep()
    data = TensorDataset(torch.randn(2 * BATCH, WIDTH), torch.randn(2 * BATCH, WIDTH))
    lightning.Trainer(
        accelerator=accelerator,
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[] if guard is None else [guard],
    ).fit(module, DataLoader(data, batch_size=BATCH))
    return module


def main(accelerator: str, case: str) -> None:
    on_gpu = accelerator == "gpu"
    if on_gpu:
        torch.cuda.init()
        torch.ones(1, device="cuda")
    guard = None
    if case in ("planned", "second_fit"):
        guard = VramGuard(budget="640MiB", allow="accumulate", advanced={"remember": False})
    if case == "out_of_memory":
        # The guard believes in far more than the process may take, so that the first step fails for real.
        guard = VramGuard(budget="64GiB", mode="fit", allow="accumulate", advanced={"remember": False})
        if on_gpu:
            torch.cuda.set_per_process_memory_fraction(640 * 2**20 / torch.cuda.mem_get_info()[1])
    if case == "second_fit":
        fit(accelerator, None)
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    module = fit(accelerator, guard)
    plan = None if guard is None else guard.plan
    weights = torch.cat([p.detach().cpu().double().flatten() for p in module.parameters()])
    print(
        json.dumps(
            {
                "norm": float(weights.norm()),
                "probe": weights[:: len(weights) // 64].tolist(),
                "allocated": torch.cuda.max_memory_allocated() if on_gpu else None,
                "reserved": torch.cuda.max_memory_reserved() if on_gpu else None,
                "predicted": None if plan is None else plan.estimate.peak_reserved,
                "predicted_allocated": None if plan is None else plan.estimate.peak_allocated,
                "changed": plan is not None and plan.accumulate > 1,
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
