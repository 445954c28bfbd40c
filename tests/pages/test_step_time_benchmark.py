"""The benchmark that holds the cost model against published throughputs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.harness.networks.mpt import SIZES, Mpt
from benchmarks.step_time_mpt import CARDS, is_near, pairs, predicted, published, ranked_right


@pytest.mark.parametrize(
    ("model", "length", "stated"),
    [
        ("125m", 512, 124_131_840),
        ("350m", 512, 354_412_544),
        ("760m", 512, 758_111_232),
        ("1b", 512, 1_312_804_864),
        ("3b", 512, 2_647_905_280),
        ("7b", 2048, 6_658_859_008),
    ],
)
def test_models_have_the_parameters_that_the_table_states(model: str, length: int, stated: int) -> None:
    with torch.device("meta"):
        network = Mpt(SIZES[model], length)
    biases = (11 * SIZES[model].layers + 1) * SIZES[model].width
    assert sum(parameter.numel() for parameter in network.parameters()) + biases == stated


def test_pairs_are_of_rows_that_were_measured_apart() -> None:
    rows = published()
    assert {row.card for row in rows} == set(CARDS)
    assert {row.model for row in rows} == set(SIZES)
    one, other = rows[:2]
    assert list(pairs([one, other, one])) == [(one, other), (other, one)]
    slower, faster = (replace(one, measured=measured, predicted=measured) for measured in (100.0, 109.0))
    assert ranked_right(slower, faster)
    assert not ranked_right(slower, replace(faster, predicted=50.0))
    assert is_near(slower, faster)
    assert not is_near(slower, replace(faster, measured=120.0))


@pytest.mark.torch_since(2, 6)
def test_larger_micro_batches_are_predicted_to_be_faster_as_they_were_measured() -> None:
    row = next(row for row in published() if (row.model, row.micro_batch, row.length) == ("125m", 32, 2048))
    small = replace(row, micro_batch=1)
    assert predicted(small) < predicted(row)
