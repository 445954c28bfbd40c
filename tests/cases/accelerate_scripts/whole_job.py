"""Scripts that do more than training: an evaluation that takes most, outputs that are collected, saving; by name."""

import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    HfArgumentParser,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

#: Samples of a batch of an evaluation.
EVALUATED = 128


class Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield torch.randn(64), torch.tensor(0)


def plain(options):
    """Evaluates after each epoch with larger batches, and keeps all logits on the GPU."""
    accelerator = Accelerator()
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 512))
    optimizer = torch.optim.SGD(model.parameters()) if options.sgd else torch.optim.AdamW(model.parameters())
    rows = TensorDataset(torch.randn(64, 64), torch.randint(0, 512, (64,)))
    held_out = TensorDataset(torch.randn(options.held_out, 64), torch.randint(0, 512, (options.held_out,)))
    loader = DataLoader(rows, batch_size=8)
    evaluation = DataLoader(Endless() if options.endless else held_out, batch_size=EVALUATED)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if options.over_training:
        evaluation = loader
    if options.prepared:
        evaluation = accelerator.prepare(evaluation)
    if options.resume:
        accelerator.load_state(options.resume, **({"map_location": "on_device"} if options.on_device else {}))
    kept = []
    for epoch in range(options.epochs):
        model.train()
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if options.leaks:
                kept.append(loss)
        model.eval()
        logits = []
        with torch.set_grad_enabled(options.over_training == "batch by batch"):
            for x, _y in () if options.samples else evaluation:
                with torch.no_grad():
                    logits.append(model(x.to(accelerator.device)))
        correct = torch.cat(logits).argmax(-1) if logits else None
        if options.samples:  # made from nothing, as pictures of a diffusion model are
            with torch.no_grad():
                model(torch.zeros(100_000, 64, device=accelerator.device))
        if options.fails:
            raise RuntimeError("the metric is broken")
        del logits, correct
        accelerator.save_state(f"checkpoints/{epoch}")
    if options.finally_:
        with torch.no_grad():
            model(torch.zeros(options.finally_, 64, device=accelerator.device))


def counted(options):
    """Calls ``next`` a fixed number of times, in an evaluation before the training and in the training."""
    accelerator = Accelerator()
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 512))
    optimizer = torch.optim.AdamW(model.parameters())
    rows = TensorDataset(torch.randn(64, 64), torch.randint(0, 512, (64,)))
    held_out = TensorDataset(torch.randn(options.held_out, 64), torch.randint(0, 512, (options.held_out,)))
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=8, shuffle=True))
    evaluation = DataLoader(held_out, batch_size=EVALUATED)
    if options.prepared:
        evaluation = accelerator.prepare(evaluation)

    def evaluated():
        model.eval()
        batches, logits = iter(evaluation), []
        with torch.no_grad():
            for _ in range(options.rounds):
                x, _y = next(batches)
                logits.append(model(x.to(accelerator.device)))
        model.train()
        return torch.cat(logits).argmax(-1)

    evaluated()
    for epoch in range(3):
        batches = iter(loader)
        for _update in range(len(loader) // 2):
            for x, y in [next(batches) for _ in range(2)]:
                accelerator.backward(nn.functional.cross_entropy(model(x), y) / 2)
            optimizer.step()
            optimizer.zero_grad()
        evaluated()
        accelerator.save_state(f"checkpoints/{epoch}")


def generation(options):
    """Writes on after its epoch, token by token, with a cache that grows."""
    accelerator = Accelerator()
    model = gpt2()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    tokens = torch.randint(2, 512, (16, 8))
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(tokens, batch_size=4))
    prompts = DataLoader(torch.randint(2, 512, (512, 8)), batch_size=256)
    for _epoch in range(2):
        model.train()
        for batch in loader:
            accelerator.backward(model(batch, labels=batch).loss)
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        for prompt in prompts:
            on_device = prompt.to(accelerator.device)
            accelerator.unwrap_model(model).generate(on_device, max_new_tokens=options.new_tokens, do_sample=False)


def gpt2():
    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=2,
            n_embd=128,
            n_head=4,
            vocab_size=512,
            n_positions=256,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=1,
        )
    )


def translation(options):
    """Transformers' Seq2SeqTrainer, which generates when it evaluates."""
    (training,) = HfArgumentParser(Seq2SeqTrainingArguments).parse_args_into_dataclasses(options.rest)
    sizes = {"d_model": 128, "d_kv": 32, "d_ff": 256, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
    special = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    model = T5ForConditionalGeneration(T5Config(vocab_size=512, **sizes, **special))

    def data(count):
        tokens = torch.randint(2, 512, (count, 8))
        return [{"input_ids": row, "labels": row.clone()} for row in tokens]

    metrics = {"compute_metrics": lambda found: {"mean": float(found.predictions.mean())}}
    Seq2SeqTrainer(model=model, args=training, train_dataset=data(16), eval_dataset=data(512), **metrics).train()


def trainer(options):
    """Transformers' Trainer, whose evaluation keeps the logits of all batches on the GPU."""
    (training,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(options.rest)
    config = GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=1024, n_positions=64, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)

    def data(count):
        tokens = torch.randint(0, 1024, (count, 64))
        return [{"input_ids": row, "labels": row.clone()} for row in tokens]

    made = Trainer(
        model=model,
        args=training,
        train_dataset=data(40),
        eval_dataset=data(options.held_out),
        compute_metrics=lambda found: {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())},
    )
    if options.first:
        made.evaluate()
    made.train()
    made.save_model("finished")


parser = argparse.ArgumentParser()
parser.add_argument("loop", choices=["plain", "counted", "generation", "translation", "trainer"])
parser.add_argument("--held_out", type=int, default=512)
parser.add_argument("--rounds", type=int, default=4)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--prepared", action="store_true")
parser.add_argument("--resume")
parser.add_argument("--on_device", action="store_true")
parser.add_argument("--sgd", action="store_true")
parser.add_argument("--new_tokens", type=int, default=64)
parser.add_argument("--samples", action="store_true")
parser.add_argument("--leaks", action="store_true")
parser.add_argument("--fails", action="store_true")
parser.add_argument("--endless", action="store_true", help="the evaluation's loader never ends")
parser.add_argument("--over_training", default="", help="the evaluation takes the training's loader")
parser.add_argument("--first", action="store_true", help="an evaluation comes before the training")
parser.add_argument("--finally", dest="finally_", type=int, default=0, help="rows of a test after the last epoch")
options, options.rest = parser.parse_known_args()
globals()[options.loop](options)
