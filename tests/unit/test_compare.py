"""Configurations and variants side by side, in the library and at the command line, from real files."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch

from vram_guard import TrainingStep, cli, trace
from vram_guard.errors import InvalidInputError, NoDeviceError
from vram_guard.plan.comparison import Comparison, Configuration, compare
from vram_guard.report.comparison import comparison_dict, show
from vram_guard.units import format_bytes


def shown(answer: Comparison) -> str:
    """The table as a file has it."""
    file = io.StringIO()
    assert show(answer, file=file)
    return file.getvalue()


NET = """
import torch
from vram_guard import TrainingStep

def step(width=32, depth=2):
    layers = lambda: torch.nn.Sequential(*(
        layer for _ in range(depth) for layer in (torch.nn.Linear(width, width), torch.nn.ReLU())))
    return TrainingStep(
        model=layers,
        batch=lambda n: torch.zeros(n, 256, width),
        loss=lambda model, x: model(x).float().square().mean(),
        optimizer=torch.optim.AdamW,
    )

def steps():
    return {"lite": step(16), "full": step(64, 4)}

def broken():
    base = step()
    def fails():
        raise RuntimeError("no such weights")
    return base.with_(model=fails)
"""

CONFIG = """\
step: net.py:step
model: {width: 32, depth: 2}
train:
  batch_size: 4
  lr: 2e-4
  use_amp: false
test: {batch_size: 1}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "base.yaml").write_text(CONFIG)
    (tmp_path / "fp16.yaml").write_text(CONFIG.replace("false", "true").replace("batch_size: 4", "batch_size: 8"))
    return tmp_path


def step(**more) -> TrainingStep:
    namespace: dict = {}
    exec(NET, namespace)
    return namespace["step"]().with_(**more)


# --- the library ---


def test_the_first_is_what_the_others_are_compared_with():
    base = step()
    answer = compare(
        [
            Configuration("four", base, 4, 2e-4),
            Configuration("eight", base, 8, 2e-4),
            Configuration("four times two", base.with_(accumulate=2), 4),
        ],
        gpu="RTX 3060",
    )
    four, eight, two = answer.rows
    assert (four.peak, eight.peak) == (trace(base).at(4).peak_reserved, trace(base).at(8).peak_reserved)
    assert four.utilization == four.peak / answer.budget.total
    assert answer.relative_speed(four) == 1
    # Twice the samples at once: more a second, as so few of them wait for the host. One after the other they gain an
    # update, and lose what adding up gradients takes.
    assert answer.relative_speed(eight) > 1.5
    assert answer.relative_speed(two) == pytest.approx(1, abs=0.2)
    assert [row.suggested_learning_rate for row in answer.rows] == [2e-4, 4e-4, 4e-4]
    assert two.seconds > four.seconds
    assert answer.all_fit


def test_a_plan_where_it_does_not_fit_and_its_price():
    base, large = step(), 640
    budget = trace(base).at(400).peak_reserved
    answer = compare(
        [Configuration("a", base, 4), Configuration("b", base, large)], budget, margin=0, allow=["accumulate"]
    )
    assert answer.rows[1].plan.splits > 1
    assert answer.rows[1].fits
    assert "micro-batches" in shown(answer)
    alone = compare([Configuration("b", base, large)], budget, margin=0, allow=[])
    assert not alone.all_fit
    assert "over budget" in shown(alone)
    assert answer.rows[1].seconds == pytest.approx(alone.rows[0].seconds * answer.rows[1].plan.slowdown)


def test_the_amounts_that_rows_are_held_against_are_shown_where_they_differ():
    base = step()
    rows = [Configuration("full", base, 4), Configuration("half", base.with_(precision="bf16-mixed"), 4)]
    answer = compare(rows, "1GiB")
    kinds = {answer.budget.for_tier(row.plan.before.tier, row.plan.before.network).usable for row in answer.rows}
    assert len(kinds) == len(answer.row_budgets) == 2
    said = " ".join(shown(answer).split())
    assert "each row is held against what is usable for its kind of run" in said
    for one in answer.row_budgets:
        assert f"{format_bytes(one.usable)} (margin {one.margin:.1%})" in said
    assert "each row is held" not in shown(compare(rows[:1], "1GiB"))
    spread = compare([Configuration("four", base.with_(data_parallel_ranks=4), 4)], gpu="RTX 4090")
    assert spread.compared_budget == spread.rows[0].plan.budget
    assert "NCCL" in shown(spread)
    assert "each row is held" not in shown(compare(rows, "1GiB", margin=0.1))


