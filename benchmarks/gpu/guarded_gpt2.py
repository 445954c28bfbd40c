"""GPT-2 small in float32, 16 sequences of 512 random words; prints what was predicted and reached, as JSON.

    python guarded_gpt2.py trainer
    python guarded_gpt2.py lightning BUDGET

With transformers' Trainer the script knows nothing of any guard: it is launched under one.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

LENGTH, VOCABULARY = 512, 50_257


class Words(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences of random words, the same in every run, each with itself as its labels."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def trainer() -> dict[str, Any]:
    """Train for five optimizer steps with transformers' Trainer."""
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        "trainer-out",
        per_device_train_batch_size=16,
        max_steps=5,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    Trainer(GPT2LMHeadModel(GPT2Config()), arguments, train_dataset=Words(512)).train()
    return {}


def lightning(budget: str) -> dict[str, Any]:
    """The same with Lightning and the callback."""
    from lightning import LightningModule, Trainer

    from vram_guard_lightning import VramGuard

    class Gpt2(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = GPT2LMHeadModel(GPT2Config(use_cache=False))

        def training_step(self, batch: dict[str, torch.Tensor], _number: int) -> Any:
            return self.net(**batch).loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), 1e-4)

    guard = VramGuard(budget=budget, advanced={"remember": False})
    names = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    quiet: Any = dict.fromkeys(names, False)
    Trainer(max_steps=5, callbacks=[guard], **quiet).fit(Gpt2(), torch.utils.data.DataLoader(Words(80), batch_size=16))
    assert guard.plan is not None
    return {"predicted": [guard.plan.estimate.peak_allocated, guard.plan.estimate.peak_reserved]}


if __name__ == "__main__":
    torch.manual_seed(0)
    found = {"trainer": trainer, "lightning": lightning}[sys.argv[1]](*sys.argv[2:])
    measured = [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]
    print(json.dumps({**found, "measured": measured}))
