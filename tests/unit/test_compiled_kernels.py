"""Compiled kernels of libraries that cannot be installed here: modules with their functions' names, which refuse."""

import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from vram_guard import TrainingStep, trace

BATCH, LENGTH, HEADS, HEAD = 2, 200, 4, 40
WIDTH = HEADS * HEAD


def refuse(*_args):
    raise TypeError("incompatible function arguments")


@pytest.fixture
def library(monkeypatch):
    """Installs a package with a release, and its compiled module."""

    def install(package, release, name, *functions):
        for each in (package, name):
            monkeypatch.setitem(sys.modules, each, ModuleType(each))
        sys.modules[package].__version__ = release
        for function in functions:
            setattr(sys.modules[name], function, refuse)
        return sys.modules[name]

    return install


class Around(nn.Module):
    """Linear layers before the kernel, which is given (batch, length, width) and what its autograd function takes."""

    def __init__(self, apply, width=WIDTH):
        super().__init__()
        self.linear = nn.Linear(WIDTH, width)
        self.apply_kernel = apply

    def forward(self, x):
        return self.apply_kernel(self.linear(x))


def traced(apply, width=WIDTH, dtype=torch.bfloat16):
    return trace(
        TrainingStep(
            model=lambda: Around(apply, width).to(dtype),
            batch=lambda size: torch.zeros(size, LENGTH, WIDTH, dtype=dtype),
            loss=lambda net, x: net(x).float().sum(),
            optimizer=lambda parameters: torch.optim.SGD(parameters),
        )
    )


def count(timeline, size):
    """Blocks of the first step of this size, at two samples."""
    return list(timeline.sizes(BATCH)).count(size) // 2


def flash_attention(compiled, varlen=False, key_heads=HEADS, deterministic=False, namespace="flash_attn"):
    """The operators and the function of flash_attn_interface.py, with the fake kernels that the library has."""
    name = f"{namespace}::_flash_attn_varlen" if varlen else f"{namespace}::_flash_attn"

    @torch.library.custom_op(f"{name}_forward", mutates_args=(), device_types="cuda")
    def forward(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        if varlen:
            settings = (starts, starts, None, None, None, None, LENGTH, LENGTH, 0.0, 1.0, False, True)
            made = compiled.varlen_fwd(q, k, v, None, *settings, -1, -1, 0.0, False, None)
        else:
            made = compiled.fwd(q, k, v, None, None, 0.0, 1.0, True, -1, -1, 0.0, False, None)
        return tuple(made)

    @forward.register_fake
    def _(q, k, v, starts):
        sums = q.new_empty(q.shape[:-1], dtype=torch.float32)
        return torch.empty_like(q), sums, q.new_empty(0), q.new_empty(2, dtype=torch.int64)

    @torch.library.custom_op(f"{name}_backward", mutates_args=("dq", "dk", "dv"), device_types="cuda")
    def backward(  # noqa: PLR0917 - as the library's
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
        starts: Tensor, state: Tensor,
    ) -> Tensor:  # fmt: skip
        given = (grad, q, k, v, out, sums, dq, dk, dv)
        if varlen:
            settings = (starts, starts, None, LENGTH, LENGTH, 0.0, 1.0, False, True, -1, -1, 0.0, deterministic)
            return compiled.varlen_bwd(*given, *settings, None, state)[3]
        return compiled.bwd(*given, None, 0.0, 1.0, True, -1, -1, 0.0, deterministic, None, state)[3]

    @backward.register_fake
    def _(_grad, _q, _k, _v, _out, sums, *_others):
        return torch.empty_like(sums)

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, starts):
            out, sums, _scores, state = forward(q, k, v, starts)
            ctx.save_for_backward(q, k, v, out, sums, state, starts)
            return out

        @staticmethod
        def backward(ctx, grad):
            q, k, v, out, sums, state, starts = ctx.saved_tensors
            gradients = [torch.empty_like(one) for one in (q, k, v)]
            backward(grad.contiguous(), q, k, v, out, sums, *gradients, starts, state)
            return (*gradients, None)

    def apply(x):
        shape = (-1,) if varlen else (x.shape[0], LENGTH)
        heads = x.reshape(*shape, HEADS + 2 * key_heads, HEAD).split((HEADS, key_heads, key_heads), dim=-2)
        return Attention.apply(*heads, torch.arange(x.shape[0] + 1, dtype=torch.int32, device=x.device) * LENGTH)

    return apply, (HEADS + 2 * key_heads) * HEAD


FLASH = ("flash_attn", "2.8.3", "flash_attn_2_cuda", "fwd", "bwd", "varlen_fwd", "varlen_bwd")


