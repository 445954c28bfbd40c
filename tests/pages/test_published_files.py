"""Published rows: predictions against peaks that others measured, files of rows, rows that fail, the pages."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest
from each import each

from vram_guard.budget import Budget
from vram_guard.budget.margins import margins, measured_margin
from vram_guard.errors import InvalidInputError

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.gpu import margin
from benchmarks.harness import pages, records, statistics
from benchmarks.published import pages as accuracy
from benchmarks.published import source, xmem

MIB = 2**20
TRAININGS = Path(__file__).parents[2] / "benchmarks" / "published" / "results" / "trainings.json"
ROW = records.Row("runs", "a 1", 100 * MIB, 98 * MIB, "symbolic", 0.5, ran=True, fits=True, tools={"other": 150 * MIB})

# Ten rows over five models, three optimizers and three GPUs. Not all rows are this near: the benchmark prints every
# one, misses included. The limit is the promise for this stage, 5%, with no constant added.
WITHIN_FIVE_PERCENT = {
    ("EleutherAI/gpt-neo-125M", "SGD", "15"),
    ("EleutherAI/gpt-neo-125M", "Adam", "29"),
    ("cerebras/Cerebras-GPT-111M", "AdamW", "16"),
    ("cerebras/Cerebras-GPT-111M", "SGD", "5"),
    ("distilbert/distilgpt2", "AdamW", "28"),
    ("distilbert/distilgpt2", "AdamW", "54"),
    ("facebook/opt-125m", "AdamW", "31"),
    ("facebook/opt-350m", "AdamW", "7"),
    ("T5-small", "AdamW", "36"),
    ("T5-small", "SGD", "15"),
}


def test_measured_peaks_are_predicted_within_five_percent() -> None:
    rows = {(row["model"], row["optimizer"], row["batch_size"]): row for row in xmem.TRANSFORMERS.rows()}
    errors = {name: xmem.predict(rows[name]).error for name in WITHIN_FIVE_PERCENT}
    assert {name: error for name, error in errors.items() if abs(error) > 0.05} == {}


@each(
    ("changes", "reason"),
    [
        ({"version": 2}, "'version' is 2, this program reads 1"),
        ({"rows": [{**dataclasses.asdict(ROW), "colour": 1}]}, r"rows\[0\]: unknown field 'colour'"),
        ({"rows": [{**dataclasses.asdict(ROW), "predicted": "98"}]}, r"rows\[0\]: predicted: expected int, found str"),
        ({"rows": [{**dataclasses.asdict(ROW), "predicted": 0}]}, r"rows\[0\]: predicted: expected bytes above 0"),
        ({"rows": [5]}, r"rows\[0\]: expected an object"),
    ],
)
def test_a_wrong_file_is_refused_by_its_name_and_the_field(tmp_path, changes, reason):
    path = tmp_path / "rows.json"
    results = records.Results([ROW], {"b": "no library"}, {"c": "Traceback"}, {"runs": {"torch": "2.0"}})
    records.write(results, path)
    assert records.read(path) == results
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(InvalidInputError, match=reason) as raised:
        records.read(path)
    assert str(path) in str(raised.value)


def test_a_row_that_fails_is_told_with_its_traceback_and_the_rest_goes_on():
    def predict(number):
        if number == 1:
            raise records.NotReproducible("no library")
        if number == 2:
            raise ZeroDivisionError("broken")
        return [dataclasses.replace(ROW, name=str(number))]

    lines = []
    rows = source.Source("runs", lambda: range(4), str, predict)
    found = source.run(rows, tell=lines.append)
    assert [row.name for row in found.rows] == ["0", "3"]
    assert found.not_reproduced == {"runs: 1": "no library"}
    assert "ZeroDivisionError: broken" in found.failed["runs: 2"]
    assert len(lines) == 3


def test_the_table_holds_us_and_the_others_against_the_same_rows():
    rows = [
        ROW,
        dataclasses.replace(ROW, predicted=110 * MIB, tools={}),
        dataclasses.replace(ROW, ran=False, predicted=500 * MIB),  # no peak; and the wrong verdict
        dataclasses.replace(ROW, judged=False, predicted=900 * MIB, ran=None),
    ]
    ours, other = statistics.lines(rows)
    assert (ours.rows, ours.wrong, ours.verdicts) == (2, 1, 3)
    assert ours.errors.median == pytest.approx(0.06)
    assert ours.errors.p90 == pytest.approx(0.1)
    assert (other.tool, other.rows, other.errors.bias) == ("other", 1, pytest.approx(0.5))
    assert (other.ours_there.median, other.ours_there.p90) == (pytest.approx(0.02), pytest.approx(0.02))


def test_tables_are_filled_in_where_their_rows_are_and_left_where_not(tmp_path, capsys):
    page = tmp_path / "lab" / "accuracy.md"
    page.parent.mkdir()
    table = "<!-- table: {0} -->\n| a | b |\n| --- | --- |\n| old | {0} |\n<!-- end -->\n"
    page.write_text(f"before\n{table.format('liger')}{table.format('timm')}after\n")
    row = dataclasses.replace(ROW, source="Liger-Kernel's operators")
    results = records.Results([row, dataclasses.replace(row, predicted=101 * MIB)], {"x": "why"}, {"y": "Traceback"})
    accuracy.show(results, tmp_path)
    printed = capsys.readouterr().out
    assert "not reproduced: x: why" in printed
    assert "FAILED: y" in printed
    text = page.read_text()
    assert text.startswith(
        "before\n<!-- table: liger -->\n\n| a | b |\n| --- | --- |\n| 2 | 1.500% | 2.000% | 0 | -2% |\n"
    )
    assert text.endswith(f"{table.format('timm')}after\n")
    with pytest.raises(InvalidInputError, match="0 places for the table nowhere"):
        pages.fill("accuracy.md", {"nowhere": "text"}, tmp_path)


def test_the_bound_of_networks_with_convolutions_holds_for_runs_that_no_rule_was_read_off():
    """These are of other sources and other networks than those that the bound is made of."""
    rows = [row for row in margin.read_rows(TRAININGS) if row.tier in margin.PROMISING]
    shortfalls = [statistics.shortfall(row) for row in margin.distinct(rows)]
    bound = measured_margin("symbolic", "convolutions in float32")
    assert bound.rows == 28
    assert (sum(one <= bound.rarely for one in shortfalls), len(shortfalls)) == (46, 47)


def test_the_default_margin_says_where_it_comes_from():
    usual = measured_margin()
    budget = Budget.of("24GiB")
    assert (budget.margin, budget.margin_source) == (usual.fraction, usual.source)
    assert usual.source in budget.explain()
    for (tier, network), found in margins().items():
        assert budget.for_tier(tier, network).margin == found.fraction
        assert found.source in budget.for_tier(tier, network).explain()
        assert 0 < found.fraction < 0.2
    assert budget.for_tier("formula").margin == usual.fraction
    for given in (Budget.of("24GiB", margin=0.1), Budget.of(Budget.of("24GiB"), margin=0.1)):
        assert given.margin_source == ""
        assert given.for_tier("partly symbolic") == given
