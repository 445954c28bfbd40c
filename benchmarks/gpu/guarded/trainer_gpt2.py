"""GPT-2 small in float32 with transformers' Trainer, 16 sequences of 512 words; prints what was reached, as JSON.

Knows nothing of any guard: it is launched under one.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks.gpu.guarded.words import Words


def main() -> None:
    """Train for five optimizer steps."""
    torch.manual_seed(0)
    arguments = TrainingArguments(
        os.environ.get("OUTPUT", "trainer-out"),
        per_device_train_batch_size=16,
        max_steps=5,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = Trainer(GPT2LMHeadModel(GPT2Config()), arguments, train_dataset=Words(512))
    trainer.train()
    print(json.dumps({"measured": [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]}))


if __name__ == "__main__":
    main()