def test_flash_attention(library):
    timeline = traced(*flash_attention(library(*FLASH)))
    assert timeline.tier == "symbolic"
    assert count(timeline, BATCH * HEADS * LENGTH * 4) == 1  # log-sum-exps
    assert count(timeline, BATCH * HEADS * 256 * 4) == 1  # row sums: lengths rounded up to 128
    assert count(timeline, BATCH * HEADS * 256 * 64 * 4) == 1  # the gradient of q in float32: head size 40 -> 64


def test_flash_attention_with_grouped_queries(library):
    timeline = traced(*flash_attention(library(*FLASH), key_heads=2))
    expanded = BATCH * LENGTH * HEADS * HEAD * 2  # dk and dv for every query head, as large as out, its gradient, dq
    plain = traced(*flash_attention(library(*FLASH), key_heads=HEADS))
    assert timeline.tier == "symbolic"
    assert count(timeline, expanded // 2) == 2  # dk and dv
    assert count(timeline, expanded) == count(plain, expanded)  # two less for dk and dv, two more


def test_flash_attention_of_packed_sequences(library):
    timeline = traced(*flash_attention(library(*FLASH), varlen=True))
    rows = BATCH * LENGTH + 128 * BATCH
    assert timeline.tier == "symbolic"
    assert count(timeline, HEADS * BATCH * LENGTH * 4) == 1
    assert count(timeline, HEADS * rows * 4) == 1
    assert count(timeline, rows * HEADS * 64 * 4) == 1


@pytest.mark.parametrize("varlen", [False, True])
def test_a_deterministic_backward_sums_in_as_many_parts_as_fill_the_card(library, varlen):
    timeline = traced(*flash_attention(library(*FLASH), varlen=varlen, deterministic=True))
    parts = -(-108 // (BATCH * HEADS))
    rows = BATCH * LENGTH + 128 * BATCH if varlen else BATCH * 256
    assert count(timeline, parts * rows * HEADS * 64 * 4) == 1


def memory_efficient(packed):
    """The autograd function of xformers around PyTorch's kernel, as cutlass.py of 0.0.29 to 0.0.34 calls it."""
    forward, backward = torch.ops.aten._efficient_attention_forward, torch.ops.aten._efficient_attention_backward

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, starts):
            longest = -1 if starts is None else LENGTH
            lengths = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": longest, "max_seqlen_k": longest}
            shared = {"dropout_p": 0.0, "custom_mask_type": 1, "scale": None, "window_size": None, "bias": None}
            ctx.named = {**lengths, **shared}
            out, sums, *_others = forward(query=q, key=k, value=v, compute_log_sumexp=True, seqlen_k=None, **ctx.named)
            ctx.save_for_backward(q, k, v, out, sums)
            return out

        @staticmethod
        def backward(ctx, grad):
            q, k, v, out, sums = ctx.saved_tensors
            drawn = {"philox_seed": torch.Tensor(), "philox_offset": torch.Tensor(), "num_splits_key": None}
            made = backward(grad, q, k, v, bias_requires_grad=False, logsumexp=sums, out=out, **drawn, **ctx.named)
            return (*made[:3], None)

    def apply(x):
        heads = x.reshape(1 if packed else x.shape[0], -1, HEADS, 3 * HEAD).chunk(3, dim=-1)
        places = torch.arange(x.shape[0] + 1, dtype=torch.int32, device=x.device) * LENGTH
        return Attention.apply(*heads, places if packed else None)

    return apply, 3 * WIDTH


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_pytorchs_memory_efficient_kernel_as_xformers_calls_it(packed, dtype):
    timeline = traced(*memory_efficient(packed), dtype=dtype)
    assert timeline.tier == "symbolic"
    assert count(timeline, BATCH * HEADS * 224 * 4) == 1  # log-sum-exps: rows rounded up to 32
    half = dtype == torch.bfloat16
    assert count(timeline, BATCH * HEADS * LENGTH * 4) == (1 if half else 2)  # row sums of the backward pass
    tiles = BATCH * HEADS * 256 // 64  # of 64 x 64, for the query's gradient in float32; each with its lock
    assert count(timeline, tiles * (64 * 64 * 4 + 16)) == 1


def scan(compiled, states=16):
    """The function of mamba's selective_scan_interface.py; B and C vary, there is a z."""

    class Scan(torch.autograd.Function):
        @staticmethod
        def forward(ctx, u, delta, a, b, c, d, z, bias):
            out, x, gated = compiled.fwd(u, delta, a, b, c, d, z, bias, True)
            ctx.save_for_backward(u, delta, a, b, c, d, z, bias, x, out)
            return gated

        @staticmethod
        def backward(ctx, grad):
            *inputs, x, out = ctx.saved_tensors
            made = compiled.bwd(*inputs, grad.contiguous(), x, out, None, True, False)
            du, ddelta, da, db, dc, dd, dbias, dz = made
            return du, ddelta, da, db, dc, dd, dz, dbias

    def apply(x):
        u, delta, z = (one.contiguous() for one in x.transpose(1, 2).split(WIDTH, dim=1))
        b = u[:, None, :states].contiguous()
        weights = x.new_zeros(WIDTH, states, dtype=torch.float32), x.new_zeros(WIDTH, dtype=torch.float32)
        return Scan.apply(u, delta, weights[0], b, b, weights[1], z, weights[1])

    return apply, 3 * WIDTH


def test_selective_scan(library):
    timeline = traced(*scan(library("mamba_ssm", "2.2.4", "selective_scan_cuda", "fwd", "bwd")))
    assert timeline.tier == "symbolic"
    assert count(timeline, BATCH * WIDTH * 1 * 32 * 4) == 1  # states between chunks of 2,048
    assert count(timeline, BATCH * 16 * LENGTH * 4) == 2  # gradients of B and C, summed in float32
    assert sys.modules["selective_scan_cuda"].fwd is refuse  # as it was


def test_another_compiled_function_still_fails(library):
    compiled = library("mamba_ssm", "0.9", "selective_scan_cuda", "fwd", "bwd")
    with pytest.raises(TypeError, match="incompatible function arguments"):
        traced(*scan(compiled))


@pytest.mark.parametrize(("release", "known"), [("0.0.32.post2", True), ("0.0.28", False)])
def test_xformers_with_its_own_build_of_flash_attention(library, monkeypatch, release, known):
    compiled = library("xformers", release, "xformers._C_flashattention", *FLASH[3:])
    monkeypatch.setitem(sys.modules, "xformers.ops.fmha.flash", ModuleType("xformers.ops.fmha.flash"))
    sys.modules["xformers.ops.fmha.flash"]._C_flashattention = compiled
    timeline = traced(*flash_attention(compiled, namespace="xformers_flash"))
    assert timeline.tier == "symbolic"
    assert count(timeline, BATCH * HEADS * 256 * 64 * 4) == int(known)


@pytest.mark.parametrize("deterministic", [False, True])
def test_causal_convolution(library, monkeypatch, deterministic):
    monkeypatch.setenv("CAUSAL_CONV1D_DETERMINISTIC", str(int(deterministic)))
    functions = "causal_conv1d_fwd", "causal_conv1d_bwd"
    compiled = library("causal_conv1d", "1.6.1", "causal_conv1d_cuda", *functions)

    class Convolution(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            out = torch.empty_like(x)
            assert compiled.causal_conv1d_fwd(x, weight, None, None, None, out, None, True) is None
            ctx.save_for_backward(x, weight)
            return out

        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            dx, by_weight = torch.empty_like(x), torch.zeros_like(weight, dtype=torch.float32)
            given = x, weight, None, grad.contiguous(), None, None, None, dx, by_weight
            compiled.causal_conv1d_bwd(*given, None, None, True)
            return dx, by_weight.to(weight.dtype)

    def apply(x):
        return Convolution.apply(x.transpose(1, 2).contiguous(), x.new_zeros(WIDTH, 4).requires_grad_())

    timeline = traced(apply)
    assert timeline.tier == "symbolic"
    assert count(timeline, BATCH * WIDTH * 4 * 4) == int(deterministic)


def test_causal_convolution_before_1_6_makes_its_results(library):
    functions = "causal_conv1d_fwd", "causal_conv1d_bwd"
    compiled = library("causal_conv1d", "1.5.2", "causal_conv1d_cuda", *functions)

    class Convolution(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return compiled.causal_conv1d_fwd(x, weight, None, None, None, None, True)

        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            given = x, weight, None, grad.contiguous(), None, None, None, None, False, True
            dx, by_weight, by_bias, states = compiled.causal_conv1d_bwd(*given)
            assert (by_bias, states) == (None, None)
            return dx, by_weight

    def apply(x):
        return Convolution.apply(x.transpose(1, 2).contiguous(), x.new_zeros(WIDTH, 40).requires_grad_())

    timeline = traced(apply)
    assert timeline.tier == "symbolic"
    assert count(timeline, WIDTH * 40 * 4) == 1  # the gradient of the weight, summed in float32
