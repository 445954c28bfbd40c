"""Answers as a notebook shows them: a line of text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from vram_guard import Budget, TrainingStep, plan, trace

NAME = "<img src=x onerror=alert(1)>\u202e"


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.add_module(NAME, nn.Linear(64, 64))

    def forward(self, x):
        return torch.relu(getattr(self, NAME)(x))


@pytest.fixture(scope="module")
def step():
    model = nn.Sequential(*[Block() for _ in range(4)])
    return TrainingStep(model, torch.ones(4, 64), lambda net, x: net(x).sum(), torch.optim.Adam)


@pytest.fixture(scope="module")
def made(step):
    return plan(step, 200_000, "256MiB", allow=["accumulate"])


def test_a_repr_is_one_short_line(step, made):
    answers = (made, made.estimate, trace(step), Budget.of("RTX 4090"), made.budget)
    for answer in answers:
        assert "\n" not in repr(answer)
        assert len(repr(answer)) < 120
    assert repr(Budget.of("1GiB", margin=0)) == "<Budget: 1.00 GiB usable of 1.00 GiB, explicit>"
    assert f"{made.splits} x {made.micro_batch_size} samples" in repr(made)


def test_the_example_runs_in_a_kernel():
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    (path,) = Path(__file__).parents[2].glob("examples/notebook/*.ipynb")
    notebook = nbformat.read(path, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs for cell in cells), "outputs would grow old"
    check = nbformat.v4.new_code_cell("print(made.fits, made.changed)")
    notebook.cells.append(check)
    nbclient.NotebookClient(notebook, timeout=180).execute()
    assert check.outputs[0]["text"] == "True True\n", "the plan of the example shows nothing"
    printed = "".join(output.get("text", "") for cell in cells for output in cell.outputs)
    assert "Does not fit as written" in printed
