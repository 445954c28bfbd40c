"""Settings from a file, the environment and options: the later wins, slips are named, and one switch turns all off."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys

import pytest
from each import each

from vram_guard import cli, settings
from vram_guard.errors import InvalidInputError
from vram_guard.settings import disabled, filled

CALCULATOR = shlex.split("estimate --batch 8 --height 128 --width 128 --hidden_dim 256 --num_layers 10")


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    """A project's folder, current; no setting in the environment."""
    for name in settings.KINDS:
        if name != "lang":
            monkeypatch.delenv(f"VRAM_GUARD_{name.upper()}", raising=False)
    monkeypatch.chdir(tmp_path)
    settings.forget()
    yield tmp_path
    settings.forget()


def values(**environment):
    return {name: one.value for name, one in settings.settings(environment).items()}


def test_the_later_wins(project):
    (project / "pyproject.toml").write_text(
        '[tool.vram_guard]\nmargin = 0.1\nallow = ["precision"]\ngpu = "T4"\nmode = "report"\n'
    )
    (project / "vram_guard.toml").write_text("margin = 0.2\ngrow = true\n")
    found = settings.settings({"VRAM_GUARD_MODE": "strict", "VRAM_GUARD_ALLOW": "accumulate, checkpoint"})
    assert {name: one.value for name, one in found.items()} == {
        "margin": 0.2,
        "allow": ("accumulate", "checkpoint"),
        "gpu": "T4",
        "mode": "strict",
        "grow": True,
    }
    assert found["margin"].source == str(project / "vram_guard.toml")
    assert found["gpu"].source == str(project / "pyproject.toml")
    assert found["mode"].source == "VRAM_GUARD_MODE"


def test_the_nearest_file_above_counts(project):
    (project / "vram_guard.toml").write_text("margin = 0.2\n")
    inner = project / "a" / "b"
    inner.mkdir(parents=True)
    (project / "a" / "pyproject.toml").write_text("[tool.other]\nx = 1\n")  # says nothing about vram_guard
    assert settings.settings({}, inner)["margin"].value == 0.2
    (inner / "pyproject.toml").write_text("[tool.vram_guard]\ngrow = true\n")
    settings.forget()
    assert set(settings.settings({}, inner)) == {"grow"}


def test_one_amount_of_memory_replaces_every_other(project):
    (project / "vram_guard.toml").write_text('gpu = "RTX 4090"\nbudget = "8GiB"\n')
    assert values() == {"gpu": "RTX 4090", "budget": "8GiB"}
    assert values(VRAM_GUARD_GPU="T4") == {"gpu": "T4"}
    assert filled({"budget": "1GiB"}, ["gpu", "budget", "margin"]) == {"budget": "1GiB"}


