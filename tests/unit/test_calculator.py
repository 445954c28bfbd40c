"""The rule of thumb: exact arithmetic, exact advice, and what configs call its numbers."""

from __future__ import annotations

import math

import pytest
from each import each
from hypothesis import example, given
from hypothesis import strategies as st

from vram_guard.closed_form.calculator import Calculation, Network
from vram_guard.closed_form.from_config import parse_request
from vram_guard.errors import InvalidInputError
from vram_guard.step import LARGEST_BATCH

GB = 10**9


sizes = st.integers(1, 600)
networks = st.builds(Network, st.integers(1, 64), sizes, sizes, sizes, st.integers(1, 40), st.integers(1, 8))
questions = st.builds(Calculation, networks, st.integers(1, 80 * GB), st.sampled_from([0.6, 0.7, 1]))


@given(questions)
@example(Calculation(Network(1, 1, 1, 1, 1), 80 * GB))
@example(Calculation(Network(1, 1, 1, 1, 1, bytes_per_element=1), LARGEST_BATCH, 1))
@example(Calculation(Network(1, 1, 1, 1, 1, bytes_per_element=1), LARGEST_BATCH - 1, 1))
def test_the_largest_batch_is_exact_and_one_that_a_step_may_have(question):
    most = question.largest_batch
    assert most == 0 or question.with_network(batch=most).fits
    assert most == LARGEST_BATCH or not question.with_network(batch=most + 1).fits


def test_no_batch_is_recommended_that_no_step_may_have():
    question = Calculation(Network(LARGEST_BATCH, 1, 1, 1, 1), 80 * GB)
    assert question.largest_batch == LARGEST_BATCH == question.with_amp.largest_batch
    assert question.accumulation == (LARGEST_BATCH, 1)


@given(questions)
def test_the_largest_resolution_is_exact(question):
    network, size = question.network, question.largest_resolution
    long = max(network.height, network.width)
    if size is None:
        assert not question.with_network(height=1, width=1).fits
        return
    assert question.with_network(height=size[0], width=size[1]).fits
    assert max(size) <= long
    # The next longer side in the same proportions does not fit.
    longer = max(size) + 1
    other = max(1, min(network.height, network.width) * longer // long)
    assert longer > long or not question.with_network(height=longer, width=other).fits
    if network.height == network.width:
        assert size[0] == size[1]


@given(questions)
def test_accumulation_keeps_the_effective_batch(question):
    split = question.accumulation
    batch, most = question.network.batch, question.largest_batch
    expected = max((size for size in range(1, batch + 1) if batch % size == 0 and size <= most), default=None)
    assert split == (None if expected is None else (expected, batch // expected))


def test_a_share_is_taken_as_its_digits():
    assert Calculation(Network(1, 1, 1, 1, 1), 10, 0.7).allowed == 7
    for share in (0, -0.1, 1.01, 70, math.nan):
        with pytest.raises(InvalidInputError):
            Calculation(Network(1, 1, 1, 1, 1), 10, share)


def test_a_batch_of_billions_takes_no_time():
    question = Calculation(Network(2**31 - 1, 1, 1, 1, 1), 10**9)
    assert question.accumulation == (1, 2**31 - 1)


CONFIG = {
    "model": {"name": "fno", "width": 64, "num_layers": 4},
    "dataset": {"resolution": [96, 128]},
    "train": {"batch_size": 8, "accumulation_steps": 4, "use_amp": True},
    "valid": {"batch_size": 1},
    "gpu": "RTX 4090",
}


def test_numbers_are_found_wherever_a_config_has_them():
    found = parse_request({**CONFIG, "hidden_dim": 64}, {})
    network = found.network()
    assert (network.batch, network.height, network.width, network.hidden_dim) == (8, 96, 128, 64)
    assert network.bytes_per_element == 2  # use_amp
    assert found.numbers["accumulate"] == 4
    assert (found.gpu, found.model, found.precision) == ("RTX 4090", "fno", "16-mixed")
    assert found.places["batch"] == "train.batch_size"


def test_options_come_before_the_config():
    found = parse_request(
        {**CONFIG, "hidden_dim": 64}, {"batch": 2, "gpu_memory": "80GB", "model": "m:f", "height": 32}
    )
    network = found.network()
    assert (network.batch, network.height, network.width) == (2, 32, 128)
    assert (found.memory, found.gpu, found.model) == ("80GB", None, "m:f")


def test_what_is_missing_is_named_with_the_names_it_may_have():
    with pytest.raises(InvalidInputError, match=r"--hidden-dim.*d_model"):
        parse_request(CONFIG, {}).network()


def test_one_number_in_two_places():
    with pytest.raises(InvalidInputError, match=r"batch is given twice.*a.batch_size is 4, b.batch_size is 8"):
        parse_request({"a": {"batch_size": 4}, "b": {"batch_size": 8}}, {})
    same = parse_request({"a": {"batch_size": 4}, "b": {"batch_size": 4}}, {})
    assert same.numbers["batch"] == 4


@each("value", [0, -1, 1.5, True, "8", float("nan"), 2**63, None.__class__, [8]])
def test_nonsense_numbers_in_a_config(value):
    with pytest.raises(InvalidInputError, match=r"train\.batch_size"):
        parse_request({"train": {"batch_size": value}}, {})


@each("value", [[1, 2, 3], "128", True, 1.5, [], ["a", "b"]])
def test_nonsense_resolutions(value):
    with pytest.raises(InvalidInputError, match=r"data\.resolution"):
        parse_request({"data": {"resolution": value}}, {})


@each(
    ("entry", "precision"),
    [
        ({"fp16": True}, "16-mixed"),
        ({"bf16": True}, "bf16-mixed"),
        ({"bf16": False}, "32-true"),
        ({"precision": "bf16-true"}, "bf16-true"),
        ({"precision": 16}, "16-mixed"),
        ({"mixed_precision": "no"}, "32-true"),
        ({"use_mixed_precision": True, "precision": 32}, "16-mixed"),
        ({}, None),
    ],
)
def test_precisions_as_configs_write_them(entry, precision):
    assert parse_request({"train": entry}, {}).precision == precision


def test_an_unknown_precision():
    with pytest.raises(InvalidInputError, match="bf16-mixed"):
        parse_request({"precision": "bf16-mixt"}, {})
