"""One training, set up in different orders: ``set_up.py ORDER FOLDER``."""

import copy
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

order, folder = sys.argv[1], Path(sys.argv[2])
plain = order.startswith("plain")
accelerator = None if plain else Accelerator()
device = ("cuda" if torch.cuda.is_available() else "cpu") if plain else accelerator.device
model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))
loader = DataLoader(TensorDataset(torch.randn(128, 256)), batch_size=16)
kept = None


class Holder(nn.Module):
    """Moves a model that it is given, as wrappers with averaged weights do."""

    def __init__(self, online):
        super().__init__()
        self.online, self.averaged = online, copy.deepcopy(online).requires_grad_(False)


def load():
    """A checkpoint that lies on the GPU until its last name is gone."""
    file = folder / "checkpoint"
    if order.endswith("safetensors"):
        from safetensors.torch import load_file

        return load_file(f"{file}.safetensors", device=str(device))
    onto = {"cpu": str(device)} if order.endswith("mapped") else device
    if order.endswith("function"):
        onto = lambda storage, place: storage.cuda()  # noqa: E731 - as it is written
    return torch.load(f"{file}.pt", map_location=onto)


if order == "write":
    from safetensors.torch import save_file

    content = {**model.state_dict(), "more": torch.ones(2**20)}
    torch.save({"model": model.state_dict(), "more": [content["more"]]}, folder / "checkpoint.pt")
    save_file(content, folder / "checkpoint.safetensors")
    sys.exit()
if "first" in order:
    loader = accelerator.prepare(loader)
if "loads" in order:
    kept = load()
    model.load_state_dict(kept.get("model", kept), strict=False)
if "deletes" in order:
    kept = None
if "parts" in order:
    kept = torch.ones(8, 2**20, device=device)[3]
if "after" not in order:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
if "data" in order:
    for parameter in model.parameters():
        parameter.data = parameter.data.to(device)
elif "holder" in order:
    holder = Holder(model).to(device)
elif "prepared" not in order:
    model.to(device)
if "after" in order:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
if not plain:
    if "one_by_one" in order:
        model = accelerator.prepare(model)
        optimizer = accelerator.prepare(optimizer)
    else:
        model, optimizer = accelerator.prepare(model, optimizer)
    if "first" not in order:
        loader = accelerator.prepare(loader)
if "reads" in order:
    kept = load()
for (inputs,) in loader:
    loss = (model(inputs.to(device)) - inputs.to(device)).square().mean()
    loss.backward() if plain else accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
