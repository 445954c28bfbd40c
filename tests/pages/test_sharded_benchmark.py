"""Published rows of sharded trainings: models of the published sizes, rows within the promise, pages that say it."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.harness.records import Results, Row
from benchmarks.sharded import __main__ as command
from benchmarks.sharded import pages, picture, rows
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


def test_every_row_names_a_training_and_a_reason_that_the_page_knows():
    for record in rows.all_rows():
        assert record["recipe"] in rows.TRAININGS
        assert record["allocator"] in ("default", "expandable", "unpublished")
        assert (record["judged"] == "yes") == (not record["why"])
        for words in pages.TEXTS.values():
            assert not record["why"] or record["why"] in words["reasons"]
            assert words[record["measure"]]
            assert words[record["moment"]]


def test_what_is_not_followed_has_its_reason_in_both_languages():
    reasons = set(rows.not_followed().values())
    assert reasons <= set(pages.TEXTS["zh_cn"]["left_out"])
    assert len(rows.not_followed()) > 20


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


def row(predicted, measured=10.0, judged=True, **details):
    facts = {
        "by": "log",
        "recipe": "8b-8",
        "measure": "reserved",
        "moment": "steady",
        "allocator": "expandable",
        "why": "" if judged else "norm",
        "gib": f"{measured:.2f}",
        "default": round(11 * GIB),
        "expandable": round(predicted * GIB),
        **details,
    }
    return Row("s", "8B", round(measured * GIB), round(predicted * GIB), "symbolic", 1.0, judged=judged, details=facts)


LAYERS = {"parameters": GIB, "gradients": GIB, "optimizer_states": 2 * GIB, "activations": GIB, "temporaries": 0}
FIGURES = {
    "layouts": [{"name": "DDP", **LAYERS, "others": 0, "reserved": 90 * GIB, "expandable": 80 * GIB, "seconds": 1.0}],
    "scales": [{"model": "8B", "gpus": 8, "layout": "FSDP2 8", "batch": 1, "error": "died"}],
    "plans": [
        {
            "model": "8B",
            "gpus": 8,
            "layout": "FSDP2",
            "fits": False,
            "checkpointed": 5,
            "micro_batches": 1,
            "peak": 81 * GIB,
            "step": 0.75,
            "exposed": 0.02,
            "wall": 24.0,
            "processor": 23.0,
            "host": GIB,
        },
        {"model": "405B", "gpus": 512, "error": "too long"},
    ],
    "tools": [
        {
            "name": "no recomputation",
            "ours": {"peak": GIB, "seconds": 1.0, "host": GIB},
            "tracker": {"error": "refused"},
        }
    ],
}
RESULTS = Results(
    rows=[row(10.01), row(10.1), row(14.0, judged=False)],
    not_reproduced={"a | b": "context parallelism"},
    environment={"python": "3.11", "torch": "2.13", "cores": 2},
)


def test_only_rows_with_a_published_recipe_count():
    count, median, worst = pages.summary(RESULTS.rows)
    assert (count, f"{median:.2%}", f"{worst:.1%}") == (2, "0.55%", "1.0%")


@pytest.mark.parametrize("language", ["en", "zh_cn"])
def test_the_page_shows_both_settings_and_marks_the_runs_own(language, tmp_path):
    words = pages.TEXTS[language]
    page = pages.page(RESULTS, FIGURES, words)
    assert "| 10.00 | 11.00 (+10.00%) | **10.01 (+0.10%)** |" in page
    assert words["reasons"]["norm"] in page
    assert "0.550%" in page
    assert "refused" in page
    assert "died" in page
    assert f"| 8B | 8 | FSDP2 8 | 5 | 1 | 81.0 GiB ({words['does_not_fit']}) | 0.8 s (0.0 s) | 24 s (23 s) |" in page
    assert "| 405B | 512 | too long |" in page
    written = pages.write_pages(RESULTS, FIGURES, tmp_path)
    assert [path.name for path in written] == ["sharded.md", "sharded.md", "layouts-en.svg", "layouts-zh_cn.svg"]


def test_bars_are_as_long_as_what_they_show():
    words = pages.TEXTS["en"]
    drawn = picture.svg(FIGURES["layouts"], words)
    assert "90.0 GiB" in drawn
    assert drawn.count("<rect") == 1 + len(picture.COLORS) + len(picture.COLORS)
    assert set(pages.TEXTS["en"]) == set(pages.TEXTS["zh_cn"])
    json.dumps(pages.TEXTS)


def test_the_command_prints_the_errors_and_writes_nothing_for_a_part(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(rows, "predict", lambda only, tell: RESULTS)
    assert command.main(["--only", "8B", "--out", str(tmp_path)]) == 0
    assert "2 rows with a fully published recipe: median error 0.550%, largest 1.00%" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_the_tables_of_scales_are_renewed_alone(tmp_path, monkeypatch):
    pages.write_pages(RESULTS, FIGURES, tmp_path)
    before = (tmp_path / "zh_cn" / "sharded.md").read_text(encoding="utf-8")
    monkeypatch.setattr(command.scales, "every", lambda: [{**FIGURES["scales"][0], "error": "gone"}])
    monkeypatch.setattr(command.scales, "planned", lambda: [FIGURES["plans"][0]])
    assert command.main(["--scales", "--out", str(tmp_path)]) == 0
    after = (tmp_path / "zh_cn" / "sharded.md").read_text(encoding="utf-8")
    assert after == before.replace("died", "gone").replace("| 405B | 512 | too long | - | - | - | - | - |\n", "")
