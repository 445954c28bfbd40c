"""Published rows of sharded trainings: models of the published sizes, rows within the promise, the page."""

from __future__ import annotations

import pytest
import torch

from benchmarks.harness.records import Results, Row
from benchmarks.sharded import command, rows
from benchmarks.sharded.llama import SIZES, Llama, Sizes
from benchmarks.sharded.torchtitan import LOSSES, Recipe

GIB = 2**30


@pytest.mark.parametrize(
    ("name", "parameters"), [("8B", 8_030_261_248), ("Llama-2-7B", 6_738_415_616), ("70B", 70_553_706_496)]
)
def test_models_have_the_published_sizes(name, parameters):
    with torch.device("meta"):
        model = Llama(SIZES[name], 16)
    assert sum(weight.numel() for weight in model.parameters()) == parameters


def test_every_norm_and_every_loss_computes_the_same():
    torch.manual_seed(0)
    small = Sizes(width=32, layers=2, heads=4, key_heads=2, multiple_of=16, vocabulary=50)
    models = [Llama(small, 8, norm) for norm in ("composed", "late", "native")]
    for weight in models[0].parameters():
        torch.nn.init.normal_(weight, std=0.3)
    angles = torch.outer(torch.arange(8.0), 0.1 ** torch.arange(4.0))
    for model in models:
        model.load_state_dict(models[0].state_dict())
        model.angles = torch.polar(torch.ones_like(angles), angles)
    batch = torch.randint(0, 50, (2, 8)), torch.randint(0, 50, (2, 8))
    outputs = [model(batch[0]) for model in models]
    torch.testing.assert_close(outputs[1], outputs[0])
    torch.testing.assert_close(outputs[2], outputs[0])
    losses = [loss(models[0], batch) for loss in LOSSES.values()]
    torch.testing.assert_close(losses[1], losses[0])
    torch.testing.assert_close(losses[2][0], losses[0])


@pytest.mark.torch_since(2, 6)
def test_the_log_of_a_run_of_torchtitan_is_predicted_to_its_last_digit():
    """Pull request 699: 49.58594 GiB reserved with expandable segments, 41.17145 GiB active."""
    found = rows.predict(["6a6f755"])
    assert not found.failed
    reserved, active = found.rows
    assert f"{reserved.predicted / GIB:.5f}" == "49.58594"
    assert abs(active.predicted / GIB - 41.17145) < 1e-4
    assert reserved.details["default"] > 1.03 * reserved.details["expandable"]


def test_every_row_names_a_training_and_has_its_reason():
    for record in rows.all_rows():
        assert record["recipe"] in rows.TRAININGS
        assert record["allocator"] in ("default", "expandable", "unpublished")
        assert (record["judged"] == "yes") == (not record["why"])
        assert not record["why"] or record["why"] in command.REASONS


@pytest.mark.torch_since(2, 6)
def test_the_first_step_alone_takes_less(monkeypatch):
    monkeypatch.setitem(SIZES, "two layers", Sizes(64, 2, 4, 2, multiple_of=16, vocabulary=128))
    timeline = rows.trace_at(Recipe("two layers", 2, 1, 64).step(), 1)
    first = rows.until_second_step(timeline)
    assert {phase.step for phase in first.phases} == {0, 1}
    assert 0 < first.at(1).peak_allocated < timeline.at(1).peak_allocated


@pytest.mark.torch_since(2, 6)
def test_older_reductions_take_their_inputs_from_the_stream_that_reduces(monkeypatch):
    monkeypatch.setitem(SIZES, "two layers", Sizes(64, 2, 4, 2, multiple_of=16, vocabulary=128))
    now, before = (
        rows.trace_at(Recipe("two layers", 2, 1, 64, older=older).step(), 1).blocks for older in (False, True)
    )
    assert [block.size for block in now] == [block.size for block in before]
    streams = [(one.stream, other.stream) for one, other in zip(now, before, strict=True) if one.stream != other.stream]
    assert len(streams) == 2 * 3, "a block's, a block's, the rest's, in two steps"
    assert {one for one, _ in streams} == {0}
    assert 0 not in {other for _, other in streams}


def test_the_page_shows_both_settings_and_the_run_s_own_in_bold(tmp_path):
    def row(predicted, judged=True):
        facts = {"by": "log", "measure": "reserved", "moment": "steady", "allocator": "expandable", "gib": "10.00"}
        facts |= {"why": "" if judged else "norm", "default": 11 * GIB, "expandable": round(predicted * GIB)}
        sizes = 10 * GIB, round(predicted * GIB)
        return Row("s", "8B", *sizes, "symbolic", 1.0, judged=judged, details=facts)

    page = tmp_path / "lab" / "sharded.md"
    page.parent.mkdir()
    names = ("machine", "found", "rows", "others")
    page.write_text("".join(f"<!-- table: {name} -->\n| a |\n| - |\n<!-- end -->\n" for name in names))
    found = Results(
        rows=[row(10.01), row(10.1), row(14.0, judged=False)],
        environment={"python": "3.11", "torch": "2.13", "cores": 2},
    )
    command.write_page(found, tmp_path)
    text = page.read_text(encoding="utf-8")
    assert "| 10.00 | 11.00 (+10.00%) | **10.01 (+0.10%)** |" in text
    assert "**2 figures with a fully published recipe: median error 0.550%, largest 1.00%.**" in text
    assert command.REASONS["norm"] in text
