"""The comparison with other estimators: formulas by their own examples, and the pages that come out."""

from __future__ import annotations

import re
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from docs_blocks import pinned

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.harness.records import Results, Row
from benchmarks.peers import bench, tools
from benchmarks.peers.workloads import workloads

GB = 10**9
ROOT = Path(__file__).parents[2]
MEM_TRACKER = "torch.distributed._tools.mem_tracker"


# Formulas, held to the examples that their sources print


def test_deepspeeds_own_example_of_t5_3b_on_eight_gpus():
    """Its documentation: 2851M parameters, 32M in the largest layer: 15.93 GB and 6.10 GB a GPU (in 2**30 bytes)."""
    model = tools.Model(2_851_000_000, 32_000_000)
    assert round(tools.deepspeed_zero2(model, gpus=8) / 2**30, 2) == 15.93
    assert tools.deepspeed_zero3(model, gpus=8) / 2**30 == pytest.approx(6.10, abs=0.011)


def test_deepspeeds_own_example_of_t5_large_on_four_gpus():
    model = tools.Model(737_670_000, 32_900_000)
    assert tools.deepspeed_zero3(model, gpus=4) >> 20 == 3291


def test_the_grid_guides_formula():
    # 8 x 1 x 128 x 128 x 256 x 4 bytes x 10 layers, by hand. (The guide's printed example says eight times as much.)
    assert tools.grid_guide(8, 1, 128, 128, 256, 10) == 134_217_728 * 10 * 10 // 7


def test_the_twin_guides_formula():
    assert tools.twin_guide(1000, 1, 0) == 16_000
    assert tools.twin_guide(1000, 2, 0) == 20_000
    # 5 billion parameters of the guide's example, float16 there: 4 x 5 x 2 GB = 40 GB; float32 doubles it.
    assert tools.twin_guide(5 * GB, 1, 0) == 80 * GB
    assert tools.twin_guide(0, 1, 10) == 50


# Tools


def small(**changes):
    return replace(workloads()["fno"], batch_size=2, **changes)


def asked(tool):
    return Row(**tools.answer(tool, "fno"))


@pytest.fixture
def one_small(monkeypatch):
    monkeypatch.setattr(tools, "workloads", lambda: {"fno": small()})


@pytest.mark.parametrize("tool", ["vram_guard", "MemTracker", "DeepSpeed ZeRO-2", "DeepSpeed ZeRO-3", "guide: twin"])
def test_a_tool_answers(one_small, tool):
    if tool == "MemTracker":
        pytest.importorskip(MEM_TRACKER, reason="this torch has no MemTracker")
    row = asked(tool)
    assert row.reason == ""
    assert row.predicted > 0
    assert row.seconds >= 0


def test_accelerate_counts_the_weights_four_times(one_small):
    pytest.importorskip("accelerate")
    parameters = tools._counted(small()).parameters
    assert asked("Accelerate").predicted == 4 * 4 * parameters


def test_published_measurements_are_those_of_the_data_files():
    measured = {name: step.measured.peak for name, step in workloads().items() if step.measured}
    assert measured == {
        "distilbert/distilgpt2": 6_920_601_600,
        "facebook/opt-125m": 7_319_060_480,
        "EleutherAI/gpt-neo-125M": 3_982_491_648,
        "T5-small": 6_517_948_416,
        "vgg16": 11_274_289_152,
    }


def test_frozen_and_tied_parameters():
    twins = workloads()["twins"]
    assert tools._counted(twins).parameters == 2 * tools._counted(twins, trained_only=True).parameters
    assert tools._counted(workloads()["gpt2"]).parameters == 124_439_808  # published; the embedding is tied
    assert tools._counted(workloads()["vgg16"]).parameters == 138_357_544


def test_what_is_not_installed_is_listed_with_the_reason(one_small, monkeypatch):
    monkeypatch.setitem(sys.modules, "kitsune", None)
    row = asked("torch-kitsune")
    assert (row.predicted, row.reason) == (None, "not installed: pip install torch-kitsune")


def test_a_tool_that_fails_is_told_with_its_traceback(one_small, monkeypatch):
    def fails(step):
        raise ValueError("no such thing")

    monkeypatch.setitem(tools.TOOLS, "bad", tools.Tool("bad", fails))
    row = asked("bad")
    assert row.reason == "failed: ValueError: no such thing"
    assert "in fails" in row.details["traceback"]


# The command


def asked_slowly(tool, step):
    threading.Event().wait()  # for ever: whoever comes back from asking has left it behind


def test_a_tool_that_hangs_is_left_behind(monkeypatch):
    monkeypatch.setattr(bench, "answer", asked_slowly)
    answers = bench.ask_everything(["fno"], ["MemTracker"], limit=0.5)
    (row,) = answers.rows
    assert (row.source, row.predicted) == ("MemTracker", None)
    assert row.reason == "gave no answer within 0.5 s and was ended"


@pytest.mark.skipif(not (pinned("torch") and pinned("transformers")), reason="the figures are of other releases")
def test_our_figures_on_the_pages_are_what_we_answer_today():
    """The column of vram_guard, and the allocated peaks of the table of speed."""
    found = {asked.title: tools.traced(asked) for asked in workloads().values()}
    page = ROOT / "docs" / "lab" / "peers.md"
    rows = [line.strip("| ").split(" | ") for line in page.read_text(encoding="utf-8").splitlines()]
    shown = {row[0]: row[2].split()[0] for row in rows if row[0] in found}
    assert shown == {title: f"{estimate.peak_reserved / 2**30:.2f}" for title, estimate in found.items()}
    shown = re.findall(r"^(\w.*\S) +vram_guard .* ([\d.]+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(shown) == 3
    for title, peak in shown:
        assert peak == f"{found[f'{title}, AdamW'].peak_allocated / 2**30:.2f}", title


def test_the_page_shows_answers_errors_seconds_and_reasons(tmp_path):
    ours = {"source": "vram_guard", "tier": "symbolic"}
    none = {"source": "guide: grid", "predicted": None, "seconds": None, "tier": "", "reason": "does not apply"}
    first = {"name": "A, 1 x 2, AdamW", "measured": 10 * 2**30, "details": {"gpu": "RTX 3060"}}
    second = {"name": "B, 3 x 4, AdamW", "measured": None}
    rows = [
        *(Row(**ours, **first, predicted=9 * 2**30, seconds=0.5), Row(**none, **first)),
        *(Row(**ours, **second, predicted=2**30, seconds=1.5), Row(**none, **second)),
    ]
    page = tmp_path / "lab" / "peers.md"
    page.parent.mkdir()
    names = ("machine", "answers", "seconds", "reasons")
    page.write_text("".join(f"<!-- table: {name} -->\n| a |\n| - |\n<!-- end -->\n" for name in names))
    results = Results(rows, environment={"python": "3.11", "torch": "2.13", "cores": 2})
    bench.write_page(results, tmp_path)
    text = page.read_text(encoding="utf-8")
    assert "| A, 1 x 2, AdamW | 10.00 (RTX 3060) | 9.00 (-10.0%) | no answer |" in text
    assert "| B, 3 x 4, AdamW | - | 1.00 | no answer |" in text
    assert "10.0% (1/1) | - |" in text
    assert "| vram_guard | 1.00 | 1.50 | 2/2 |" in text
    assert "- guide: grid: does not apply (A, B)" in text
    bench.draw(results, tmp_path / "images" / "peers.png")
    assert (tmp_path / "images" / "peers.png").read_bytes().startswith(b"\x89PNG")
