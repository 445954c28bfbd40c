"""Trainings whose blocks read what changes before the backward pass, each until it ends or is stopped."""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator

sys.path.insert(0, str(Path(__file__).parents[1]))
from recomputed_kinds import BATCH, EQUAL, STOPS, data, made, state
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True)
found = {}
for name in sys.argv[2:]:
    model = made((STOPS | EQUAL)[name])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(TensorDataset(*data()), batch_size=BATCH)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    stopped = ""
    try:
        for inputs, targets in loader:
            optimizer.zero_grad()
            accelerator.backward(model.loss(inputs, targets))
            optimizer.step()
    except RuntimeError as error:
        stopped = type(error).__name__
    found[name] = state(model), stopped
torch.save(found, sys.argv[1])
