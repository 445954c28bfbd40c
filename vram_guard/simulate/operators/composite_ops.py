"""Composite operators that take another way on CUDA, led there before they decompose.

A composite asks ``input.is_cuda()`` in C++ and picks a fused operator; for any other device it decomposes. The kernels
here stand in front of that decomposition, for symbolic tensors only, and call what CUDA would.

| operator | on CUDA | source |
|---|---|---|
| dropout | ``native_dropout``, mask of one byte an element | Dropout.cpp ``is_fused_kernel_acceptable`` |
| batch_norm | ``cudnn_batch_norm`` within cuDNN's limits, else ``native_batch_norm`` | Normalization.cpp |
| softmax, log_softmax to float32 | float16 input: in one kernel, without a float32 copy of the input | SoftMax.cpp |
| scaled_dot_product_attention | flash, memory-efficient, cuDNN or math | sdp_utils.cpp |
| lstm, gru, rnn_tanh, rnn_relu | ``_cudnn_rnn`` over flattened weights | RNN.cpp |
| rms_norm | ``_fused_rms_norm`` from torch 2.9 on | layer_norm.cpp |
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from vram_guard.simulate.memory.recorder import Recorder
from vram_guard.simulate.operators.attention import attention
from vram_guard.simulate.operators.autocast import operator

_HALVES = (torch.float16, torch.bfloat16)

#: cuDNN's numbers for its RNN modes, as ``_cudnn_rnn`` takes them.
_RNN_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}


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
    if cudnn_enabled and training and weight is not None and bias is not None and _cudnn_norm(input):
        run = torch.ops.aten.cudnn_batch_norm
    else:
        run = torch.ops.aten.native_batch_norm
    made: torch.Tensor = run(input, weight, bias, running_mean, running_var, training, momentum, eps)[0]
    return made


def _cudnn_norm(input: torch.Tensor) -> bool:
    """CuDNN's limits (Normalization.cpp, ``_select_batch_norm_backend``)."""
    if input.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return False
    return input.shape[0] <= (131070 if input.dim() == 2 else 880801)


