"""What convolutions take, with an installed cuDNN asked for its workspaces and with none."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import torch

from vram_guard import TrainingStep, trace
from vram_guard.simulate.operators import cudnn, cudnn_library
from vram_guard.timeline import Timeline

AMPERE = cudnn.DeviceProperties.of((8, 6))


@cache
def library() -> cudnn_library.Library:
    path = cudnn_library.installed()
    if path is None:
        pytest.skip("NVIDIA's cuDNN wheel is not installed here")
    try:
        return cudnn_library.Library(path)
    except OSError as error:
        pytest.skip(str(error))


def dense(*sizes: int) -> cudnn.Tensor:
    strides, step = [], 1
    for size in reversed(sizes):
        strides.append(step)
        step *= size
    return cudnn.Tensor(sizes, tuple(reversed(strides)))


def call(direction: cudnn.Direction, batch: int, element: cudnn.Element = "float32") -> cudnn.Convolution:
    return cudnn.Convolution(
        direction,
        element,
        dense(batch, 64, 86, 86),
        dense(64, 64, 3, 3),
        dense(batch, 64, 86, 86),
        padding=(1, 1),
        stride=(1, 1),
        dilation=(1, 1),
    )


class Network(torch.nn.Module):
    def __init__(self, groups: int = 1, transposed: bool = False) -> None:
        super().__init__()
        kind = torch.nn.ConvTranspose2d if transposed else torch.nn.Conv2d
        self.first = torch.nn.Conv2d(3, 32, 1, bias=False)
        self.conv = kind(32, 32, 3, padding=1, groups=groups, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(self.first(x)).sum()


class Remembering:
    """Answers every question with the same size, and keeps the questions."""

    def __init__(self, size: int | None) -> None:
        self.size = size
        self.calls: list[cudnn.Convolution] = []

    def workspace(self, call: cudnn.Convolution, _device: cudnn.DeviceProperties) -> int | None:
        self.calls.append(call)
        return self.size


def timeline(model: torch.nn.Module) -> Timeline:
    return trace(
        TrainingStep(
            model=model,
            batch=lambda size: torch.zeros(size, 3, 16, 16),
            loss=lambda m, x: m(x),
            optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        )
    )


def asked(model: torch.nn.Module, size: int | None) -> tuple[Timeline, list[cudnn.Convolution]]:
    answers = Remembering(size)
    with cudnn.asking(answers, AMPERE):
        return timeline(model), answers.calls


def workspaces(found: Timeline, size: int) -> int:
    return sum(block.bytes_at(4) == size and "convolution" in block.operator for block in found.blocks)


def test_every_direction_is_asked_in_the_order_in_which_pytorch_runs_it() -> None:
    _, calls = asked(Network(), None)
    batch = calls[0].source.sizes[0]
    directions = [c.direction for c in calls if c.source.sizes[0] == batch]
    # The first layer's input needs no gradient: there only the filter is computed.
    assert directions == ["forward", "forward", "backward_data", "backward_filter", "backward_filter"]
    assert calls[1].weight == dense(32, 32, 3, 3)
    assert calls[1].padding == (1, 1)


def test_a_transposed_convolution_is_asked_as_the_backward_pass_of_a_convolution() -> None:
    _, calls = asked(Network(transposed=True), None)
    batch = calls[0].source.sizes[0]
    directions = [c.direction for c in calls if c.source.sizes[0] == batch]
    assert directions == ["forward", "backward_data", "forward", "backward_filter", "backward_filter"]


def test_depthwise_convolutions_in_float32_are_pytorchs_own() -> None:
    _, calls = asked(Network(groups=32), None)
    assert {c.weight.sizes for c in calls} == {(32, 3, 1, 1)}


def test_the_answer_is_allocated_for_the_call_and_given_back() -> None:
    size = 12345678
    found, _ = asked(Network(), size)
    assert workspaces(found, size) == 2 * 5  # two steps, five calls
    assert workspaces(timeline(Network()), size) == 0
    for index, block in enumerate(found.blocks):
        if block.bytes_at(4) == size:
            assert found.events.index(~index) > found.events.index(index)


def test_nobody_is_asked_after_the_block() -> None:
    with cudnn.asking(Remembering(1), AMPERE):
        assert cudnn.workspace(call("forward", 2)) == 1
    assert cudnn.workspace(call("forward", 2)) is None


def test_a_device_is_described_in_the_fields_that_cudnn_reads() -> None:
    described = json.loads(AMPERE.json())
    assert described["deviceVer"] == 860
    assert described["maxSharedMemoryPerBlockOptin"] == 99 * 1024
    with pytest.raises(KeyError):
        cudnn.DeviceProperties.of((3, 5)).json()


def test_a_cudnn_without_cublas_is_refused_before_it_aborts_the_process(tmp_path: Path) -> None:
    lonely = tmp_path / "nvidia" / "cudnn" / "lib" / "libcudnn.so.9"
    lonely.parent.mkdir(parents=True)
    lonely.write_bytes(b"")
    with pytest.raises(OSError, match="libcublasLt"):
        cudnn_library.Library(lonely)


def test_a_real_cudnn_names_workspaces_without_a_gpu() -> None:
    small, large = (library().workspace(call("backward_filter", batch), AMPERE) for batch in (64, 256))
    activation = 64 * 86 * 86 * 4
    # Its TF32 kernels copy both activations into NHWC; what sums the parts is small beside that.
    assert small is not None
    assert large is not None
    assert large >= 2 * 256 * activation > small >= 2 * 64 * activation


def test_a_real_cudnn_without_tf32_plans_otherwise() -> None:
    plain = call("backward_filter", 256)._replace(allow_tf32=False)
    assert library().workspace(plain, AMPERE) != library().workspace(call("backward_filter", 256), AMPERE)


def test_an_architecture_that_nothing_is_known_of_has_no_answer() -> None:
    assert library().workspace(call("forward", 2), cudnn.DeviceProperties.of((3, 5))) is None
