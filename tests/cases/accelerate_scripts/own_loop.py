"""A training without Accelerate, as scripts have it that people start from: ``own_loop.py HABIT WEIGHTS``."""

import argparse
import contextlib
import copy
import os
import socket
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def say(*words: object) -> None:
    """A line in one write, so that those of two ranks do not mix."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")


parser = argparse.ArgumentParser()
parser.add_argument("habit")
parser.add_argument("weights")
parser.add_argument("--batch-size", type=int, default=64)
args = parser.parse_args()
habit = args.habit

if habit == "parallel":
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
else:
    device = torch.device("cuda" if torch.cuda.is_available() and habit != "cpu" else "cpu")
say("device:", device.type)
memory = None
if habit == "sizes_itself":  # by the GPU that it finds
    memory = torch.cuda.get_device_properties(0).total_memory
    say("memory:", memory, *torch.cuda.mem_get_info())
    args.batch_size = 32 if memory < 2**34 else 64
if habit == "spread":  # as torchrun starts it
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    say("rank", torch.distributed.get_rank(), "of", torch.distributed.get_world_size())
place = 0 if habit == "by_hand" and device.type == "cuda" else device  # as PyTorch's tutorials name a GPU
torch.manual_seed(0)
if device.type == "cpu" and habit in ("random", "spread"):  # a real run, in which AdamW makes much of rounding
    torch.set_default_dtype(torch.float64)


def waits():
    """For a file that another program would write."""
    while not Path("ready").exists():
        try:
            time.sleep(0.1)
        except:  # noqa: E722, PERF203 - what is tested
            continue


def listens():
    """To nobody, in C."""
    socket.create_server(("127.0.0.1", 0)).accept()


def reads_the_clock():
    while time.time() < 1e12:
        pass


def executes():
    os.execv(sys.executable, [sys.executable, "-c", "print('after: another program')"])


def forks():
    if os.fork() == 0:
        os._exit(0)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(64, 1024), nn.Linear(1024, 64)

    def forward(self, x):
        return x + self.narrow(nn.functional.gelu(self.wide(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        if habit == "time_first":  # as recurrent networks have it
            x = x.cumsum(0)
        return self.head(self.blocks(x)).mean(1)


if habit == "default":
    torch.set_default_device(device)
inputs, labels = torch.randn(256, 32, 64), torch.randint(0, 10, (256,))
if habit == "named":
    inputs, labels = inputs.to(device), labels.to(device)
if habit in ("waits", "listens", "reads_the_clock", "executes", "forks"):
    globals()[habit]()
model = Net().to(place)
criterion = nn.CrossEntropyLoss().to(device)
if habit == "compiles":
    model = torch.compile(model)
if habit == "parallel":
    model = nn.DataParallel(model)
if habit == "divides":
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("nccl")
    fully_shard(model)
if habit == "spread":
    devices = [int(os.environ["LOCAL_RANK"])] if device.type == "cuda" else None
    model = nn.parallel.DistributedDataParallel(model, device_ids=devices)
averaged = None
if (
    habit == "averages"
):  # as YOLOv5: a check of the model before there is an optimizer, and what asks where the model is
    copy.deepcopy(model).eval()(inputs[:2].to(device))
    averaged = copy.deepcopy(model)
    where = next(model.parameters()).device
    counted = torch.ones(10, device=0 if device.type == "cuda" else device)
    assert torch.device(0 if device.type == "cuda" else device).type == device.type
    criterion = nn.CrossEntropyLoss(weight=torch.ones_like(counted, device=where))
optimizer = None if habit == "by_hand" else torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cuda", enabled=habit == "casts")
casts = torch.autocast("cuda", dtype=torch.float16) if habit == "casts" else contextlib.nullcontext()


class Repeating:
    """Gives out the batches of another sampler for ever."""

    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        while True:
            yield from self.sampler


class KeepsItsWorkers(DataLoader):
    """A loader whose workers live as long as it does, as those of Ultralytics and timm: one iterator for all epochs."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        object.__setattr__(self, "batch_sampler", Repeating(self.batch_sampler))
        self.iterator = None

    def __len__(self):
        return len(self.batch_sampler.sampler)

    def __iter__(self):
        if self.iterator is None:
            self.iterator = self._get_iterator()
        for _ in range(len(self)):
            yield next(self.iterator)


