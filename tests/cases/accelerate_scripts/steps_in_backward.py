"""An optimizer for each weight, stepped from a hook in the backward pass; or, told "usual", one after it.

Told "alone", the loop steps no other optimizer; told "earlier", hooks are there before the model is on the GPU.
"""

import sys

import torch
from torch import nn

how = sys.argv[1].split("_")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WIDTH, LAYERS = 512, 8


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))

    def forward(self, inputs, labels):
        return {"loss": (self.layers(inputs) - labels).square().mean()}


def stepping(model):
    each = {weight: torch.optim.AdamW([weight], foreach=False) for weight in model.parameters()}

    def hook(weight):
        each[weight].step()
        each[weight].zero_grad()

    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(hook)


class Nothing(torch.optim.Optimizer):
    """What a loop steps once the hooks have done all."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure=None):
        pass


model = Model()
samples = [{"inputs": torch.ones(WIDTH), "labels": torch.zeros(WIDTH)} for _ in range(64)]


def optimizer():
    if "usual" in how:
        return torch.optim.AdamW(model.parameters(), foreach=False)
    stepping(model)
    return Nothing(model.parameters())


if "trainer" in how:
    from transformers import Trainer, TrainingArguments

    class Layerwise(Trainer):
        def create_optimizer(self, *_):
            self.optimizer = optimizer()
            return self.optimizer

    arguments = TrainingArguments(
        sys.argv[2], per_device_train_batch_size=8, num_train_epochs=1, report_to="none", save_strategy="no",
        disable_tqdm=True, max_grad_norm=0.0,
    )  # fmt: skip
    Layerwise(model, arguments, train_dataset=samples).train()
else:
    if "earlier" in how:
        steps = optimizer()
    model.to(DEVICE)
    if "alone" in how:
        stepping(model)
    elif "earlier" not in how:
        steps = optimizer()
    for batch in torch.utils.data.DataLoader(samples, batch_size=8):
        model(**{name: value.to(DEVICE) for name, value in batch.items()})["loss"].backward()
        if "alone" in how:
            continue
        steps.step()
        steps.zero_grad()
