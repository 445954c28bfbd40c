"""A training whose epochs are counted by loops of several kinds, and a test of 100,000 rows after the last one."""

import argparse
import itertools

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm.auto import tqdm, trange

EPOCHS = 40


class Run:
    def __init__(self):
        self.accelerator = Accelerator()
        model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 512))
        rows = TensorDataset(torch.randn(64, 64), torch.randint(0, 512, (64,)))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        prepared = self.accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=8))
        self.model, self.optimizer, self.loader = prepared
        self.saved = 0

    def step(self, x, y):
        self.accelerator.backward(nn.functional.cross_entropy(self.model(x), y))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def epoch(self):
        for x, y in self.loader:
            self.step(x, y)

    def save(self):
        self.saved += 1
        assert self.saved < 3, "two epochs are enough"
        self.accelerator.save_state("checkpoints/now")

    def test(self, rows=100_000):
        with torch.no_grad():
            self.model(torch.zeros(rows, 64, device=self.accelerator.device))


def while_(run):
    epoch = 0
    while epoch < EPOCHS:
        run.epoch()
        run.save()
        epoch += 1
    run.test()


def while_true(run):
    epoch = 0
    while True:
        for x, y in run.loader:
            run.step(x, y)
        run.save()
        epoch += 1
        if epoch == EPOCHS:
            break
    run.test()


def until_steps(run):
    step = 0
    while step < 1000:
        for x, y in run.loader:
            run.step(x, y)
            step += 1
            if step == 1000:
                break
        run.save()
    run.test()


def counted(run):
    for epoch in itertools.count():
        if epoch == EPOCHS:
            break
        run.epoch()
        run.save()
    run.test()


def listed(run):
    if run.loader is not None:
        for _number, _rate in enumerate([0.1] * EPOCHS):
            run.epoch()
            run.save()
    run.test()


def bar(run):
    for _ in tqdm(range(EPOCHS)):
        run.epoch()
        run.save()
    run.test()


def last_of_its_function(run):
    def train():
        for _ in trange(EPOCHS):
            run.epoch()
            run.save()

    train()
    run.test()


def by_next(run):
    for _ in range(EPOCHS):
        batches = iter(run.loader)
        for _number in range(len(run.loader)):
            run.step(*next(batches))
        run.save()
    run.test()


def otherwise(run):
    epoch = 0
    while epoch < EPOCHS:
        run.epoch()
        run.save()
        epoch += 1
    run.test()


parser = argparse.ArgumentParser()
parser.add_argument("loop")
globals()[parser.parse_args().loop](Run())
