"""Scripts that write, move and train before ``prepare``, or without it; run with the name of one and a folder."""

import shutil
import socket
import subprocess
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.append(str(Path(__file__).parents[1]))

from ways_to_write import written

name, folder = sys.argv[1], Path(sys.argv[2])


def train(each_step=lambda: None):
    accelerator = Accelerator()
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=4)
    )
    (folder / "made_after_prepare").mkdir()
    for (x,) in loader:
        each_step()
        accelerator.backward(model(x).sum())
        optimizer.step()
        optimizer.zero_grad()


def writes():
    """In all ways, over files that are there, and reads it back; then in every step of the loop."""
    how, failed = written(folder / "before")
    assert how != "overlay" or not failed, failed
    (folder / "log.txt").write_text("others")
    shutil.rmtree(folder / "old")
    (folder / "settings.json").rename(folder / "settings.old.json")
    (Path.home() / ".runs" / "first").mkdir(parents=True)
    (Path.home() / ".netrc").write_text("others")
    subprocess.run(["touch", folder / "touched.txt"], check=how == "overlay")
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname()).close()
    train(goes_on)


def goes_on():
    assert (folder / "log.txt").read_text() == "others"
    assert not (folder / "step.txt").exists()
    for text in ("one", "two"):
        (folder / "step.txt").write_text(text)
        assert (folder / "step.txt").read_text() == text
    (folder / "step.txt").unlink()
    written(folder / "loop", programs=False)


def by_itself():
    """As nanoGPT does: no Accelerator at all, and the best checkpoint is written again and again."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(1000):
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        torch.save(model.state_dict(), folder / "checkpoint.pt")


def warms_up():
    """An Accelerator, and a real step before prepare."""
    Accelerator()
    nn.Linear(8, 8)(torch.randn(4, 8)).sum().backward()
    train()


def writes_in_c():
    """A file of HDF5, which Python does not open."""
    import h5py

    h5py.File(folder / "table.h5", "w").close()
    train()


if __name__ == "__main__":
    globals()[name]()
