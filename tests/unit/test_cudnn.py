"""What convolutions take, with an installed cuDNN asked for its workspaces and with none."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest
import torch

from vram_guard import TrainingStep, trace
from vram_guard.errors import InvalidInputError
from vram_guard.report import html_report, render
from vram_guard.report.as_json import as_dict
from vram_guard.simulate.operators import cudnn, cudnn_library
from vram_guard.timeline import Block, CudnnAnswers, Timeline

AMPERE = cudnn.DeviceProperties.of((8, 6))


@cache
def library() -> cudnn_library.Library:
    """A real cuDNN: the installed one, or the file that LIBCUDNN names."""
    path = os.environ.get("LIBCUDNN") or cudnn_library.installed()
    if path is None:
        pytest.skip("NVIDIA's cuDNN wheel is not installed here, and LIBCUDNN names none")
    try:
        found = cudnn_library.Library(path)
        found.check(AMPERE)
    except (OSError, cudnn.CudnnRefusedError) as error:
        pytest.skip(str(error))
    return found


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

    release = "9.99.0"

    def __init__(self, size: int | None) -> None:
        self.size = size
        self.calls: list[cudnn.Convolution] = []

    def check(self, device: cudnn.DeviceProperties) -> None:
        device.json()

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


# --- a library that is asked as the setting says --------------------------------------------------------------------

#: The part of cuDNN's backend interface that is used, with one plan for everything, of a fixed workspace; ``STATUS`` is
#: what it says of a described device.
SOURCE = """
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
size_t cudnnGetVersion(void) { return VERSION; }
int cudnnBackendCreateDescriptor(int kind, void **made) { int *d = malloc(sizeof *d); *d = kind; *made = d; return 0; }
int cudnnBackendDestroyDescriptor(void *made) { free(made); return 0; }
int cudnnBackendSetAttribute(void *d, int name, int kind, int64_t count, const void *data) { return 0; }
int cudnnBackendFinalize(void *d) { return *(int *)d == 38 ? STATUS : 0; }
int cudnnBackendGetAttribute(void *d, int name, int kind, int64_t count, int64_t *found, void *data) {
    *found = name != 1303;
    if (name == 402) *(int64_t *)data = WORKSPACE;
    return 0;
}
"""
SIZE = 33554432


def stub(folder: Path, status: int = 0) -> Path:
    """A library of that interface, with a cuBLAS beside it, as NVIDIA's wheels lay them."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler here")
    path = folder / "nvidia" / "cudnn" / "lib" / "libcudnn.so.9"
    blas = folder / "nvidia" / "cublas" / "lib" / "libcublasLt.so.12"
    values = ["-DVERSION=92600", f"-DSTATUS={status}", f"-DWORKSPACE={SIZE}"]
    for made, source in ((path, SOURCE), (blas, "int nothing;")):
        made.parent.mkdir(parents=True)
        (folder / "source.c").write_text(source)
        command = [compiler, "-shared", "-fPIC", "-w", *values, "-o", str(made), str(folder / "source.c")]
        subprocess.run(command, check=True)
    return path


def step() -> TrainingStep:
    return TrainingStep(
        model=Network(),
        batch=lambda size: torch.zeros(size, 3, 64, 64),
        loss=lambda m, x: m(x),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )


def reports(found: object) -> tuple[str, ...]:
    return render(found), html_report(found)


def test_a_library_that_answers_is_named_with_what_it_added(tmp_path: Path) -> None:
    plain, asked = (trace(step(), cudnn=choice).at(64) for choice in ("off", str(stub(tmp_path))))
    assert plain.cudnn is None
    assert asked.cudnn == CudnnAnswers("9.26.0")
    assert asked.cudnn_bytes == asked.peak_reserved - plain.peak_reserved > 0
    assert asked.peak_upper == 0  # nothing is unknown any more
    assert as_dict(asked)["estimate"]["cudnn"] == {"release": "9.26.0", "refused": "", "bytes": asked.cudnn_bytes}
    for text in reports(asked):
        assert "cuDNN 9.26.0" in text
        assert "was asked for workspaces" in text


