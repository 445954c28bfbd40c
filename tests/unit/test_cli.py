"""The ``vram-guard`` command: answers on stdout, messages on stderr, exit codes that mean something."""

from __future__ import annotations

import gc
import json
import subprocess
import sys

import pytest

from vram_guard import __version__, cli
from vram_guard.budget import catalogue
from vram_guard.cli import _doctor
from vram_guard.errors import DeviceQueryError, DoesNotFitError, InvalidInputError, NoDeviceError


def test_version(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"vram-guard {__version__}\n"


def test_python_dash_m_is_the_command():
    command = [sys.executable, "-m", "vram_guard", "gpus", "--no-such-option"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("vram-guard gpus: unrecognized arguments: --no-such-option")


def test_gpus_lists_every_card_in_aligned_columns(capsys):
    assert cli.main(["gpus"]) == 0
    head, *rows = capsys.readouterr().out.split("\n\n")[0].splitlines()
    assert len(rows) == len(catalogue())
    column = head.index("architecture")
    for row, card in zip(rows, catalogue(), strict=True):
        assert row.startswith(card.name)
        assert row[column:].startswith(card.architecture)


def test_gpus_as_json_is_what_the_catalogue_says(capsys):
    assert cli.main(["gpus", "rtx 4090", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["schema"] == cli.JSON_SCHEMA
    (card,) = answer["gpus"]
    assert card["name"] == "RTX 4090"
    assert card["compute_capability"] == [8, 9]
    assert 22 * 2**30 < card["usable_bytes"] < card["memory_bytes"] < 24 * 2**30
    assert card["sources"]["memory_bytes"]


def test_doctor_says_what_is_here(capsys):
    code = cli.main(["doctor", "--json"])
    facts = json.loads(capsys.readouterr().out)
    assert facts["vram_guard"] == __version__
    assert facts["torch"]
    assert facts["integration lightning"] == "ready"
    assert code == (3 if facts["gpu_unreadable"] else 0)


def test_doctor_for_people(capsys):
    cli.main(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["vram", "guard", __version__]
    assert {line[: len(lines[0]) - len(__version__)].strip() for line in lines} >= {"GPU", "host memory", "torch"}


def test_doctor_does_not_say_twice_that_there_is_no_gpu(monkeypatch, capsys):
    monkeypatch.setattr(_doctor, "_gpu_at_hand", lambda: ("no GPU here", False))
    monkeypatch.setenv("VRAM_GUARD_LANG", "zh")
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "no GPU here" in out
    assert "GPU 无法读取" not in out
    assert "physical memory" not in out
    monkeypatch.setattr(_doctor, "_gpu_at_hand", lambda: ("a broken driver", True))
    assert cli.main(["doctor"]) == 3
    assert "GPU 无法读取" in capsys.readouterr().out


def test_doctor_exits_with_3_where_the_gpu_cannot_be_read(monkeypatch, capsys):
    from vram_guard.budget import Budget

    def unreadable():
        raise DeviceQueryError("driver and library versions differ: reboot")

    monkeypatch.setattr(Budget, "resolve", unreadable)
    assert cli.main(["doctor"]) == 3
    assert "reboot" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "code"),
    [(DoesNotFitError("x"), 1), (InvalidInputError("x"), 2), (NoDeviceError("x"), 3), (DeviceQueryError("x"), 3)],
)
def test_exit_codes(error, code, monkeypatch, capsys):
    def fail(_options):
        raise error

    monkeypatch.setattr("vram_guard.cli._gpus._gpus", fail)
    assert cli.main(["gpus"]) == code
    assert capsys.readouterr().err == "vram-guard: x\n"


STEP = """
import torch
from vram_guard import TrainingStep


def build():
    return TrainingStep(
        model=lambda: torch.nn.Linear(8, 8),
        batch=lambda size: torch.zeros(size, 8),
        loss=lambda model, x: model(x).sum(),
        optimizer=torch.optim.SGD,
    )
"""


def test_the_collector_of_cycles_rests_while_a_command_predicts(monkeypatch, tmp_path, capsys):
    """It would look at everything that torch and transformers import: a sixth of the time of a ResNet-50."""
    import vram_guard.config_file
    import vram_guard.optimize.document  # keeps the function that it finds when it is first imported

    seen = []
    load = vram_guard.config_file.load_config
    monkeypatch.setattr(vram_guard.config_file, "load_config", lambda path: seen.append(gc.isenabled()) or load(path))
    (tmp_path / "a.yaml").write_text(f"{{batch_size: 4, step: '{tmp_path}/steps.py:build'}}")
    (tmp_path / "steps.py").write_text(STEP)
    enabled = gc.isenabled()
    for command in ("estimate", "plan"):
        assert cli.main([command, str(tmp_path / "a.yaml"), "--gpu", "4090", "--json"]) == 0
    assert seen == [False, False]
    assert gc.isenabled() == enabled
