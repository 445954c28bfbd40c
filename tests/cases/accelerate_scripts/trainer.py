"""A script over Transformers' Trainer, its arguments read by HfArgumentParser, or from a file of settings."""

import os
import sys
from dataclasses import dataclass

import torch
from gloo import take_for_gpus, zero_of
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    HfArgumentParser,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)


@dataclass
class Own:
    out: str = ""
    samples: int = 40


class Rates(TrainerCallback):
    def __init__(self):
        self.rates = []

    def on_step_end(self, args, state, control, lr_scheduler=None, **kwargs):
        self.rates.append(lr_scheduler.get_last_lr()[0])


def main():
    take_for_gpus()
    parser = HfArgumentParser((Own, TrainingArguments))
    if len(sys.argv) == 2 and sys.argv[1].endswith(".json"):
        own, training = parser.parse_json_file(sys.argv[1])
    else:
        own, training = parser.parse_args_into_dataclasses()
    set_seed(0)
    config = GPT2Config(
        n_layer=4, n_embd=32, n_head=2, vocab_size=64, n_positions=256, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, attn_pdrop=0.0, embd_pdrop=0.0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    tokens = torch.randint(0, 64, (own.samples, 256), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row.clone()} for row in tokens]
    rates = Rates()
    trainer = Trainer(model=model, args=training, train_dataset=data, callbacks=[rates])
    trainer.train()
    divided = trainer.is_deepspeed_enabled and "LOCAL_RANK" in os.environ
    whole = trainer.accelerator.get_state_dict(trainer.model_wrapped) if divided else trainer.model.state_dict()
    weights = {name: value.detach().clone() for name, value in (whole or {}).items()}  # the first process has all
    found = {"processes": trainer.accelerator.num_processes, "precision": trainer.accelerator.mixed_precision}
    found["forwards"] = [type(block.forward).__name__ for block in trainer.model.transformer.h]
    found["zero"] = zero_of(trainer.accelerator)
    if trainer.accelerator.is_main_process:
        torch.save({**found, "weights": [weights], "rates": rates.rates, "steps": trainer.state.global_step}, own.out)


if __name__ == "__main__":
    main()