def test_a_library_that_refuses_is_named_with_its_status_and_what_is_unknown_stays_so(tmp_path: Path) -> None:
    plain, refused = (trace(step(), cudnn=choice).at(64) for choice in ("off", str(stub(tmp_path, status=1008))))
    assert refused.cudnn is not None
    assert refused.cudnn.release == "9.26.0"
    assert "status 1008" in refused.cudnn.refused
    assert refused.cudnn_bytes == 0
    assert (refused.peak_reserved, refused.peak_upper) == (plain.peak_reserved, plain.peak_upper)
    assert refused.peak_upper > refused.peak_reserved
    for text in reports(refused):
        assert "status 1008" in " ".join(text.split())


@pytest.mark.parametrize("choice", ["on", "/nowhere/libcudnn.so.9", 5, ""])
def test_a_choice_that_means_nothing_is_refused_before_any_work(choice: object) -> None:
    with pytest.raises(InvalidInputError):
        trace(step(), cudnn=choice)  # type: ignore[arg-type]


# --- what is unknown ------------------------------------------------------------------------------------------------


def most(kernel: int, channels: int, side: int, **settings: int) -> int:
    """The most that the forward pass of one convolution with as many output channels may take, batch 32."""
    conv = torch.nn.Conv2d(channels, channels, kernel, padding=kernel // 2, bias=False, **settings)
    found = timeline_of(conv, channels, side)
    return next(block.size.at(32) for block in found.blocks if block.unknown)


def timeline_of(model: torch.nn.Module, channels: int, side: int) -> Timeline:
    return trace(
        TrainingStep(
            model=model,
            batch=lambda size: torch.zeros(size, channels, side, side),
            loss=lambda m, x: m(x).sum(),
            optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        ),
        cudnn="off",
    )


def test_the_most_is_what_winograds_transforms_take() -> None:
    # Workspaces in public traces of ResNet-50 on a V100 in float32, batch 32 (pytorch/kineto).
    assert most(3, 64, 56) == 116195328
    assert most(3, 256, 14) == 47185920
    assert most(3, 512, 7) == 56623104


def test_the_most_of_other_kernels_is_a_copy_of_everything() -> None:
    activation, weight = 32 * 64 * 56 * 56 * 4, 64 * 64 * 4
    assert most(1, 64, 56) == 2 * activation + weight
    assert most(3, 64, 56, dilation=2) < most(3, 64, 56)


def without_tf32(inputs: int, outputs: int, side: int, monkeypatch: pytest.MonkeyPatch, **settings: int) -> list[Block]:
    """The workspaces of one convolution, forward and filter, in the second step."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    conv = torch.nn.Conv2d(inputs, outputs, 3, padding=1, bias=False, **settings)
    found = timeline_of(conv, inputs, side).blocks
    return [block for block in found if block.category == "workspace" and "convolution" in block.operator][-2:]


@pytest.mark.parametrize(
    ("inputs", "outputs", "side", "batch", "size"),
    [
        # Histories of an H200 (torch 2.11, cuDNN 9.19): ResNet-50, a U-Net, a VGG.
        (64, 64, 56, 32, 116195328),
        (128, 128, 28, 32, 60162048),
        (512, 512, 7, 32, 56623104),
        (256, 128, 32, 32, 117964800),
        (64, 128, 32, 32, 57802752),
        (64, 64, 96, 128, 1359544320),
        (256, 512, 12, 128, 146276352),
    ],
)
def test_the_most_of_filters_gradients_without_tf32_is_what_winograds_transforms_took(
    inputs: int, outputs: int, side: int, batch: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _forward, gradient = without_tf32(inputs, outputs, side, monkeypatch)
    assert gradient.unknown
    assert gradient.size.at(batch) == size


@pytest.mark.parametrize(
    ("inputs", "outputs", "side", "batch", "size"),
    [
        (128, 128, 28, 32, 178847744),
        (128, 128, 32, 32, 692649984),
        (256, 128, 32, 32, 1385299968),
        (64, 128, 48, 128, 553943040),
        (512, 512, 12, 128, 764411904),
    ],
)
def test_the_most_of_forward_passes_without_tf32_is_what_fft_took(
    inputs: int, outputs: int, side: int, batch: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, _gradient = without_tf32(inputs, outputs, side, monkeypatch)
    assert forward.unknown
    assert forward.size.at(batch) >= size
