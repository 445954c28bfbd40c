"""Normalisations: shapes and dtypes are torch's own, layouts and copies those of CUDA's kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from vram_guard import TrainingStep, trace

aten = torch.ops.aten


def meta(shape: Any, dtype: torch.dtype = torch.float32, order: Any = None) -> torch.Tensor:
    """A meta tensor; with an order, one that lies in memory in that order of its dimensions."""
    if order is None:
        return torch.empty(shape, dtype=dtype, device="meta")
    back = [order.index(dim) for dim in range(len(shape))]
    return torch.empty([shape[dim] for dim in order], dtype=dtype, device="meta").permute(back)


def test_what_torch_refuses_torch_refuses_in_its_words() -> None:
    with pytest.raises(RuntimeError, match="normalized_shape"):
        trace(
            TrainingStep(
                nn.LayerNorm(5), lambda b: torch.zeros(b, 4), lambda m, x: m(x).sum(), lambda p: torch.optim.SGD(p)
            )
        )


class Normalised(nn.Module):
    """Channels are normalised in each position, as ConvNeXt does it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)
        self.seen: list[tuple[int, ...]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.norm((x * self.norm.weight[0]).permute(0, 2, 3, 1))
        self.seen.append(out.stride())
        return out.permute(0, 3, 1, 2)


def test_a_transposed_input_is_copied_for_the_time_of_the_call_and_its_gradient_comes_out_plain() -> None:
    """For 256 x 256 positions of 16 channels in float32: one activation is 4 MiB a sample."""
    one = 16 * 256 * 256 * 4
    model = Normalised(16)
    found = trace(
        TrainingStep(
            model,
            lambda b: torch.empty(b, 16, 256, 256, device="meta"),
            lambda model, x: model(x).sum(),
            lambda parameters: torch.optim.SGD(parameters),
        )
    )
    assert all(strides[1:] == (256 * 16, 16, 1) for strides in model.seen)
    forward = [b for b in found.blocks if b.operator == "aten.native_layer_norm.default" and b.size.per_sample == one]
    assert "temporaries" in {b.category for b in forward}
    assert len(forward) == 2 * 2  # in each of two steps: the copy and the result
    backward = [b for b in found.blocks if b.operator == "aten.native_layer_norm_backward.default"]
    # The input again, its gradient, and the incoming gradient, which the sum's backward expands without memory.
    assert len([b for b in backward if b.size.per_sample == one]) == 2 * 3


class RootMeanSquares(nn.Module):
    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, dtype=dtype)

    def forward(self, x: torch.Tensor) -> Any:
        return self.norm(x.detach().requires_grad_())


def rms_blocks(dtype: torch.dtype, weight: torch.dtype, precision: str = "32-true") -> list[tuple[str, int, str]]:
    found = trace(
        TrainingStep(
            model=RootMeanSquares(512, weight),
            batch=lambda size: torch.zeros(size, 64, 512, dtype=dtype),
            loss=lambda model, x: model(x).sum(),
            optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
            precision=precision,
        )
    )
    start = next(p.start for p in found.phases if p.name == "forward" and p.step == 2)
    ends = next(p.start for p in found.phases if p.name == "optimizer" and p.step == 2)
    blocks = [found.blocks[event] for event in found.events[start:ends] if event >= 0]
    return [(b.operator.split(".")[1], b.bytes_at(4), b.category) for b in blocks]


fused = pytest.mark.skipif(not hasattr(aten, "_fused_rms_norm_backward"), reason="before torch 2.9 there is no kernel")


@fused
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_root_mean_squares_keep_their_input_and_a_float_a_row(dtype: torch.dtype) -> None:
    rows, size = 4 * 64 * 4, 4 * 64 * 512 * dtype.itemsize
    found = rms_blocks(dtype, dtype)
    forward = [block for block in found if block[0] == "_fused_rms_norm"]
    assert forward == [("_fused_rms_norm", size, "temporaries"), ("_fused_rms_norm", rows, "activations")]
    backward = [block[1] for block in found if block[0] == "_fused_rms_norm_backward" and block[1]]
    assert backward == [size, 512 * dtype.itemsize, size], "input, weight, and a copy of the expanded gradient of sum()"
    assert not [block for block in found if block[0] in ("pow", "mul", "rsqrt")]


@fused
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_root_mean_squares_of_another_type_than_their_weight_are_not_fused() -> None:
    """layer_norm.cpp: a weight of another type makes it the composition that it was before."""
    operators = {operator for operator, _size, _category in rms_blocks(torch.bfloat16, torch.float32)}
    assert {"pow", "rsqrt"} <= operators
    assert not [operator for operator in operators if "fused" in operator]
    mixed = {operator for operator, *_ in rms_blocks(torch.bfloat16, torch.float32, "bf16-mixed")}
    assert "_fused_rms_norm" in mixed, "autocast makes both float32"
