"""Answers and progress as a notebook shows them: a line of text."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from torch import nn

from vram_guard import Budget, TrainingStep, plan, trace
from vram_guard.notebooks import one_line
from vram_guard.terminal import cut, display_width

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


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Output(io.StringIO):
    """As a kernel's stream: no terminal."""


def test_progress_is_one_line_that_is_replaced_and_wiped(step, monkeypatch):
    Output.__module__ = "ipykernel.iostream"
    for stream in (Terminal(), Output()):
        monkeypatch.setattr("sys.stderr", stream)
        with one_line() as progress:
            plan(step, 200_000, "256MiB", allow=["accumulate"], progress=progress)
        written = stream.getvalue()
        assert "tracing" in written
        assert "\n" not in written
        screen = ""
        for part in written.split("\r"):
            screen = part + screen[len(part) :]
        assert screen.strip() == ""
    monkeypatch.setattr("sys.stderr", file := io.StringIO())
    with one_line() as progress:
        progress("a line")
    assert file.getvalue() == ""


def test_a_line_of_progress_fits_into_the_terminal(monkeypatch):
    """A return does not lead back over two rows, and a wide sign leaves two columns."""
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    with one_line() as progress:
        progress("正在分析 bf16-mixed，批大小 256")
        progress("short")
    first, second, wiped, _end = terminal.getvalue().removeprefix("\r").split("\r")
    assert first == "正在分析 bf16-mixe…"
    assert display_width(first) == 19
    assert (len(second), second.rstrip()) == (19, "short")
    assert wiped == " " * 5
    assert cut("正在分析正在分析正", 16) == "正在分析正在分…"
    assert cut("正在", 4) == "正在"


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