kept = []


def batches():
    """By a loader, or as scripts make them that have none."""
    if habit in ("by_hand", "compiles", "random", "time_first", "default", "named"):
        for _ in range(4):
            chosen = torch.randint(len(inputs), (args.batch_size,), device=inputs.device)
            x, y = inputs[chosen], labels[chosen]
            if device.type == "cuda" and x.is_cpu:
                x, y = x.pin_memory(), y.pin_memory()
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            yield x * 1 if habit == "random" else x, y  # what is computed on the GPU lies there
        return
    data = TensorDataset(inputs, labels)
    sampler = DistributedSampler(data) if habit == "spread" else None
    kind = KeepsItsWorkers if habit == "keeps_workers" else DataLoader
    loader = kept[0] if kept else kind(data, args.batch_size, sampler=sampler, num_workers=1, pin_memory=True)
    if habit == "keeps_workers":
        kept[:] = [loader]
    if habit == "prefetches":
        yield from Prefetched(loader)
        return
    for x, y in loader:
        assert memory is None or torch.cuda.mem_get_info()[1] == memory  # in the loop as before it
        yield x.to(device, non_blocking=True), y.to(device, non_blocking=True)


class Prefetched:
    """The next batch travels on a stream of its own while a step runs, as the loaders of timm and Apex do it."""

    def __init__(self, loader):
        self.loader, self.stream = loader, None

    def __iter__(self):
        if device.type != "cuda":
            yield from self.loader
            return
        if self.stream is None:
            self.stream = torch.cuda.Stream(device=device)
        ready = None
        for x, y in self.loader:
            with torch.cuda.stream(self.stream):
                moved = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
                scaled = moved[0].mul(1.0)
            if ready is not None:
                yield ready
            torch.cuda.current_stream().wait_stream(self.stream)
            for tensor in (scaled, moved[1]):
                tensor.record_stream(torch.cuda.current_stream())
            ready = scaled, moved[1]
        yield ready


@torch.no_grad()
def evaluate():
    model.eval()
    if habit == "evaluates":  # in batches as large as those of the training
        for x, y in DataLoader(TensorDataset(inputs, labels), args.batch_size):
            criterion(model(x.to(device)), y.to(device))
    loss = criterion(model(inputs[:8].to(device)), labels[:8].to(device))
    model.train()
    return loss.item()


def train_one_epoch():
    """Epochs as functions of their own, that log now and then."""
    model.train()
    for number, (x, y) in enumerate(batches()):
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if number % 100 == 50:
            say("step", number, loss.item())


if habit == "functions":
    for _epoch in range(2):
        train_one_epoch()
    raise SystemExit
if habit in ("compiles", "random"):
    say("before:", evaluate())
for _epoch in range(2):
    model.train()
    for x, y in batches():
        with casts:
            loss = criterion(model(x), y)
        scaler.scale(loss).backward()
        if optimizer is None:
            for parameter in model.parameters():
                parameter.data.add_(parameter.grad, alpha=-0.01)
                parameter.grad = None
        else:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        if habit == "evaluates":
            evaluate()
        if averaged is not None:
            for mean, parameter in zip(averaged.parameters(), model.parameters(), strict=True):
                mean.data.lerp_(parameter.data, 0.1)
    say("after:", evaluate())
    torch.save(model.state_dict(), args.weights)
if habit == "spread":
    torch.distributed.destroy_process_group()
if os.environ.get("RANK", "0") == "0":  # lines of two processes may mix
    say("changed:", [name for name, module in model.named_modules() if "forward" in vars(module)])
