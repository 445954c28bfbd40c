"""``vram-guard plan``: the report and every picture of one training, from the example's real config."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from vram_guard import cli

ROOT = Path(__file__).parents[1]
CONFIG = "examples/superres_config/lightweight_config.yaml"


@pytest.fixture(autouse=True)
def in_the_project(monkeypatch):
    monkeypatch.chdir(ROOT)


def test_everything_at_once(tmp_path, capsys):
    names = {
        "--html": "r.html",
        "--plot": "p.svg",
        "--plot-batch": "b.png",
        "--trace": "t.json",
        "--snapshot": "s.pickle",
    }
    pictures = [part for option, name in names.items() for part in (option, str(tmp_path / name))]
    change = ["--set", "batch_size=256,base_channels=64", "--title", "Small <b>", "--cards", "RTX 3090, B200"]
    assert cli.main(["plan", CONFIG, *change, "--gpu", "RTX 4070", *pictures]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("FITS")
    assert "32-true" in captured.out
    assert captured.err.count("wrote") == 5
    page = (tmp_path / "r.html").read_text("utf-8")
    assert "<title>Small &lt;b&gt;</title>" in page
    assert "B200" in page
    assert "RTX 3070" not in page
    assert json.loads((tmp_path / "t.json").read_text())["otherData"]["batch_size"] > 0
    assert pickle.loads((tmp_path / "s.pickle").read_bytes())["segments"]
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "p.svg").read_text().lstrip().startswith("<?xml")


def test_json_and_exit_codes(capsys):
    assert cli.main(["plan", CONFIG, "--gpu", "RTX 4090", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["schema"], answer["kind"]) == (cli.JSON_SCHEMA, "plan")
    assert answer["report"]["changed"] is False
    assert cli.main(["plan", CONFIG, "--budget", "100MiB", "--allow", ""]) == 1
    assert "DOES NOT FIT" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["missing.yaml"], "missing.yaml"),
        ([], "no model that can be built"),
        ([CONFIG, "--plot", "x.bmp"], ".png"),
        ([CONFIG, "--cards", "RTX 4099"], "RTX 4090"),
        ([CONFIG, "--set", "batch_size=0"], "batch_size"),
        ([CONFIG, "--html", "/proc/no/r.html"], "was not written"),
    ],
)
def test_bad_usage(arguments, said, capsys):
    assert cli.main(["plan", *arguments, "--gpu", "RTX 4090"]) == 2
    assert said in capsys.readouterr().err


def test_a_missing_library_is_told_before_any_work(monkeypatch, capsys):
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert cli.main(["plan", CONFIG, "--gpu", "RTX 4090", "--plot", "x.png"]) == 3
    captured = capsys.readouterr()
    assert "vram-guard[plot]" in captured.err
    assert captured.out == ""
