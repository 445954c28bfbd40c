"""Allocations of cuDNN's recurrent layers."""

from __future__ import annotations

from typing import Any

import torch

from vram_guard.simulate.memory.recorder import Recorder


def rnn_forward(recorder: Recorder, func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """Output, last states, cuDNN's reserve space for backward, the flattened weights (no copy: they are flat).

    The reserve's size is not published; modelled as what the backward needs of every step, layer and direction:
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


def _empty(shape: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
