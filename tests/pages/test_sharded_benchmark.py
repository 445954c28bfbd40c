"""Published rows of sharded trainings: a model of the published size, rows within the promise, the page."""

from __future__ import annotations

import pytest
import torch

from benchmarks.harness.records import Results, Row
from benchmarks.sharded import command
from benchmarks.sharded.llama import LLAMA_8B, Llama

GIB = 2**30


def test_the_model_has_the_published_size():
    with torch.device("meta"):
        model = Llama(LLAMA_8B, 16)
    assert sum(weight.numel() for weight in model.parameters()) == 8_030_261_248


@pytest.mark.torch_since(2, 6)
def test_the_log_of_a_run_of_torchtitan_is_predicted_to_its_last_digit():
    """Pull request 699: 49.58594 GiB reserved with expandable segments, 41.17145 GiB active."""
    reserved, active, first, _later = command.predict(command.rows()[0])
    assert f"{reserved.predicted / GIB:.5f}" == "49.58594"
    assert abs(active.predicted / GIB - 41.17145) < 1e-4
    assert first.details["moment"] == "first step"
    assert first.predicted < reserved.predicted
    assert reserved.details["default"] > 1.03 * reserved.details["expandable"]


def test_the_page_shows_both_settings_and_the_run_s_own_in_bold(tmp_path):
    def row(predicted):
        facts = {"by": "log", "measure": "reserved", "moment": "steady", "allocator": "expandable", "gib": "10.00"}
        facts |= {"default": 11 * GIB, "expandable": round(predicted * GIB)}
        return Row("s", "8B", 10 * GIB, round(predicted * GIB), "symbolic", 1.0, details=facts)

    page = tmp_path / "lab" / "sharded.md"
    page.parent.mkdir()
    names = ("machine", "found", "rows")
    page.write_text("".join(f"<!-- table: {name} -->\n| a |\n| - |\n<!-- end -->\n" for name in names))
    machine = {"python": "3.11", "torch": "2.13", "cores": 2}
    command.write_page(Results(rows=[row(10.01), row(10.1)], environment=machine), tmp_path)
    text = page.read_text(encoding="utf-8")
    assert "| 10.00 | 11.00 (+10.00%) | **10.01 (+0.10%)** |" in text
    assert "**2 figures: median error 0.550%, largest 1.00%.**" in text