def test_one_that_cannot_be_built_has_the_reason_in_its_row():
    def fails():
        raise RuntimeError("no such weights")

    answer = compare([Configuration("a", step(model=fails), 4, 0.1), Configuration("b", step(), 4)], "1GiB")
    line = fails.__code__.co_firstlineno + 1
    assert answer.rows[0].error == f"RuntimeError: no such weights (test_compare.py, line {line})"
    assert not answer.all_fit
    assert answer.relative_speed(answer.rows[0]) is None
    assert answer.relative_speed(answer.rows[1]) == 1
    assert "no such weights" in shown(answer)
    json.dumps(comparison_dict(answer), allow_nan=False)


def test_arguments_that_make_no_sense():
    good = Configuration("a", step(), 4)
    for bad, more in (([], {}), ([good, good], {}), ([good], {"lr_rule": "cubic"})):
        with pytest.raises(InvalidInputError):
            compare(bad, **{"gpu": "RTX 4090", **more})
    if not torch.cuda.is_available():
        with pytest.raises(NoDeviceError):
            compare([good])


# --- the command ---


def test_configs_side_by_side(folder, capsys):
    assert cli.main(["compare", "base.yaml", "fp16.yaml", "--gpu", "RTX 5090"]) == 0
    out = capsys.readouterr().out
    base, fp16 = (next(line for line in out.splitlines() if name in line) for name in ("base ", "fp16 "))
    assert "32-true" in base
    assert "16-mixed" in fp16 or "bf16-mixed" in fp16
    assert "0.0002 (0.0004)" in fp16
    assert "x 1.00" in base
    assert "RTX 5090" in out


def test_the_guides_three_runs(folder, capsys):
    """Batch 4, batch 8, batch 8 in half precision, as its last script has them."""
    runs = ["batch_size=4", "batch_size=8,lr=4e-4", "batch_size=8,lr=4e-4,use_amp=true"]
    arguments = [part for run in runs for part in ("--set", run)]
    assert cli.main(["compare", "base.yaml", *arguments, "--gpu", "RTX 5090", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["configurations"]
    assert [row["name"] for row in rows] == ["base", *runs]
    assert [row["batch_size"] for row in rows] == [4, 4, 8, 8]
    assert [row["learning_rate"] for row in rows] == [2e-4, 2e-4, 4e-4, 4e-4]
    assert rows[3]["precision"] != "32-true"
    assert rows[2]["suggested_learning_rate"] == 4e-4
    assert rows[3]["relative_speed"] > rows[0]["relative_speed"] == 1


def test_a_step_without_a_config(folder, capsys):
    arguments = ["--step", "net.py:step", "--set", "batch_size=2,width=8", "--set", "batch_size=2,width=2048"]
    assert cli.main(["compare", *arguments, "--budget", "64MiB", "--allow", ""]) == 1
    out = capsys.readouterr().out
    assert "fits" in out
    assert "over budget" in out


# --- variants ---


def test_a_setting_that_gives_no_batch_size_is_told_what_does(folder, capsys):
    assert cli.main(["compare", "--step", "net:step", "--set", "batchsize=8", "--gpu", "RTX 5090"]) == 2
    assert "--set batch_size=N" in capsys.readouterr().err


def test_variants_by_name(folder, capsys):
    names = ["net.py:steps", "net.py:step", "net.py:broken"]
    assert cli.main(["variants", *names, "--batch-size", "4", "--gpu", "RTX 3060", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in answer["variants"]] == ["lite", "full", "step", "broken"]
    assert answer["chosen"] == "full"
    assert "no such weights" in answer["variants"][3]["error"]
    assert cli.main(["variants", "net.py:steps", "--batch", "4", "--budget", "1MiB"]) == 1
    assert "None of 2 variants fits" in capsys.readouterr().out


def test_the_examples_own_variants(capsys):
    """The four networks of the guide, by the name of the function that makes them."""
    pytest.importorskip("lightning")
    name = f"{Path(__file__).parents[2] / 'examples' / 'variants_convlstm' / 'steps.py'}:steps"
    assert cli.main(["variants", name, "--batch-size", "4", "--budget", "96MiB", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in answer["variants"]] == [
        "3dcnn_lstm_micro", "3dcnn_lstm_lite", "convlstm", "3dcnn_lstm",
    ]  # fmt: skip
    assert answer["chosen"] is not None
