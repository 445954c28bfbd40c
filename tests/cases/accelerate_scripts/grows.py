"""A list that keeps an output of every step: ``grows.py loader|none STEPS``."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

how, steps = sys.argv[1], int(sys.argv[2])
device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Linear(256, 256).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
kept = []
data = DataLoader(TensorDataset(torch.rand(steps * 128, 256)), batch_size=128)
for (inputs,) in data if how == "loader" else ((torch.rand(128, 256),) for _ in range(steps)):
    outputs = model(inputs.to(device))
    optimizer.zero_grad()
    outputs.square().mean().backward()
    optimizer.step()
    kept.append(outputs.detach())
