"""GPT-2 small in float32 with Lightning, 16 sequences of 512 words; prints what was predicted and reached, as JSON.

python lightning_gpt2.py BUDGET
"""

from __future__ import annotations

import json
import sys
from typing import Any

import lightning
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.gpu.guarded.words import Words
from vram_guard_lightning import VramGuard


class Gpt2(lightning.LightningModule):
    """The model with its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = GPT2LMHeadModel(GPT2Config(use_cache=False))

    def training_step(self, batch: dict[str, torch.Tensor], _number: int) -> Any:
        return self.net(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-4)


def main(budget: str) -> None:
    """Train for five optimizer steps."""
    torch.manual_seed(0)
    guard = VramGuard(budget=budget, remember=False)
    trainer = lightning.Trainer(
        max_steps=5,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[guard],
    )
    trainer.fit(Gpt2(), torch.utils.data.DataLoader(Words(80), batch_size=16))
    assert guard.plan is not None
    found = guard.plan.estimate
    print(
        json.dumps(
            {
                "predicted": [found.peak_allocated, found.peak_reserved],
                "measured": [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()],
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
