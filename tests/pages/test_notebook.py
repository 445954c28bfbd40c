"""A guard in a notebook: a real kernel, whose threads and sockets a copy of its process inherits."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("ipykernel")
nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("lightning")

from vram_guard.forks.fork import can_fork  # noqa: E402 - what is tested has to be there

pytestmark = pytest.mark.skipif(not can_fork(), reason="copies of processes need Linux")

SETUP = """
import torch, warnings
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset
from vram_guard_lightning import VramGuard

class Small(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))

    def training_step(self, batch, batch_idx):
        print("a step")
        self.log("loss", loss := torch.nn.functional.mse_loss(self.net(batch[0]), batch[1]), prog_bar=True)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        steps.append(batch_idx)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

steps = []

def fitted(*guards):
    torch.manual_seed(0)
    module, data = Small(), TensorDataset(torch.rand(16, 8), torch.rand(16, 1))
    trainer = Trainer(accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, callbacks=list(guards))
    trainer.fit(module, DataLoader(data, batch_size=8, shuffle=True))
    return torch.cat([weight.detach().flatten() for weight in module.parameters()])
"""
CELLS = (
    SETUP,
    "plain = fitted()",
    "guard = VramGuard(budget='1GiB', advanced={'remember': False}); guarded = fitted(guard)",
    "again = VramGuard(budget='1GiB', pin={'micro_batch_size': 4}, advanced={'remember': False}); cut = fitted(again)",
    "print(torch.equal(plain, guarded), torch.allclose(plain, cut), guard.plan.changed, again.plan.splits, steps)",
)


def printed(cell: Any) -> str:
    """What a cell shows; while a progress bar is drawn, lines come as outputs of their own."""
    shown = (output.get("text", "") + output.get("data", {}).get("text/plain", "") for output in cell.outputs)
    return " ".join(" ".join(shown).split())


def test_a_guard_in_a_notebook_leaves_the_kernel_and_the_training_as_they_are() -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    nbclient.NotebookClient(notebook, timeout=180).execute()
    _setup, plain, guarded, cut, outcome = map(printed, notebook.cells)
    assert outcome == "True True False 2 [0, 1, 0, 1, 0, 1]"
    assert (plain.count("a step"), guarded.count("a step"), cut.count("a step")) == (2, 2, 4), "a copy has printed too"
    assert "was looked at in its own process" not in guarded + cut
