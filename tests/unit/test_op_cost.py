"""What operators compute and move, against torch's own counter and against arithmetic by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from architectures import BY_NAME, adamw
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from vram_guard import Timeline, TrainingStep, trace
from vram_guard.simulate.tracing.run import run_step
from vram_guard.timeline import Affine, Work, merge_affine

#: torch 2.4's own checkpoint.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.cpu.amp.autocast:FutureWarning")


def traced(model: Callable[..., Any], batch: Any, size: int = 4, **settings: Any) -> Timeline:
    settings.setdefault("optimizer", adamw)
    settings.setdefault("loss", lambda m, b: m(b).float().sum())
    return run_step(TrainingStep(model=model, batch=batch, **settings), size, (8, 0))


def flops(timeline: Timeline) -> int:
    return sum(work.flops.base for work in timeline.work)


def one(timeline: Timeline, operator: str, phase: str = "forward") -> Work:
    (found,) = [work for work in timeline.work if work.operator == operator and work.phase == phase]
    return found


@pytest.mark.parametrize("name", ["convnet", "unet", "decoder", "encoder"])
def test_flops_are_those_of_torchs_own_counter(name):
    architecture = BY_NAME[name]
    with sdpa_kernel(SDPBackend.MATH):  # the only attention that torch's counter sees on a CPU
        timeline = run_step(architecture.step(), 4, (8, 0))
        model, batch = architecture.model(), architecture.batch(4)
        with FlopCounterMode(display=False) as counter:
            architecture.loss(model, batch).backward()
    assert flops(timeline) == counter.get_total_flops() > 0


def test_a_linear_layer_by_hand():
    timeline = traced(lambda: nn.Linear(64, 48), lambda b: torch.randn(b, 10, 64), size=3)
    forward = one(timeline, "aten.addmm.default")
    assert forward.flops.base == 2 * (3 * 10) * 64 * 48
    assert forward.moved.base == 4 * (48 + 30 * 64 + 64 * 48 + 30 * 48)
    assert (forward.unit, forward.launches, forward.recomputed) == ("fp32", 1, False)
    # The input needs no gradient: the backward pass makes one product, for the weight.
    assert one(timeline, "aten.mm.default", "backward").flops == forward.flops


class Attention(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.qkv = nn.Linear(64, 192)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (4, 16)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)


@pytest.mark.parametrize(
    ("precision", "kernel", "unit"), [("bf16-true", "flash", "bf16"), ("32-true", "efficient", "3xtf32")]
)
@pytest.mark.parametrize("causal", [False, True])
def test_attention_by_hand_once_and_half_where_it_is_causal(precision, kernel, unit, causal):
    timeline = traced(lambda: Attention(causal), lambda b: torch.randn(b, 32, 64), size=2, precision=precision)
    product = 2 * 2 * 4 * 32 * 32 * 16 // (2 if causal else 1)  # batch 2, heads 4, length 32, head size 16
    name = f"aten._scaled_dot_product_{kernel}_attention"
    forward, backward = one(timeline, f"{name}.default"), one(timeline, f"{name}_backward.default", "backward")
    assert (forward.flops.base, backward.flops.base) == (2 * product, 5 * product)
    assert forward.unit == backward.unit == unit
    assert not any("bmm" in work.operator or "softmax" in work.operator for work in timeline.work)


def test_recurrent_layers_use_every_weight_once_a_step_one_kernel_after_the_other():
    timeline = traced(
        lambda: nn.LSTM(8, 16, num_layers=2), lambda b: torch.randn(5, b, 8), loss=lambda m, b: m(b)[0].sum()
    )
    weights = 4 * 16 * (8 + 16) + 4 * 16 * (16 + 16)
    forward = one(timeline, "aten._cudnn_rnn.default")
    assert forward.flops.base == 2 * 5 * 4 * weights
    assert one(timeline, "aten._cudnn_rnn_backward.default", "backward").flops.base == 2 * forward.flops.base
    assert forward.launches == 5 * 2


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(1000, 16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.table(ids)).transpose(0, 1).reshape(-1)


def test_bytes_by_hand():
    timeline = traced(Rows, lambda b: torch.arange(b * 8).view(b, 8), size=2)
    rows = 2 * 8 * 16 * 4
    assert one(timeline, "aten.embedding.default").moved.base == 2 * rows + 16 * 8  # rows and indices, not the table
    assert one(timeline, "aten.relu.default").moved.base == 2 * rows
    assert one(timeline, "aten.sum.default").moved.base == rows + 4
    assert not any("view" in work.operator or "transpose" in work.operator for work in timeline.work)


def test_an_expanded_dimension_is_read_once():
    class Expanded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1, 16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.scale.expand(64, 16)

    timeline = traced(Expanded, lambda b: torch.randn(b, 64, 16), size=2)
    assert one(timeline, "aten.add.Tensor").moved.base == 4 * (2 * (2 * 64 * 16) + 16)


def test_the_optimizer_reads_and_writes_what_it_updates():
    parameter = 64 * 48 * 4

    def build() -> nn.Module:
        return nn.Linear(64, 48, bias=False)

    def batch(size: int) -> torch.Tensor:
        return torch.randn(size, 64)

    sgd = traced(build, batch, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    assert [(w.operator, w.moved.base) for w in sgd.work if w.phase == "optimizer"] == [
        ("aten._foreach_add_.List", 3 * parameter)
    ]
    fused = traced(build, batch, optimizer=lambda p: torch.optim.AdamW(p, lr=0.1, fused=True))
    (step,) = [w for w in fused.work if "fused" in w.operator]
    assert 7 * parameter <= step.moved.base < 7 * parameter + 64  # four read, three written, and the step's number


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.GELU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.body, x, use_reentrant=False)


def test_what_runs_again_is_marked_and_belongs_to_its_module():
    timeline = traced(Checkpointed, lambda b: torch.randn(b, 16))
    again = [work for work in timeline.work if work.recomputed]
    assert [(work.module, work.operator, work.phase) for work in again] == [
        ("body.0", "aten.addmm.default", "backward"),
        ("body.1", "aten.gelu.default", "backward"),
        ("body.2", "aten.addmm.default", "backward"),
    ]
    first = next(work for work in timeline.work if work.module == "body.0" and work.phase == "forward")
    assert again[0].flops == first.flops


class Offloaded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu():
            return torch.sigmoid(self.body(x))


def test_copies_between_host_and_device_are_transfers_and_nothing_else():
    timeline = traced(Offloaded, lambda b: torch.randn(b, 16), size=32)
    copies = [work for work in timeline.work if work.transfer.base and work.phase != "batch"]
    by_phase = {p: sum(w.transfer.base for w in copies if w.phase == p) for p in ("forward", "backward")}
    assert by_phase["forward"] == by_phase["backward"] >= 2 * 32 * 16 * 4  # the input and the result at least
    assert all(work.moved == Affine(0, 0) == work.flops for work in copies)
    (loaded,) = [work for work in timeline.work if work.phase == "batch"]
    assert loaded.transfer.base == 32 * 16 * 4


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_work_follows_the_law_of_the_batch_size(name):
    step = BY_NAME[name].step()
    merged, direct = trace(step), run_step(step, 29, (8, 0))
    assert len(merged.work) == len(direct.work) > 0
    for law, found in zip(merged.work, direct.work, strict=True):
        assert (law.operator, law.module, law.phase, law.unit) == (
            found.operator,
            found.module,
            found.phase,
            found.unit,
        )
        for one_number, other in ((law.flops, found.flops), (law.moved, found.moved), (law.transfer, found.transfer)):
            assert one_number.at(29) == other.base


def network(model, *shape, precision="32-true"):
    return trace(
        TrainingStep(
            model=model,
            batch=lambda size: torch.zeros(size, *shape),
            loss=lambda m, x: m(x).float().sum(),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            precision=precision,
        )
    ).network


def test_the_kind_of_network_is_told_by_what_computes():
    convolutional = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3), torch.nn.Flatten(), torch.nn.LazyLinear(8))
    convolutional(torch.zeros(1, 3, 32, 32))
    linear = torch.nn.Linear(64, 64)
    assert network(convolutional, 3, 32, 32) == "convolutions in float32"
    assert network(convolutional, 3, 32, 32, precision="bf16-mixed") == "convolutions in half precision"
    assert network(linear, 64) == "no convolutions, float32"
    assert network(linear, 64, precision="16-mixed") == "no convolutions, half precision"
    assert network(torch.nn.Identity(), 64) is None


#: Results of float32 from operands of half precision; torch 2.8 and later.
TO_FLOAT = {
    "mm": lambda x, w: torch.mm(x, w, out_dtype=torch.float32),
    "addmm": lambda x, w: torch.addmm(torch.zeros(48, device=x.device), x, w, out_dtype=torch.float32),
    "bmm": lambda x, w: torch.bmm(x[None], w[None], out_dtype=torch.float32)[0],
    "baddbmm": lambda x, w: torch.baddbmm(
        torch.zeros(1, 1, 48, device=x.device), x[None], w[None], out_dtype=torch.float32
    )[0],
}


@pytest.mark.skipif("dtype" not in torch.ops.aten.mm.overloads(), reason="torch.mm has no out_dtype here")
@pytest.mark.parametrize("name", TO_FLOAT)
def test_products_with_a_dtype_of_their_own_by_hand(name):
    class Product(torch.autograd.Function):  # torch has no derivative for them: who trains with them brings it along
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x)
            return TO_FLOAT[name](x.half(), w.half())

        @staticmethod
        def backward(ctx, grad):
            return None, ctx.saved_tensors[0].t() @ grad

    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 48))

        def forward(self, x):
            return Product.apply(x, self.weight)

    timeline = traced(Head, lambda b: torch.randn(b, 64), size=16)
    work = one(timeline, f"aten.{name}.dtype")
    assert work.flops.base == 2 * 16 * 64 * 48
    assert work.unit == "fp16"
    (first, *_) = [
        block for block in timeline.blocks if block.operator == f"aten.{name}.dtype" and block.size.base < 2**20
    ]
    assert first.size.base == 16 * 48 * 4
    assert timeline.tier == "symbolic"


def test_grouped_convolutions_by_hand():
    def build() -> nn.Module:
        return nn.Sequential(nn.Conv2d(8, 16, 1, bias=False), nn.Conv2d(16, 32, 3, stride=2, groups=4, bias=False))

    timeline = traced(build, lambda b: torch.randn(b, 8, 9, 9), size=2)
    last = [work for work in timeline.work if work.module == "1"]
    forward = 2 * 2 * (4 * 4) * 32 * (16 // 4) * 9
    assert [work.flops.base for work in last if work.phase == "forward"] == [forward]
    assert [work.flops.base for work in last if "convolution" in work.operator and work.phase == "backward"] == [
        2 * forward
    ]
    assert {work.unit for work in timeline.work if "convolution" in work.operator} == {"tf32"}


def _timeline(size: int, flops_: int) -> Timeline:
    work = Work("aten.mm.default", "", "forward", False, Affine(flops_, 0), Affine(0, 0), "fp32")
    return Timeline(blocks=(), events=(), phases=(), traced=(size,), work=(work,))


@pytest.mark.parametrize(
    ("low", "high", "line"),
    [
        (10, 15, Affine(0, 5)),
        (14, 19, Affine(4, 5)),
        (4, 9, Affine(0, 3)),  # the square of the batch: from 0 through the larger size
        (7, 5, Affine(7, 0)),  # never less for more
    ],
)
def test_work_that_is_not_affine_gets_a_line_that_never_falls(low, high, line):
    merged = merge_affine(_timeline(2, low), _timeline(3, high))
    assert merged is not None
    assert merged.work[0].flops == line
