"""Requests of single operators as they were measured on an H100, and as they are predicted without it."""

from __future__ import annotations

import pytest
from each import each

from benchmarks.gpu.operators import command
from benchmarks.gpu.operators.table import OPERATORS

FOUND = command.measured_operators()
BY_NAME = {operator.name: operator for operator in OPERATORS}

#: One of each rule that these measurements led to, and of the rules that they confirmed.
EXACT = (
    *("attention plain head 64 float32", "attention cross 512 77 float32", "attention mask head 256 float32"),
    *("attention EFFICIENT_ATTENTION head 128", "attention grouped plain bfloat16"),
    *("pointwise mish float32", "pointwise gelu bfloat16", "pointwise prelu bfloat16", "pointwise swiglu float32"),
    *("loss binary with logits float32", "loss cross_entropy bfloat16", "loss kl_div float32", "loss ctc blank 0"),
    *("index index_select float32", "index gather bfloat16", "index scatter_add float32"),
    *("norm BatchNorm2d float32", "norm BatchNorm2d float16", "norm BatchNorm3d bfloat16", "norm GroupNorm bfloat16"),
    *("norm InstanceNorm2d affine float16", "norm LayerNorm bfloat16", "norm RMSNorm float32"),
    *("image max_pool2d float32", "image interpolate nearest bfloat16", "image pad reflect float32"),
    *("image adaptive_avg_pool2d float32", "image avg_pool1d bfloat16"),
    *("product mm float32", "product addmm float16", "product matmul broadcast bfloat16", "product einsum autocast"),
    *("recurrent LSTMCell float32", "recurrent GRUCell bfloat16", "recurrent LSTM dropout float32"),
    *("recurrent LSTM batch first bfloat16", "recurrent GRU dropout float32"),
    *("reduced softmax float32", "reduced var bfloat16", "reduced norm float32"),
    *("optimizer Adadelta float32", "optimizer Adafactor float32", "optimizer NAdam for-loop bfloat16"),
)


@pytest.mark.torch_since(2, 11)
@each("name", EXACT)
def test_the_requests_of_an_operator_are_those_that_were_measured(name: str) -> None:
    (measured,) = (one for one in FOUND.operators if one.name == name)
    assert command.difference_of(measured, BY_NAME[name], FOUND.machine) == ""


def test_every_measured_operator_is_in_the_table_and_most_were_measured() -> None:
    assert {one.name for one in FOUND.operators} == set(BY_NAME)
    assert [one.name for one in FOUND.operators if one.error and one.events] == []
    assert sum(not one.error for one in FOUND.operators) == 741


@pytest.mark.torch_since(2, 11)
def test_a_difference_is_printed_with_both_sequences(capsys: pytest.CaptureFixture[str], monkeypatch, tmp_path) -> None:
    changed = tmp_path / "other.json"
    changed.write_text(command.MEASURED.read_text(encoding="utf-8").replace("16777216", "16777728"), encoding="utf-8")
    monkeypatch.setattr(command, "MEASURED", changed)
    assert command.main(["--only", "=pointwise gelu float32"]) == 1
    told = capsys.readouterr().out
    assert told.startswith("pointwise gelu float32: peak ")
    assert "measured [16777728" in told
    assert "predicted [16777216" in told
    assert "pointwise       0 of    1 with the requests that were predicted" in told
