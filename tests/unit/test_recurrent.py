"""Recurrent layers as cuDNN runs them: requests of real trainings on an H200 (torch 2.11, cuDNN 9.19)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.gpu.operators import recurrent
from vram_guard.scratch import Card
from vram_guard.simulate.tracing.run import run_step
from vram_guard.step import TrainingStep
from vram_guard.timeline import Timeline

#: What the allocator's history shows of an H200's ``cudnnDropoutGetStatesSize``.
H200 = Card((9, 0), 132)


class _Last(nn.Module):
    """Reads a sequence, and keeps the outputs."""

    def __init__(self, kind: type[nn.RNNBase], inputs: int, width: int, dropout: float = 0.2) -> None:
        super().__init__()
        self.rnn = kind(inputs, width, num_layers=2, batch_first=True, dropout=dropout)

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


def test_autocast_runs_them_in_float16_over_a_flat_copy_of_the_weights() -> None:
    """AutocastRNN.cpp: float16 in bfloat16's autocast, too."""
    made = _traced(nn.LSTM, 8, 128, 256, 16, "bf16-mixed")
    elements = sum(parameter.numel() for parameter in _Last(nn.LSTM, 128, 256).parameters())
    flat = [block.size.base for block in made.blocks if block.operator == "aten.zeros.default"]
    assert flat.count(elements * 2) == 2  # once in each of two steps
    output, reserve = 8 * 16 * 256 * 2, 11 * 8 * 16 * 256 * 2 + 8 * 16 * 256 // 8 + 256
    forward = _made(made, "forward")
    assert output in forward
    assert reserve in forward


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


#: What cuDNN 9.19 took on an H100 for layers of many shapes.
MEASURED = Path(recurrent.__file__).with_name("recurrent-h100.csv")


def test_buffers_of_many_layers_are_those_that_cudnn_took() -> None:
    rows = recurrent.read(MEASURED)
    assert {row.layer.kind for row in rows} == {"LSTM", "GRU", "tanh", "relu"}
    filled_up = [row.reserve - row.layer.reserve() for row in rows]
    assert {0} == {more for more, row in zip(filled_up, rows, strict=True) if not row.layer.dropout}
    assert 0 == min(filled_up) <= max(filled_up) < recurrent.FILLED_UP
    errors = [row.layer.workspace() / row.workspace - 1 for row in rows]
    assert max(map(abs, errors)) < 0.02
    assert sum(abs(error) < 0.01 for error in errors) > 0.99 * len(rows)
    assert errors.count(0.0) > len(rows) / 2


@pytest.mark.parametrize(
    ("kind", "hidden", "forward", "backward"),
    [("LSTM", 128, True, True), ("GRU", 192, True, False), ("LSTM", 200, False, False), ("tanh", 384, True, False)],
)
def test_the_passes_may_have_kernels_of_their_own(kind: str, hidden: int, forward: bool, backward: bool) -> None:
    """RNN.cpp, ``use_rnn_persist_small_h``: wide states have persistent kernels in the forward pass alone."""
    layer = recurrent.Layer(kind, 1, 1, 0.0, hidden, hidden, 100, 32, "float32", packed=False)
    standard = layer.known()._replace(projected=True)  # projections have no others
    for is_forward, others in ((True, forward), (False, backward)):
        plain = standard.workspace(100 * 32, 32, H200, forward=is_forward)
        assert (layer.workspace(forward=is_forward) > plain) == others


def test_one_layer_in_float16_has_kernels_of_its_own_on_large_cards() -> None:
    layer = recurrent.Layer("LSTM", 1, 1, 0.0, 256, 128, 50, 64, "float16", packed=False).known()
    sizes = {
        card: layer.workspace(50 * 64, 64, card, forward=True) for card in (H200, Card((8, 6), 82), Card((9, 0), 56))
    }
    assert sizes[H200] > 2 * sizes[Card((8, 6), 82)]
    assert sizes[Card((8, 6), 82)] == sizes[Card((9, 0), 56)]


def test_layers_that_were_measured_are_compared(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert recurrent.main(["--against", str(MEASURED)]) == 0
    assert "reserve space predicted otherwise for 0" in capsys.readouterr().out
    one = recurrent.read(MEASURED)[0]
    recurrent.write(tmp_path / "one.csv", [replace(one, reserve=one.reserve + 1000)])
    assert recurrent.main(["--against", str(tmp_path / "one.csv")]) == 1
    assert "1 layers; reserve space predicted otherwise for 1" in capsys.readouterr().out


def test_the_grid_has_every_layer_once() -> None:
    layers = recurrent.grid()
    assert len(layers) == len(set(layers))
    assert all(layer.layers > 1 or not layer.dropout for layer in layers)
    assert {layer.packed for layer in layers} == {True, False}


@pytest.mark.parametrize("content", ["", "kind,layers\nGRU,two\n", '{"format": "something else"}\n1\n', None])
def test_a_file_that_holds_no_measured_layers_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None
) -> None:
    path = tmp_path / "other.csv"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    assert recurrent.main(["--against", str(path)]) == 2
    assert str(path) in capsys.readouterr().err
