"""Loops that say what is still alive of the last iteration when a forward begins."""

import argparse
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from kept import Watch

WATCH = Watch()
ROWS, WIDTH = 8, 32


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs, labels):
        WATCH.begins()
        print("alive:", *(f"{name}={size}" for name, size in sorted(WATCH.alive[-1].items())))
        logits = self.layer(inputs)
        loss = F.cross_entropy(logits, labels)
        WATCH.made(batch=inputs, logits=logits, loss=loss)
        return {"loss": loss, "logits": logits}


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 6 * ROWS

    def __getitem__(self, index):
        return {"inputs": torch.ones(WIDTH), "labels": torch.tensor(index % WIDTH)}


def plain(accelerator, model, optimizer, loader):
    for batch in loader:
        outputs = model(**batch)
        loss = outputs["loss"]
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


def in_a_function(accelerator, model, optimizer, loader):
    def step(batch):
        outputs = model(**batch)
        accelerator.backward(outputs["loss"])
        optimizer.step()
        optimizer.zero_grad()

    for batch in loader:
        step(batch)


def loss_only(accelerator, model, optimizer, loader):
    for batch in loader:
        loss = model(**batch)["loss"]
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


def trainer(accumulate):
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir="never", report_to="none", disable_tqdm=True, per_device_train_batch_size=ROWS, max_steps=3,
        save_strategy="no", gradient_accumulation_steps=accumulate,
    )  # fmt: skip
    Trainer(model=Net(), args=arguments, train_dataset=Data()).train()


def copied_as_to_a_gpu():
    """Without a GPU a batch would stay the tensor that the loader made."""
    from accelerate import data_loader

    original = data_loader.send_to_device
    data_loader.send_to_device = lambda batch, *args, **kwargs: original(
        {name: tensor.clone() for name, tensor in batch.items()}, *args, **kwargs
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("loop")
    parser.add_argument("--real", action="store_true")
    arguments = parser.parse_args()
    if arguments.real:
        copied_as_to_a_gpu()
    if arguments.loop.startswith("trainer"):
        return trainer(2 if arguments.loop.endswith("twice") else 1)
    accelerator = Accelerator()
    model = Net()
    loader = torch.utils.data.DataLoader(Data(), batch_size=ROWS)
    prepared = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    return globals()[arguments.loop](accelerator, *prepared)


if __name__ == "__main__":
    main()
