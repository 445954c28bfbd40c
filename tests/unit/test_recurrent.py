"""Recurrent layers as cuDNN runs them: requests of real trainings on an H200 (torch 2.11, cuDNN 9.19)."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from vram_guard.scratch import Card, RecurrentLayer
from vram_guard.simulate.tracing.run import run_step
from vram_guard.step import TrainingStep
from vram_guard.timeline import Timeline

#: What the allocator's history shows of an H200's ``cudnnDropoutGetStatesSize``.
H200 = Card((9, 0), 132)


class _Last(nn.Module):
    """Reads a sequence, and keeps the outputs."""

    def __init__(self, kind: type[nn.RNNBase], inputs: int, width: int) -> None:
        super().__init__()
        self.rnn = kind(inputs, width, num_layers=2, batch_first=True, dropout=0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rnn(x)[0]  # type: ignore[no-any-return]


def _traced(
    kind: type[nn.RNNBase], steps: int, inputs: int, width: int, batch_size: int, precision: str = "32-true"
) -> Timeline:
    step = TrainingStep(
        lambda: _Last(kind, inputs, width),
        lambda size: torch.zeros(size, steps, inputs).requires_grad_(),
        lambda model, batch: model(batch).float().sum(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        precision=precision,
    )
    return run_step(step, batch_size, H200.capability)


def _made(timeline: Timeline, phase: str) -> list[int]:
    """Requests of the recurrent layer in the second step, in order."""
    starts = [(one.name, one.step, one.start) for one in timeline.phases]
    begin = next(start for name, step, start in starts if (name, step) == (phase, 2))
    end = next((start for _name, _step, start in starts if start > begin), len(timeline.events))
    made = [timeline.blocks[event] for event in timeline.events[begin:end] if event >= 0]
    return [block.bytes_at(1, H200) for block in made if "_cudnn_rnn" in block.operator]


@pytest.mark.parametrize(
    ("kind", "sizes", "copied", "state", "workspace", "reserve"),
    [
        (nn.LSTM, (128, 512, 512, 64), 16777216, 262144, 153617152, 185073920),
        (nn.GRU, (128, 512, 512, 64), 16777216, 262144, 131334912, 218628352),
        (nn.LSTM, (8, 128, 256, 16), 65536, 32768, 21627264, 1446144),
    ],
)
def test_the_forward_takes_what_cudnn_took(
    kind: type[nn.RNNBase], sizes: tuple[int, ...], copied: int, state: int, workspace: int, reserve: int
) -> None:
    steps, _inputs, width, batch = sizes
    output = steps * batch * width * 4
    states = [state] * (2 if kind is nn.LSTM else 1)
    assert _made(_traced(kind, *sizes), "forward") == [copied, output, *states, workspace, reserve]


def test_the_backward_takes_the_workspace_twice_and_gradients_in_one_buffer() -> None:
    """The recorded order: zeros for the states' gradients; copies of input and output's gradient, results, workspace;
    a copy of the input, the weights' gradients, workspace."""
    state, sequence, workspace, weights = 262144, 16777216, 153617152, 16809984
    expected = [*([state] * 2), *([sequence] * 3), *([state] * 2), workspace, sequence, weights, workspace]
    assert _made(_traced(nn.LSTM, 128, 512, 512, 64), "backward") == expected


