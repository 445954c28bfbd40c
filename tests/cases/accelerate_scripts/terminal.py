"""A script that asks for the size of its terminal as it starts: ``terminal.py HOW``."""

import os
import shutil
import subprocess
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader

how = sys.argv[1]
if how == "popen":
    rows, columns = map(int, os.popen("stty size", "r").read().split())
elif how == "program":
    rows, columns = map(int, subprocess.check_output(["stty", "size"]).split())
elif how == "reads":
    subprocess.run(["cat"], check=True, timeout=20)
    columns = len(os.read(0, 10)) + 1
elif how == "input":
    columns = int(input("How wide?"))
else:
    columns = (os if how == "os" else shutil).get_terminal_size().columns
assert columns > 0
model = nn.Linear(64, 64).cuda()
optimizer = torch.optim.Adam(model.parameters())
for batch in DataLoader(torch.zeros(64, 64), 16):
    optimizer.zero_grad()
    model(batch.cuda()).square().mean().backward()
    optimizer.step()
