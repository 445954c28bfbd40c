"""Composite operators that take another way on CUDA, led there before they decompose.

A composite asks ``input.is_cuda()`` in C++ and picks a fused operator; for any other device it decomposes. The kernels
here stand in front of that decomposition, for symbolic tensors only, and call what CUDA would.

| operator | on CUDA | source |
|---|---|---|
| linear | the bias is added in place where the input is not contiguous | Linear.cpp ``linear`` |
| ctc_loss | lengths of the host become numbers | LossCTC.cpp ``ctc_loss`` |
| one_hot | ones scattered into zeros | Onehot.cpp ``one_hot`` |
| dropout | ``native_dropout``, mask of one byte an element | Dropout.cpp ``is_fused_kernel_acceptable`` |
| batch_norm | ``cudnn_batch_norm`` within cuDNN's limits, else ``native_batch_norm`` | Normalization.cpp |
| softmax, log_softmax to float32 | float16 input: in one kernel, without a float32 copy of the input | SoftMax.cpp |
| scaled_dot_product_attention | flash, memory-efficient, cuDNN or math | sdp_utils.cpp |
| lstm, gru, rnn_tanh, rnn_relu | ``_cudnn_rnn`` over flattened weights, of packed sequences too | RNN.cpp |
| lstm_cell, gru_cell | both products, and one kernel for what follows them | RNN.cpp ``LSTMCell``, ``GRUCell`` |
| mish_backward | one kernel; elsewhere it is seven operators | Activation.cpp ``math_mish_backward`` |
| allclose | as everywhere; it reads its answer | TensorCompare.cpp ``allclose`` |
| _fused_rms_norm | one kernel from torch 2.9 on; ``rms_norm`` itself says when | layer_norm.cpp ``rms_norm_symint`` |
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from vram_guard.simulate.device.capability import Capability
from vram_guard.simulate.operators._attention import attention
from vram_guard.simulate.operators.autocast import operator

#: cuDNN's numbers for its RNN modes, as ``_cudnn_rnn`` takes them.
_RNN_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}


def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """With a dispatch mode on, torch takes the bias for a subclass and adds it to a copy (``isTensorSubclassLike``)."""
    if bias is None or input.dim() < 3 or input.is_contiguous():
        return torch.ops.aten.linear.default.decompose(input, weight, bias)  # type: ignore[no-any-return]
    return (input @ weight.t()).add_(bias)


def _dropout(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    if not train or p == 0 or input.numel() == 0:
        return input
    if p == 1:
        return input.mul(0)
    made: torch.Tensor = torch.ops.aten.native_dropout(input, p, train)[0]
    return made


def _batch_norm(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> torch.Tensor:
    if training and input.numel() == 0:
        raise ValueError(f"Expected a non-empty input for batch_norm in training, got {tuple(input.shape)}")
    if cudnn_enabled and training and weight is not None and bias is not None and _cudnn_norm(input, weight):
        run = torch.ops.aten.cudnn_batch_norm
    else:
        run = torch.ops.aten.native_batch_norm
    made: torch.Tensor = run(input, weight, bias, running_mean, running_var, training, momentum, eps)[0]
    return made


def _cudnn_norm(input: torch.Tensor, weight: torch.Tensor) -> bool:
    """CuDNN's limits (Normalization.cpp, ``_select_batch_norm_backend``); measured on an H100 with torch 2.11."""
    if input.dim() < 3 or torch.bfloat16 in (input.dtype, weight.dtype):
        return False
    return (input.dtype != torch.float16 or weight.dtype == torch.float32) and input.shape[0] <= 880801