def _softmax_kernel(fused: Any) -> Callable[..., torch.Tensor]:
    def kernel(input: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        if input.dtype == torch.float16 and dtype == torch.float32:
            return fused(input, dim, True)  # type: ignore[no-any-return]
        converted = input if dtype is None or dtype == input.dtype else input.to(dtype)
        return fused(converted, dim, False)  # type: ignore[no-any-return]

    return kernel


def _attention_kernel(capability: tuple[int, int]) -> Callable[..., torch.Tensor]:
    def kernel(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        return attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, capability)

    return kernel


def _rnn_kernel(name: str) -> Callable[..., tuple[torch.Tensor, ...]]:
    mode = _RNN_MODES[name]

    def run(
        input: torch.Tensor,
        hidden: list[torch.Tensor],
        weights: list[torch.Tensor],
        has_biases: bool,
        layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
        batch_sizes: list[int],
    ) -> tuple[torch.Tensor, ...]:
        state = hidden[0]
        cell = hidden[1] if len(hidden) > 1 else None
        per_layer = 4 if has_biases else 2
        projected = name == "lstm" and len(weights) % (per_layer + 1) == 0 and cell is not None
        projected = projected and cell is not None and cell.shape[-1] != state.shape[-1]
        hidden_size = cell.shape[-1] if cell is not None else state.shape[-1]
        made = torch.ops.aten._cudnn_rnn(
            *(input, weights, per_layer + int(projected), None, state, cell, mode, hidden_size),
            *(state.shape[-1] if projected else 0, layers, batch_first, dropout, train, bidirectional),
            *(batch_sizes, None),
        )
        return made[:3] if name == "lstm" else made[:2]  # type: ignore[no-any-return]

    return run


def _rnn_input(name: str) -> Callable[..., tuple[torch.Tensor, ...]]:
    run = _rnn_kernel(name)

    def kernel(
        input: torch.Tensor,
        hx: Any,
        params: Any,
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[torch.Tensor, ...]:
        hidden = list(hx) if isinstance(hx, (list, tuple)) else [hx]
        tail = (has_biases, num_layers, dropout, train, bidirectional)
        return run(input, hidden, list(params), *tail, batch_first, [])

    return kernel


def _rms_norm(
    input: torch.Tensor, normalized_shape: list[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    made: torch.Tensor = torch.ops.aten._fused_rms_norm(input, normalized_shape, weight, eps)[0]
    return made


def _kernels(capability: tuple[int, int]) -> Iterator[tuple[str, Callable[..., Any]]]:
    yield "dropout", _dropout
    yield "batch_norm", _batch_norm
    yield "softmax.int", _softmax_kernel(torch.ops.aten._softmax)
    yield "log_softmax.int", _softmax_kernel(torch.ops.aten._log_softmax)
    yield "scaled_dot_product_attention", _attention_kernel(capability)
    for name in _RNN_MODES:
        yield f"{name}.input", _rnn_input(name)
    if operator("_fused_rms_norm") is not None and operator("_fused_rms_norm_backward") is not None:
        yield "rms_norm", _rms_norm


@contextlib.contextmanager
def cuda_composites(capability: tuple[int, int]) -> Iterator[None]:
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
        yield
    finally:
        library._destroy()


# --- what the operators allocate -----------------------------------------------------------------------------


def _empty(shape: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def batch_norm_forward(_r: Recorder, _func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """Output in the input's layout, mean and inverse deviation of each channel in float32, no reserve."""
    source = args[0]
    training = args[5]
    channels = source.shape[1] if training else 0
    statistic = torch.float64 if source.dtype == torch.float64 else torch.float32
    return torch.empty_like(source), _empty(channels, statistic), _empty(channels, statistic)


def cudnn_norm_forward(r: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As ``native_batch_norm`` and cuDNN's reserve space, which is empty outside its persistent NHWC mode."""
    return (*batch_norm_forward(r, func, args, kwargs), _empty(0, torch.uint8))


def cudnn_norm_backward(_r: Recorder, _func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """Gradients of source, weight and bias: ``(source, grad_output, weight, ...)``."""
    source, _grad, weight = args[:3]
    return torch.empty_like(source), torch.empty_like(weight), torch.empty_like(weight)


def norm_backward(_r: Recorder, _func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """Gradients as ``native_batch_norm_backward`` returns them: ``(grad_out, source, weight, ...)``."""
    _grad, source, weight = args[:3]
    wanted = args[-1]
    parameter = None if weight is None else torch.empty_like(weight)
    return (
        torch.empty_like(source) if wanted[0] else None,
        parameter if wanted[1] else None,
        None if weight is None or not wanted[2] else torch.empty_like(weight),
    )


def rnn_forward(recorder: Recorder, func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """Output, last states, cuDNN's reserve space for backward, the flattened weights (no copy: they are flat).

    The reserve's size is cuDNN's secret; modelled as what the backward needs of every step, layer and direction:
    the gates, for LSTM the cell, and the hidden state between layers.
    """
    source, _weights, _stride, _buffer, state, cell, mode, hidden_size, projection = args[:9]
    layers, batch_first, _dropout_p, train, bidirectional = args[9:14]
    directions = 2 if bidirectional else 1
    steps, batch = (source.shape[1], source.shape[0]) if batch_first else (source.shape[0], source.shape[1])
    width = (projection or hidden_size) * directions
    out = _empty((batch, steps, width) if batch_first else (steps, batch, width), source.dtype)
    if batch_first:  # cuDNN runs time-major: the result is a transposed view, the input a copy
        out = _empty((steps, batch, width), source.dtype).transpose(0, 1)
        recorder.temporary(source.numel() * source.element_size(), str(func))
    gates = {0: 1, 1: 1, 2: 4, 3: 3}[mode]
    kept = gates + (2 if mode == 2 else 1)
    reserve = steps * batch * hidden_size * directions * layers * kept * source.element_size() if train else 0
    last = _empty(state.shape, source.dtype)
    last_cell = _empty(cell.shape, source.dtype) if cell is not None else _empty(0, source.dtype)
    return out, last, last_cell, _empty(reserve, torch.uint8), _empty(0, source.dtype)


def rnn_backward(recorder: Recorder, func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """Gradients of input and states, and of all weights as views of one flat buffer."""
    source, weights, _stride, _buffer, state, cell = args[:6]
    wanted = args[-1]
    flat = _empty(sum(weight.numel() for weight in weights), source.dtype)
    recorder.track(flat, str(func))
    views = []
    offset = 0
    for weight in weights:
        views.append(flat[offset : offset + weight.numel()].view(weight.shape))
        offset += weight.numel()
    grad_cell = torch.empty_like(cell) if cell is not None else _empty(0, source.dtype)
    return torch.empty_like(source), torch.empty_like(state), grad_cell, views if wanted[3] else []
