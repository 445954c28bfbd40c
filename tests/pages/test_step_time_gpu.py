"""The table of step times that were measured on a GPU."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import step_time_gpu
from benchmarks.gpu.cases import Case
from benchmarks.gpu.compare import OWN_RESULTS
from benchmarks.gpu.records import RESULTS, Measured, read_results
from benchmarks.step_time_gpu import (
    BEGIN,
    END,
    HEADS,
    PAGE,
    Row,
    beside_step,
    is_near,
    measured_rows,
    pairs,
    ranked_right,
    write,
)

DOCS = Path(__file__).parents[2] / "docs"
GPT2 = Case("gpt2", 8)


@pytest.mark.parametrize(
    ("case", "size", "made_batch", "beside"),
    [
        (Case("resnet50", 64, history=True), 64, False, ("batch", "recorder")),
        (Case("resnet50", 64), 64, False, ("batch",)),
        (Case("lstm", 128, history=True), 128, False, ("recorder",)),
        (Case("lstm", 128), 128, False, ()),
        (Case("resnet50", 64, history=True), 64, True, ()),
    ],
)
def test_rows_say_what_was_measured_beside_the_step(case, size, made_batch, beside) -> None:
    measured = Measured(case, "ok", size, update_seconds=[0.05], batch_seconds=[0.02] if made_batch else [])
    assert beside_step(measured) == beside


def test_pairs_of_one_network_are_compared_by_the_sample_and_others_by_the_step() -> None:
    one = Row(GPT2, 8, measured=0.08, beside=(), predicted=0.04)
    larger = replace(one, batch_size=16, measured=0.12, predicted=0.06)  # 7.5 ms a sample, modelled 3.75
    other = Row(Case("bert", 8), 8, measured=0.1, beside=(), predicted=0.03)
    assert pairs([one, larger, other], one_network=True) == [(one, larger)]
    assert pairs([one, larger, other], one_network=False) == [(one, other), (larger, other)]
    assert ranked_right(one, larger)
    assert not ranked_right(one, other)
    assert ranked_right(larger, other)
    assert is_near(one, replace(one, measured=0.078))
    assert not is_near(one, larger)
    twice = replace(one, case=replace(GPT2, accumulate=2), measured=0.2)
    assert twice.samples == 16
    assert not is_near(one, twice)


def test_the_model_is_asked_with_the_switches_of_the_case() -> None:
    plain, tf32 = (
        step_time_gpu.with_prediction(Row(Case("lstm", 4, optimizer="adam", tf32=tf32), 4, 0.1, ()), "H200", 132)
        for tf32 in (False, True)
    )
    assert plain.predicted > tf32.predicted > 0
    assert plain.predicted == max(plain.device, plain.host)


@pytest.mark.parametrize("gpu", ["H100", "H200"])
def test_the_pages_show_every_row_as_it_was_measured(gpu: str) -> None:
    shown = {}
    begin = BEGIN.format(gpu=gpu)
    for language in HEADS:
        text = (DOCS / language / PAGE).read_text(encoding="utf-8")
        title = f"## {gpu}" if language == "zh_cn" else f"## Steps measured on an {gpu}"
        assert (text.count(begin), text.count(title)) == (1, 1)
        table = text.partition(begin)[2].partition(END)[0]
        shown[language] = re.findall(r"^\| (.+?) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|", table, flags=re.MULTILINE)
    assert shown["en"] == shown["zh_cn"]
    (path,) = OWN_RESULTS.glob(f"{gpu.lower()}*/{RESULTS}")
    measured = [(row.case.name, f"{1000 * row.measured:.1f}") for row in measured_rows(read_results(path).measured)]
    assert [(name, seconds) for name, seconds, *_ in shown["en"]] == measured
    assert measured


def test_tables_are_put_between_their_marks(tmp_path) -> None:
    begin = BEGIN.format(gpu="H200")
    for language in HEADS:
        page = tmp_path / language / PAGE
        page.parent.mkdir()
        page.write_text(f"before\n{begin}\nold\n{END}\nafter\n{begin[:9]}", encoding="utf-8")
    row = Row(GPT2, 8, measured=0.08, beside=("recorder",), predicted=0.04, device=0.04, host=0.005)
    write([row, replace(row, batch_size=16, beside=())], "H200 NVL", tmp_path)
    text = (tmp_path / "en" / PAGE).read_text(encoding="utf-8")
    assert text.startswith(f"before\n{begin}\n\n| case |")
    assert "| gpt2 b8 32-true adamw | 80.0 | 40.0 | 0.50 | 40.0 | 5.0 | recorder |" in text
    assert "old" not in text
    assert text.endswith(f"{END}\nafter\n{begin[:9]}")
    with pytest.raises(ValueError, match="step times on the H100"):
        write([row], "H100 80GB HBM3", tmp_path)