def _softmax_kernel(fused: Any) -> Callable[..., torch.Tensor]:
    def kernel(input: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        if input.dtype == torch.float16 and dtype == torch.float32:
            return fused(input, dim, True)  # type: ignore[no-any-return]
        converted = input if dtype is None or dtype == input.dtype else input.to(dtype)
        return fused(converted, dim, False)  # type: ignore[no-any-return]

    return kernel


def _rnn_kernel(name: str, *, packed: bool) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Packed data come with the sequences of each step, and are never batch first."""

    def kernel(input: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
        if packed:
            return _by_cudnn(name, input, rest[0].tolist(), *rest[1:], False)
        return _by_cudnn(name, input, [], *rest)

    return kernel


def _by_cudnn(
    name: str,
    input: torch.Tensor,
    batch_sizes: list[int],
    hx: Any,
    params: Any,
    has_biases: bool,
    *settings: Any,
) -> tuple[torch.Tensor, ...]:
    num_layers, dropout, train, bidirectional, batch_first = settings
    state, cell = hx if isinstance(hx, (list, tuple)) else (hx, None)
    weights = list(params)
    per_layer = 4 if has_biases else 2
    projected = cell is not None and len(weights) % (per_layer + 1) == 0 and cell.shape[-1] != state.shape[-1]
    hidden_size = state.shape[-1] if cell is None else cell.shape[-1]
    made = torch.ops.aten._cudnn_rnn(
        *(input, weights, per_layer + int(projected), None, state, cell, _RNN_MODES[name], hidden_size),
        *(state.shape[-1] if projected else 0, num_layers, batch_first, dropout, train, bidirectional),
        *(batch_sizes, None),
    )
    return made[:2] if cell is None else made[:3]  # type: ignore[no-any-return]


def _lstm_cell(
    input: torch.Tensor,
    hx: list[torch.Tensor],
    w_ih: torch.Tensor,
    w_hh: torch.Tensor,
    b_ih: torch.Tensor | None = None,
    b_hh: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    state, cell = hx
    gates = input @ w_ih.t(), state @ w_hh.t()
    made = torch.ops.aten._thnn_fused_lstm_cell(*gates, cell, b_ih, b_hh)
    return made[0], made[1]


def _gru_cell(
    input: torch.Tensor,
    hx: torch.Tensor,
    w_ih: torch.Tensor,
    w_hh: torch.Tensor,
    b_ih: torch.Tensor | None = None,
    b_hh: torch.Tensor | None = None,
) -> torch.Tensor:
    gates = input @ w_ih.t(), hx @ w_hh.t()
    made: torch.Tensor = torch.ops.aten._thnn_fused_gru_cell(*gates, hx, b_ih, b_hh)[0]
    return made


def _mish_backward(grad_output: torch.Tensor, self: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(self)


def _allclose(
    input: torch.Tensor, other: torch.Tensor, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
) -> bool:
    """As it is everywhere, but the value that ends it is asked for where it may not be known."""
    return bool(torch.isclose(input, other, rtol, atol, equal_nan).all().item())


def _one_hot(input: torch.Tensor, classes: int = -1) -> torch.Tensor:
    """For a tensor of the meta device torch compares with a range instead."""
    if classes == -1:
        classes = int(input.max().item()) + 1
    made = input.new_zeros((*input.shape, classes))
    return made.scatter_(-1, input.unsqueeze(-1), 1) if input.numel() else made


def _ctc_loss(
    scores: torch.Tensor,
    targets: torch.Tensor,
    lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,
) -> torch.Tensor:
    """Lengths may lie on the host: with a dispatch mode on, torch divides by them there (``isTensorSubclassLike``)."""
    batched = scores.dim() == 3
    if not batched:
        scores, targets = scores.unsqueeze(1), targets.unsqueeze(0)
        lengths, target_lengths = lengths.reshape(1), target_lengths.reshape(1)
    losses: torch.Tensor = torch.ops.aten._ctc_loss(*(scores, targets, lengths, target_lengths, blank, zero_infinity))[
        0
    ]
    if zero_infinity:
        losses = torch.where(losses == float("inf"), losses.new_zeros(()), losses)
    if reduction == 1:
        return (losses / losses.new_empty(losses.shape)).mean()  # by the lengths of the targets, copied to the GPU
    if reduction == 2:
        return losses.sum()
    return losses if batched else losses.squeeze(0)


def _fused_rms_norm(
    input: torch.Tensor, normalized_shape: list[int], _weight: torch.Tensor | None, _eps: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and inverse root mean squares; without a kernel of its own torch would decompose it, as on the CPU."""
    kept = input.dim() - len(normalized_shape)
    accumulated = torch.float64 if input.dtype == torch.float64 else torch.float32
    rows = input.new_empty([*input.shape[:kept], *[1] * len(normalized_shape)], dtype=accumulated)
    return input.new_empty(input.shape), rows


def _kernels(capability: Capability) -> Iterator[tuple[str, Callable[..., Any]]]:
    yield "linear", _linear
    yield "dropout", _dropout
    yield "batch_norm", _batch_norm
    yield "softmax.int", _softmax_kernel(torch.ops.aten._softmax)
    yield "log_softmax.int", _softmax_kernel(torch.ops.aten._log_softmax)
    yield "one_hot", _one_hot
    yield "ctc_loss.Tensor", _ctc_loss
    yield "scaled_dot_product_attention", partial(attention, capability)
    for name in _RNN_MODES:
        yield f"{name}.input", _rnn_kernel(name, packed=False)
        yield f"{name}.data", _rnn_kernel(name, packed=True)
    yield "lstm_cell", _lstm_cell
    yield "gru_cell", _gru_cell
    yield "mish_backward", _mish_backward
    yield "allclose", _allclose


@contextlib.contextmanager
def cuda_composites(capability: Capability) -> Iterator[None]:
    """Inside the block composites on symbolic tensors run the operators that CUDA would run."""
    library = torch.library.Library("aten", "IMPL")
    registry: Any = library.m
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name, kernel in _kernels(capability):
                for key in ("Meta", "AutogradMeta"):
                    # Library.impl refuses Meta kernels of composites; the C++ object it wraps does not.
                    registry.impl(name, key, kernel)
            if (
                operator("_fused_rms_norm_backward") is not None
            ):  # with a kernel of its own, autograd does not decompose
                registry.impl("_fused_rms_norm", "Meta", _fused_rms_norm)
        yield
    finally:
        library._destroy()
