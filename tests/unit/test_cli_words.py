"""What the command line says first: help without a command, the language at any place, costs out of the ordinary."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from vram_guard import TrainingStep, cli, plan
from vram_guard.errors import InvalidInputError
from vram_guard.guard.settings import GuardSettings
from vram_guard.report.text import render


def said(capsys, *words):
    try:
        code = cli.main(list(words))
    except SystemExit as end:
        code = end.code
    found = capsys.readouterr()
    return code, found.out, found.err


def test_without_a_command_the_help_is_shown(capsys):
    code, out, err = said(capsys)
    assert (code, err) == (0, "")
    assert "estimate" in out


@pytest.mark.parametrize(
    "words",
    [
        ("mmengine", "compare", "nowhere.py", "--lang", "zh"),
        ("mmengine", "--lang", "zh", "compare", "nowhere.py"),
        ("mmengine", "compare", "nowhere.py", "--lang=zh"),
        ("estimate", "--config", "nowhere.yaml", "--language", "zh"),
        ("gpus", "--lang", "zh", "RTX 9999"),
        ("variants", "nowhere:a", "--batch", "2", "--gpu", "T4", "--lang", "zh"),
    ],
)
def test_the_language_may_stand_anywhere(capsys, words):
    code, _out, err = said(capsys, *words)
    assert code == 2
    assert any("\u4e00" <= letter <= "\u9fff" for letter in err), err


def test_a_number_of_bytes_for_a_card_says_its_unit(capsys):
    rule = ("estimate", "--batch", "2", "--height", "8", "--width", "8", "--hidden-dim", "8", "--num-layers", "2")
    code, _out, err = said(capsys, *rule, "--gpu-memory", "24000000000")
    assert code == 2
    assert "24000000000B" in err
    assert said(capsys, *rule, "--gpu-memory", "24000000000B")[0] == 0


def test_fixed_micro_batches_and_growth_are_refused_when_the_settings_are_made():
    for pin in ({"micro_batch_size": 4}, {"micro_batch_size": 1, "precision": "32-true"}):
        with pytest.raises(InvalidInputError, match="micro_batch_size"):
            GuardSettings(grow=True, pin=pin)
    GuardSettings(grow=True, pin={"precision": "bf16-mixed"})


def test_a_plan_that_is_many_times_slower_says_so_behind_the_verdict():
    step = TrainingStep(
        model=lambda: torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4))),
        batch=lambda size: torch.zeros(size, 256),
        loss=lambda model, x: model(x).sum(),
        optimizer=torch.optim.SGD,
    )
    made = plan(step, 65536, "192MiB")
    assert made.changed
    for slowdown, said in ((26.0, "26 times as long"), (3.0, "3 times as long")):
        lines = render(replace(made, slowdown=slowdown), verbose=False).splitlines()[:6]
        assert any(said in line for line in lines), lines
    assert "times as long" not in render(replace(made, slowdown=2.9), verbose=False)
    unchanged = plan(step, 16, "192MiB")
    assert "times as long" not in render(replace(unchanged, slowdown=26.0), verbose=False)


def test_doctor_imports_neither_torch_nor_a_framework():
    code = (
        "import sys\nfrom vram_guard.cli import main\nmain(['doctor'])\n"
        "sys.exit(str({'torch', 'lightning', 'mmengine', 'accelerate'} & set(sys.modules) or ''))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""
