"""A training without Accelerate, with the habits of scripts that people have: ``own_loop.py HABIT WEIGHTS [options]``."""

import argparse
import contextlib
import math

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("habit")
parser.add_argument("weights")
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--accumulation-steps", type=int, default=1)
args = parser.parse_args()

if args.habit == "accelerator":
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
else:
    device = torch.device("cuda" if torch.cuda.is_available() and args.habit != "cpu" else "cpu")
print("device:", device.type)
torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(64, 2048), nn.Linear(2048, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(torch.nn.functional.gelu(self.wide(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        out = self.head(self.blocks(x)).mean(1)
        return out if y is None else nn.functional.cross_entropy(out, y)


inputs, labels = torch.randn(256, 32, 64), torch.randint(0, 10, (256,))
model = Net().to(device)
criterion = nn.CrossEntropyLoss().to(device)
if args.habit == "compiles":
    model = torch.compile(model)
if args.habit == "parallel":
    model = nn.DataParallel(model)
optimizer = None if args.habit == "by_hand" else torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cuda", enabled=args.habit == "casts")
casts = torch.autocast("cuda", dtype=torch.float16) if args.habit == "casts" else contextlib.nullcontext()


def batches():
    """Batches by a loader, or as scripts make them that have none."""
    if args.habit in ("by_hand", "no_loader"):
        while True:
            chosen = torch.randint(len(inputs), (args.batch_size,))
            x, y = inputs[chosen].pin_memory(), labels[chosen].pin_memory()
            yield x.to(device, non_blocking=True), y.to(device, non_blocking=True)
    for x, y in DataLoader(TensorDataset(inputs, labels), args.batch_size, num_workers=1, pin_memory=True):
        yield x.to(device, non_blocking=True), y.to(device, non_blocking=True)


@torch.no_grad()
def evaluate() -> float:
    model.eval()
    losses = [criterion(model(x[None].to(device)), y[None].to(device)).item() for x, y in zip(inputs[:3], labels[:3])]
    model.train()
    return sum(losses) / len(losses)


print("before:", evaluate())
best = math.inf
for epoch in range(2):
    model.train()
    for number, (x, y) in enumerate(batches(), 1):
        with casts:
            loss = criterion(model(x), y) / args.accumulation_steps
        scaler.scale(loss).backward()
        if number % args.accumulation_steps:
            continue
        if optimizer is None:
            for parameter in model.parameters():
                parameter.data.add_(parameter.grad, alpha=-0.01)
                parameter.grad = None
        else:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        print(f"loss {loss.item():.4f}")
        if number >= 8:
            break
    best = min(best, evaluate())
    torch.save(model.state_dict(), args.weights)
