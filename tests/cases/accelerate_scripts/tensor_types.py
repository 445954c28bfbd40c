"""A training that names the GPU by tensor types, as scripts did before devices."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader

FloatTensor = torch.cuda.FloatTensor if torch.cuda.is_available() else torch.FloatTensor
LongTensor = torch.cuda.LongTensor if torch.cuda.is_available() else torch.LongTensor

generator = None
if "default" in sys.argv[1:]:
    torch.set_default_tensor_type("torch.cuda.FloatTensor")
    generator = torch.Generator(device="cuda")
model = nn.Linear(64, 8).cuda()
optimizer = torch.optim.Adam(model.parameters())
weight = FloatTensor([1.0] * 8)
assert isinstance(weight, FloatTensor)
assert weight.type() == "torch.cuda.FloatTensor"
for loaded in DataLoader(torch.zeros(64, 64, device="cpu"), 16, generator=generator):
    if "types" in sys.argv[1:]:
        inputs, labels = loaded.type(FloatTensor), LongTensor(16).fill_(1)
    else:
        inputs, labels = loaded.to("cuda"), torch.ones(16, dtype=torch.long, device="cuda")
    assert isinstance(inputs, torch.cuda.FloatTensor)
    assert not isinstance(inputs, torch.cuda.HalfTensor)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(inputs), labels, weight).backward()
    optimizer.step()