@each(
    ("name", "word", "value"),
    [
        ("GROW", "yes", True),
        ("GROW", "OFF", False),
        ("MARGIN", "0.05", 0.05),
        ("BUDGET", "24GiB", "24GiB"),
        ("ALLOW", "precision", ("precision",)),
    ],
)
def test_words_of_the_environment(name, word, value):
    assert values(**{f"VRAM_GUARD_{name}": word}) == {name.lower(): value}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("margn = 0.1", "unknown setting margn; did you mean margin"),
        ("margin = true", "margin cannot be True: write a number"),
        ('grow = "yes"', "grow cannot be 'yes': write true or false"),
        ("gpu = 4090", "gpu cannot be 4090: write text in quotes"),
        ("budget = 1.5", "budget cannot be 1.5"),
        ("allow = [1]", "write a list of names"),
        ("margin = ", "is not valid TOML"),
        ("x" * (2**20 + 1), "larger than 1 MiB"),
    ],
)
def test_slips_in_a_file_are_named_with_it(project, text, said, capsys):
    (project / "vram_guard.toml").write_text(text)
    with pytest.raises(InvalidInputError, match=said) as raised:
        settings.settings({})
    assert "vram_guard.toml" in str(raised.value)
    assert cli.main([*CALCULATOR, "--gpu_memory", "24"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "vram_guard.toml" in captured.err
    cli.main(["doctor", "--json"])  # the one command that says what is wrong with them
    assert "vram_guard.toml" in json.loads(capsys.readouterr().out)["settings_problem"]


@pytest.mark.parametrize(
    ("word", "off"), [("1", True), ("true", True), ("0", False), ("no", False), ("", False), ("x", True)]
)
def test_one_variable_turns_all_of_it_off(monkeypatch, word, off):
    monkeypatch.setenv("VRAM_GUARD_DISABLE", word)
    assert disabled() is off


def test_a_file_turns_it_off_and_the_variable_on_again(project, monkeypatch):
    (project / "vram_guard.toml").write_text("disable = true\nmargin = 0.3\n")
    assert disabled()
    assert filled({}, ["margin"]) == {}
    monkeypatch.setenv("VRAM_GUARD_DISABLE", "0")
    assert not disabled()
    assert filled({}, ["margin"]) == {"margin": 0.3}


def test_a_broken_file_turns_nothing_off(project):
    (project / "vram_guard.toml").write_text("disable = ")
    assert not disabled()


def answer(capsys, *arguments):
    code = cli.main([*CALCULATOR, *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)["rule_of_thumb"]


def test_a_command_takes_its_options_from_the_settings(project, monkeypatch, capsys):
    (project / "pyproject.toml").write_text('[tool.vram_guard]\ngpu = "RTX 4090"\nthreshold = 0.6\n')
    _, rule = answer(capsys)
    assert rule["threshold"] == 0.6
    assert 23 * 2**30 < rule["gpu_memory"] < 24 * 2**30
    monkeypatch.setenv("VRAM_GUARD_GPU_MEMORY", "80GB")
    assert answer(capsys)[1]["gpu_memory"] == 80 * 10**9
    assert answer(capsys, "--gpu_memory", "24", "--threshold", "0.7")[1]["allowed"] == 16_800_000_000
    # A config stands between the settings and the options.
    (project / "config.yaml").write_text("gpu_memory: 16\n")
    assert answer(capsys, "--config", "config.yaml")[1]["gpu_memory"] == 16 * 10**9
    assert answer(capsys, "--config", "config.yaml", "--gpu_memory", "8")[1]["gpu_memory"] == 8 * 10**9


def test_the_language_of_a_project(project, monkeypatch, capsys):
    monkeypatch.delenv("VRAM_GUARD_LANG")
    (project / "vram_guard.toml").write_text('lang = "zh"\n')
    assert cli.main([*CALCULATOR, "--gpu_memory", "24"]) == 0
    assert "✅ 安全" in capsys.readouterr().out
    assert cli.main(["--lang", "en", *CALCULATOR, "--gpu_memory", "24"]) == 0
    assert "SAFE" in capsys.readouterr().out


def test_doctor_says_which_setting_comes_from_where(project, monkeypatch, capsys):
    (project / "vram_guard.toml").write_text('gpu = "RTX 4090"\nallow = ["precision"]\n')
    monkeypatch.setenv("VRAM_GUARD_MARGIN", "0.1")
    monkeypatch.setenv("VRAM_GUARD_MARGN", "0.2")
    cli.main(["doctor"])
    out = capsys.readouterr().out
    assert f"RTX 4090 (from {project / 'vram_guard.toml'})" in out
    assert "0.1 (from VRAM_GUARD_MARGIN)" in out
    assert "not a setting; did you mean VRAM_GUARD_MARGIN?" in out
    cli.main(["doctor", "--json"])
    facts = json.loads(capsys.readouterr().out)
    assert facts["settings"]["margin"] == {"value": 0.1, "source": "VRAM_GUARD_MARGIN"}


def test_a_script_is_launched_as_it_is_where_the_guard_is_off(project):
    pytest.importorskip("accelerate")
    (project / "script.py").write_text("import sys\nprint('ran with', sys.argv[1:])\nsys.exit(7)\n")
    command = [sys.executable, "-m", "vram_guard.cli", "launch", "--budget", "1KiB"]
    off = {**os.environ, "VRAM_GUARD_DISABLE": "1"}

    def launched(*words):  # in a process of its own, which becomes the script
        return subprocess.run([*command, *words], env=off, capture_output=True, text=True, check=False)

    looked, ran = (
        launched("--dry-run", "script.py"),
        launched("--cpu", "script.py", "--lang", "fr", "--hidden_dim", "3"),
    )
    assert (looked.returncode, looked.stdout) == (0, "")
    assert (ran.returncode, ran.stdout) == (7, "ran with ['--lang', 'fr', '--hidden_dim', '3']\n")
    assert "switched off" in looked.stderr
    assert "switched off" in ran.stderr


def test_a_card_by_name_is_no_number_of_a_gpu_to_watch(monkeypatch, capsys):
    monkeypatch.setenv("VRAM_GUARD_GPU", "RTX 4090")
    cli.main(["monitor", "0.1"])
    assert "RTX 4090" not in capsys.readouterr().err