@pytest.mark.parametrize(
    ("kind", "batch_size", "extra"),
    [(nn.LSTM, 1, 26104320), (nn.LSTM, 64, 93586432), (nn.GRU, 1, 23865856), (nn.GRU, 64, 82445312)],
)
def test_half_precision_takes_what_cudnn_took_beside_the_results(
    kind: type[nn.RNNBase], batch_size: int, extra: int
) -> None:
    """Single calls in float16, measured by themselves: the workspace, and a copy of the input where it is not one
    sequence, which is contiguous in either order."""
    made = _made(_traced(kind, 128, 512, 512, batch_size, "16-true"), "forward")
    beside = [made[-2]] if batch_size == 1 else [made[0], made[-2]]
    assert sum(-(-size // 512) * 512 for size in beside) == extra


#: What cuDNN 9.19 took on an H100 for layers of many shapes, and its numbers of the kinds.
MEASURED = Path(__file__).parents[2] / "benchmarks" / "gpu" / "operators" / "recurrent-h100.csv"
MODES = {"relu": 0, "tanh": 1, "LSTM": 2, "GRU": 3}


def _layer(kind: str, layers: int, directions: int, hidden: int, inputs: int, **settings: Any) -> RecurrentLayer:
    widths = [inputs, *[hidden * directions] * (layers - 1)]
    gates = {"LSTM": 4, "GRU": 3}.get(kind, 1) * hidden
    matrices = sum(directions * gates * (width + hidden) for width in widths)
    facts = {"dtype": "float32", "drops": False, "packed": False, "projected": False, **settings}
    return RecurrentLayer(MODES[kind], inputs, hidden, layers, directions, matrices, **facts)


def test_buffers_of_many_layers_are_those_that_cudnn_took() -> None:
    """Sequences that are packed are the shorter the later they come: the last is half as long as the first."""
    with MEASURED.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["kind"] for row in rows} == set(MODES)
    errors = []
    for row in rows:
        numbers = {name: int(row[name]) for name in ("layers", "directions", "hidden", "inputs")}
        drops, packed = float(row["dropout"]) > 0, row["packed"] == "True"
        layer = _layer(row["kind"], **numbers, dtype=row["dtype"], drops=drops, packed=packed)
        steps, batch = int(row["steps"]), int(row["batch"])
        words = sum(max(1, steps - (at * steps * packed) // (2 * batch)) for at in range(batch))
        more = int(row["reserve"]) - layer.reserve(steps, words, batch)
        assert more == 0 or (drops and 0 < more < 256)  # what fills up the bits of what dropout has dropped
        errors.append(layer.workspace(words, batch, H200, forward=True) / int(row["workspace"]) - 1)
    assert max(map(abs, errors)) < 0.02
    assert sum(abs(error) < 0.01 for error in errors) > 0.99 * len(rows)
    assert errors.count(0.0) > len(rows) / 2


@pytest.mark.parametrize(
    ("kind", "hidden", "forward", "backward"),
    [("LSTM", 128, True, True), ("GRU", 192, True, False), ("LSTM", 200, False, False), ("tanh", 384, True, False)],
)
def test_the_passes_may_have_kernels_of_their_own(kind: str, hidden: int, forward: bool, backward: bool) -> None:
    """RNN.cpp, ``use_rnn_persist_small_h``: wide states have persistent kernels in the forward pass alone."""
    layer = _layer(kind, 1, 1, hidden, hidden)
    standard = layer._replace(projected=True)  # projections have no others
    for is_forward, others in ((True, forward), (False, backward)):
        plain, own = (one.workspace(100 * 32, 32, H200, forward=is_forward) for one in (standard, layer))
        assert (own > plain) == others


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_autocast_runs_them_in_float16_over_a_flat_copy_of_the_weights(precision: str) -> None:
    """AutocastRNN.cpp: float16 in bfloat16's autocast, too; the gradients of the weights are cast back one by one."""
    made = _traced(nn.LSTM, 8, 128, 256, 16, precision)
    elements = [parameter.numel() for parameter in _Last(nn.LSTM, 128, 256).parameters()]
    flat = [block.size.base for block in made.blocks if block.operator == "aten.zeros.default"]
    assert flat.count(sum(elements) * 2) == 2  # once in each of two steps
    output, reserve = 8 * 16 * 256 * 2, 11 * 8 * 16 * 256 * 2 + 8 * 16 * 256 // 8 + 256
    forward = _made(made, "forward")
    assert output in forward
    assert reserve in forward
    assert {work.unit for work in made.work if "_cudnn_rnn" in work.operator} == {"fp16"}
    gradients = [block.size.base for block in made.blocks if block.category == "gradients"]
    assert sorted(gradients) == sorted([4 * size for size in elements] * 2)


def test_the_states_of_dropout_are_taken_once() -> None:
    made = _traced(nn.LSTM, 8, 128, 256, 16)
    taken = [block for block in made.blocks if block.category == "workspace" and "_cudnn_rnn" in block.operator]
    assert [block.bytes_at(16, H200) for block in taken] == [6488064]


def test_weights_come_to_the_gpu_before_their_buffer() -> None:
    """The recorded order of an LSTM: each weight, the buffer; then the weights are freed."""
    made = _traced(nn.LSTM, 128, 512, 512, 1)
    by_layer = [4194304, 4194304, 8192, 8192]
    assert [block.size.base for block in made.blocks[:9]] == [*by_layer, *by_layer, 16809984]
    assert made.events[:17] == (*range(9), *(~block for block in range(8)))


def test_one_layer_in_float16_has_kernels_of_its_own_on_large_cards() -> None:
    layer = _layer("LSTM", 1, 1, 256, 128, dtype="float16")
    sizes = {
        card: layer.workspace(50 * 64, 64, card, forward=True) for card in (H200, Card((8, 6), 82), Card((9, 0), 56))
    }
    assert sizes[H200] > 2 * sizes[Card((8, 6), 82)]
    assert sizes[Card((8, 6), 82)] == sizes[Card((9, 0), 56)]
