"""The benchmark that holds the cost model against published steps with and without one technique."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from benchmarks.harness.networks.convolutional import resnet101
from benchmarks.harness.networks.giant_vit import GiantViT
from benchmarks.harness.networks.gpt import VOCABULARY, Gpt
from benchmarks.step_time_techniques import (
    TABLES,
    Answer,
    Run,
    is_near,
    lines,
    predicted_seconds,
    ranked_right,
    shares,
    single_changes,
)

DOCS = Path(__file__).parents[2] / "docs"
BEGIN, END = "<!-- table: techniques -->", "<!-- end: techniques -->"


def test_networks_have_the_parameters_that_are_published() -> None:
    with torch.device("meta"):
        sizes = [
            sum(parameter.numel() for parameter in model.parameters())
            for model in (Gpt(fused=False, vocabulary=VOCABULARY), GiantViT(45), resnet101())
        ]
    # timm 1.0.31 counts as many for vit_giant_patch14_dinov2 with 45 classes and img_size=224.
    assert sizes == [124_439_808, 1_134_838_829, 44_549_160]


def test_the_attention_that_is_written_out_is_the_fused_one() -> None:
    written_out, fused = (Gpt(fused=fused, vocabulary=64) for fused in (False, True))
    weights = {name: value for name, value in written_out.state_dict().items() if not name.endswith("seen")}
    fused.load_state_dict(weights)
    tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(written_out(tokens), fused(tokens))


def test_rows_are_compared_with_the_row_without_their_technique() -> None:
    plain = Answer(Run("plain", 2.0, None), 1.0)
    faster = Answer(Run("faster", 1.0, None, "plain"), 0.6)
    slower = Answer(Run("slower", 2.1, None, "plain"), 0.9)
    answers = [plain, faster, slower]
    assert list(single_changes(answers)) == [(plain, faster), (plain, slower)]
    assert ranked_right(plain, faster)
    assert not ranked_right(plain, slower)
    assert is_near(plain, slower)
    assert not is_near(plain, faster)
    assert list(lines(answers)) == [
        ("plain", "2,000.0", "1,000.0"),
        ("faster", "1,000.0", "600.0", "0.50", "0.60", "+20%", ""),
        ("slower", "2,100.0", "900.0", "1.05", "0.90", "-14%", "wrong"),
    ]
    assert shares(list(single_changes(answers))) == "1 of 2, measured at least 10% apart: 1 of 1"


@pytest.mark.parametrize("table", list(TABLES))
def test_each_row_names_an_earlier_one(table: str) -> None:
    runs = TABLES[table].runs
    names = [run.name for run in runs]
    assert len(set(names)) == len(names) > 2
    assert all(run.against in names[:number] for number, run in enumerate(runs) if run.against)


def test_steps_of_optimizers_are_predicted_alone() -> None:
    loop, lists = (predicted_seconds("optimizers", f"SGD, {form}") for form in ("for-loop", "foreach"))
    assert loop == pytest.approx(314 * 8e-6)
    # Read twice and written once, at 900 GB/s.
    assert lists == pytest.approx(3 * 4 * 44_549_160 / 900e9, rel=0.01)


def test_the_pages_show_every_row_as_it_was_measured() -> None:
    shown = [_shown(language) for language in ("en", "zh_cn")]
    assert shown[0] == shown[1]
    answers = [[Answer(run, 1.0) for run in table.runs] for table in TABLES.values()]
    made = [cells for table in answers for cells in lines(table)]
    assert [row[0] for row in shown[0]] == [cells[1] for cells in made]
    assert [row[2:3] for row in shown[0]] == [list(cells[3:4]) for cells in made], "measured ratios"


def _shown(language: str) -> list[list[str]]:
    """The numbers of each row of the page's tables: milliseconds, the model's, both ratios and the error."""
    text = (DOCS / language / "cost-model.md").read_text(encoding="utf-8")
    assert text.count(BEGIN) == text.count(END) == 1
    rows = text.partition(BEGIN)[2].partition(END)[0].splitlines()
    cells = [[cell.strip() for cell in row.split("|")[2:-1]] for row in rows if row.startswith("|")]
    return [[cell for cell in row if re.match(r"[-+\d]", cell)] for row in cells if re.match(r"[\d,]+\.\d$", row[0])]
