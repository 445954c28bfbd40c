"""``vram-guard plan``: the report and every picture of one training, from the example's real config."""

from __future__ import annotations

import json
import operator
import pickle
from pathlib import Path

import pytest

from vram_guard import cli

ROOT = Path(__file__).parents[2]
CONFIG = "examples/superres_config/lightweight_config.yaml"


@pytest.fixture(autouse=True)
def in_the_project(monkeypatch):
    monkeypatch.chdir(ROOT)


def test_everything_at_once(tmp_path, capsys):
    names = {
        "--html": "r.html",
        "--plot": "p.svg",
        "--snapshot": "s.pickle",
    }
    pictures = [part for option, name in names.items() for part in (option, str(tmp_path / name))]
    pictures += ["--title", "Small <b>"]
    change = ["--set", "batch_size=256,base_channels=64"]
    assert cli.main(["plan", CONFIG, *change, "--gpu", "RTX 4070", "-v"]) == 0
    full = capsys.readouterr().out
    assert "32-true" in full
    assert "\nWhy\n" in full
    assert "Full report" not in full
    assert cli.main(["plan", CONFIG, *change, "--gpu", "RTX 4070", *pictures]) == 0
    captured = capsys.readouterr()
    assert "\nFITS" in captured.out
    assert captured.out.startswith("Does not fit as written (")
    assert "x 0." in captured.out, "what it costs"
    assert "32-true" not in captured.out
    assert captured.err.count("wrote") == 3
    page = (tmp_path / "r.html").read_text("utf-8")
    assert "<title>Small &lt;b&gt;</title>" in page
    assert pickle.loads((tmp_path / "s.pickle").read_bytes())["segments"]
    assert (tmp_path / "p.svg").read_text().startswith("<svg")


def test_json_and_exit_codes(capsys):
    assert cli.main(["plan", CONFIG, "--gpu", "RTX 4090", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["schema"], answer["kind"]) == (cli.JSON_SCHEMA, "plan")
    assert answer["report"]["changed"] is False
    assert cli.main(["plan", CONFIG, "--budget", "100MiB", "--allow", ""]) == 1
    assert "DOES NOT FIT" in capsys.readouterr().out


def test_a_page_that_cannot_be_written_is_told_behind_the_answer(capsys):
    assert cli.main(["plan", CONFIG, "--gpu", "RTX 4090", "--html", "/proc/no/r.html"]) == 2
    assert "was not written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "kind"), [("roberta-base", "roberta"), ("facebook/opt-125m", "opt"), ("gpt22", "gpt2"), ("zzz", None)]
)
def test_the_name_of_a_published_model_leads_to_its_kind(name, kind, capsys):
    pytest.importorskip("transformers")
    assert cli.main(["estimate", "--model", name, "--batch", "4", "--gpu", "RTX 4090"]) == 2
    said = capsys.readouterr().err
    assert (f"did you mean {kind}?" in said) if kind else ("did you mean" not in said)


def test_every_set_counts(tmp_path, capsys):
    (tmp_path / "steps.py").write_text(
        "import torch\n"
        "from vram_guard import TrainingStep\n"
        "def build(width=8):\n"
        "    net = torch.nn.Linear(width, width)\n"
        "    return TrainingStep(net, torch.ones(2, width), lambda net, x: net(x).sum())\n"
        "def anything(**settings):\n"
        "    return build(settings['width'])\n"
    )
    for name in ("build", "anything"):
        step = ["--step", f"{tmp_path / 'steps.py'}:{name}", "--gpu", "RTX 4090", "--json"]
        assert cli.main(["plan", *step, "--set", "batch_size=4", "--set", "width=512"]) == 0
        report = json.loads(capsys.readouterr().out)["report"]
        assert report["before"]["breakdown"]["parameters"] == 512 * 512 * 4 + 512 * 4
    named = ["plan", "--step", f"{tmp_path / 'steps.py'}:build", "--gpu", "RTX 4090"]
    assert cli.main([*named, "--set", "batch_size=4,wdith=512"]) == 2
    assert "did you mean width" in capsys.readouterr().err


def test_the_margin_is_kept_free(capsys):
    answers = []
    for margin in ("0", "0.5"):
        cli.main(["plan", CONFIG, "--budget", "10GiB", "--margin", margin, "--json"])
        answers.append(json.loads(capsys.readouterr().out)["report"]["budget"])
    assert [answer["usable"] for answer in answers] == [10 * 2**30, 5 * 2**30]


def test_without_a_gpu_the_options_of_the_command_line_are_told(monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code = cli.main(["plan", CONFIG])
    said = capsys.readouterr().err
    assert code == 3
    assert '--budget 24GiB (what PyTorch may reserve) or --gpu "RTX 4090"' in said
    assert "gpu=" not in said


@pytest.mark.parametrize("slip", ["batchsize=3", "a\x1b[31m\u202eb=1"])
def test_a_slip_is_told_of_a_model_that_is_made_already_too(slip, tmp_path, monkeypatch, capsys):
    (tmp_path / "ready.py").write_text("import torch\nnet = torch.nn.Linear(8, 8)\n")
    monkeypatch.chdir(tmp_path)
    asked = ["plan", "ready.py:net", "--input", "8", "--batch", "4", "--set", slip, "--gpu", "RTX 4090"]
    assert cli.main(asked) == 2
    said = capsys.readouterr().err
    assert "nothing reads a value of this name" in said
    assert not {"\x1b", "\u202e"} & set(said)


STEPS = """
import torch
from vram_guard import TrainingStep

def step_of(model, loss=lambda model, batch: model(batch).sum()):
    return TrainingStep(model, lambda size: torch.zeros(size, 64), loss, torch.optim.AdamW)

wrong_shape = step_of(torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(33, 10)))
no_key = step_of(torch.nn.Linear(64, 64), lambda model, batch: model(batch).sum() * {}["scale"])
"""


@pytest.mark.parametrize(
    ("name", "line", "problem"),
    [("wrong_shape", 5, "RuntimeError: a and b must have same reduction dim"), ("no_key", 9, "KeyError: 'scale'")],
)
def test_a_step_that_fails_is_no_step_that_does_not_fit(name, line, problem, tmp_path, capsys):
    file = tmp_path / "steps.py"
    file.write_text(STEPS)
    command = ["plan", "--step", f"{file}:{name}", "--batch", "8", "--budget", "1GiB"]
    assert cli.main(command) == cli.EXIT_USAGE
    said = capsys.readouterr().err
    assert f"steps.py, line {line} fails: {problem}" in said
    assert said.count("\n") == 1
    assert "Traceback" not in said
    assert cli.main([*command, "-v"]) == cli.EXIT_USAGE
    said = capsys.readouterr().err
    assert "Traceback" in said
    assert f"steps.py, line {line} fails: {problem}" in said


def test_an_error_that_no_code_of_the_user_has_passed_on_keeps_its_traceback(monkeypatch, capsys):
    # What is called here is no file of the user's: Python's own.
    monkeypatch.setattr("vram_guard.config_file.load_config", operator.itemgetter("no config"))
    assert cli.main(["plan", CONFIG, "--gpu", "RTX 4090"]) == cli.EXIT_ENVIRONMENT
    said = capsys.readouterr().err
    assert "Traceback" in said
    assert said.splitlines()[-1].endswith("is one of vram_guard or of a library that it calls")
