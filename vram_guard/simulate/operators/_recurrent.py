"""Allocations of cuDNN's recurrent layers, in the order of RNN.cpp (``_cudnn_rnn``, ``_cudnn_rnn_backward``)."""

from __future__ import annotations

from typing import Any

import torch

from vram_guard.scratch import DropoutStates, RecurrentLayer, RecurrentWorkspace
from vram_guard.simulate.memory.recorder import Recorder
from vram_guard.simulate.operators import reductions


def rnn_forward(recorder: Recorder, func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """Output, last states, cuDNN's reserve space for backward; the weights in one buffer where they are not in one."""
    source, weights, _stride, _buffer, state, cell, mode, hidden_size, projection = args[:9]
    layers, batch_first, dropout, train, bidirectional = args[9:14]
    directions = 2 if bidirectional else 1
    read = source.transpose(0, 1) if batch_first else source  # cuDNN runs time-major
    name = str(func)
    if dropout and train:
        recorder.once(DropoutStates(), name)  # RNN.cpp, ``get_dropout_state``: kept for the process
    held = [_copied(recorder, read, name)]
    out = _empty((*read.shape[:-1], (projection or hidden_size) * directions), source.dtype)
    last = _empty(state.shape, source.dtype)
    last_cell = _empty(cell.shape if cell is not None else 0, source.dtype)
    for tensor in (out, last, last_cell):
        recorder.track(tensor, name)
    buffer, reserve = _empty(0, source.dtype), _empty(0, torch.uint8)
    if len({weight.untyped_storage()._cdata for weight in weights}) > 1:
        buffer = _empty(sum(weight.numel() for weight in weights), source.dtype)
        recorder.track(buffer, name)
    if train:
        layer = _layer(source, weights, state, args[14], mode, hidden_size, layers, dropout, bidirectional)
        rows, batch = numbers = _numbers(source, state)
        held.append(recorder.hold((RecurrentWorkspace(layer, forward=True), numbers), name))
        steps = len(args[14]) or rows // max(1, batch)
        reserve = _empty(layer.reserve(steps, rows, batch), torch.uint8)
        recorder.track(reserve, name)
    recorder.release(held)
    made = out.transpose(0, 1) if batch_first else out
    return made, last, last_cell, reserve, buffer


def rnn_backward(recorder: Recorder, func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """Gradients of input and states, and of all weights as views of one flat buffer."""
    source, weights, _stride, _buffer, state, cell, _output, grad, grad_state, grad_cell, mode, hidden_size = args[:12]
    _projection, layers, batch_first, dropout, _train, bidirectional = args[12:18]
    wanted = args[-1]
    name = str(func)
    layer = _layer(source, weights, state, args[18], mode, hidden_size, layers, dropout, bidirectional)
    workspace = RecurrentWorkspace(layer, forward=False), _numbers(source, state)
    missing = [like for given, like in ((grad_state, state), (grad_cell, cell)) if given is None and like is not None]
    zeros = [recorder.hold(_bytes(like), name) for like in missing]
    read, arrived = (t.transpose(0, 1) if batch_first and t is not None else t for t in (source, grad))
    held = [_copied(recorder, each, name) for each in (read, arrived) if each is not None]
    made = [_empty(read.shape, source.dtype), *(torch.empty_like(each) for each in (state, cell) if each is not None)]
    for tensor in made:
        recorder.track(tensor, name)
    recorder.release([*held, recorder.hold(workspace, name)])
    views = []
    if wanted[3]:
        held = [_copied(recorder, read, name)]
        flat = _empty(sum(weight.numel() for weight in weights), source.dtype)
        recorder.track(flat, name)
        recorder.release([*held, recorder.hold(workspace, name)])
        offset = 0
        for weight in weights:
            views.append(flat[offset : offset + weight.numel()].view(weight.shape))
            offset += weight.numel()
    recorder.release(zeros)
    of_source = made[0].transpose(0, 1) if batch_first else made[0]
    return of_source, made[1], made[2] if cell is not None else _empty(0, source.dtype), views


def lstm_cell(recorder: Recorder, func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """Next states, and the gates for the backward pass, which come first (cuda/RNN.cu, ``_thnn_fused_lstm_cell``)."""
    gates, _hidden, cell = args[:3]
    workspace = _empty(gates.shape, gates.dtype)
    recorder.track(workspace, str(func))
    return _empty(cell.shape, cell.dtype), _empty(cell.shape, cell.dtype), workspace


def lstm_cell_backward(recorder: Recorder, func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """Gradients of gates, cell states and biases (cuda/RNN.cu, ``_thnn_fused_lstm_cell_backward_impl``)."""
    cell, workspace, has_bias = args[2], args[4], args[5]
    gates, of_cell = _empty(workspace.shape, workspace.dtype), _empty(cell.shape, cell.dtype)
    for tensor in (gates, of_cell):
        recorder.track(tensor, str(func))
    return gates, of_cell, _summed(recorder, gates, str(func)) if has_bias else None


def gru_cell(recorder: Recorder, func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """The next state; five numbers of each of its elements for the backward pass, which come first (cuda/RNN.cu)."""
    state = args[2]
    workspace = _empty((state.shape[0], 5 * state.shape[1]), state.dtype)
    recorder.track(workspace, str(func))
    return _empty(state.shape, state.dtype), workspace


def gru_cell_backward(recorder: Recorder, func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """Gradients of both gates, the state and both biases (cuda/RNN.cu, ``_thnn_fused_gru_cell_backward_cuda``)."""
    grad, workspace, has_bias = args
    rows, wide = workspace.shape
    gates = [_empty((rows, wide // 5 * 3), workspace.dtype) for _which in ("input", "hidden")]
    of_state = _empty(grad.shape, grad.dtype)
    for tensor in (*gates, of_state):
        recorder.track(tensor, str(func))
    biases = [_summed(recorder, gate, str(func)) if has_bias else None for gate in gates]
    return *gates, of_state, *biases


def _summed(recorder: Recorder, gates: torch.Tensor, name: str) -> torch.Tensor:
    """A bias's gradient: the sum of the rows."""
    out = _empty(gates.shape[1:], gates.dtype)
    recorder.track(out, name)
    reductions.column_sum(recorder, gates, [0], name)
    return out


def _layer(
    source: torch.Tensor,
    weights: list[torch.Tensor],
    state: torch.Tensor,
    batch_sizes: list[int],
    mode: int,
    hidden: int,
    layers: int,
    dropout: float,
    bidirectional: bool,
) -> RecurrentLayer:
    """What of the layer and its call decides over cuDNN's buffers."""
    return RecurrentLayer(
        *(mode, source.shape[-1], hidden, layers),
        directions=2 if bidirectional else 1,
        matrices=sum(weight.numel() for weight in weights if weight.dim() > 1),
        dtype=str(source.dtype).removeprefix("torch."),
        drops=bool(dropout),
        packed=bool(batch_sizes),
        projected=state.shape[-1] != hidden,
    )


def _numbers(source: torch.Tensor, state: torch.Tensor) -> tuple[int, int]:
    """Rows of all steps, and sequences; ``state`` is (layers * directions, sequences, width)."""
    return source.numel() // max(1, source.shape[-1]), state.shape[1]


def _copied(recorder: Recorder, read: torch.Tensor, name: str) -> int | None:
    """``contiguous()``: the block of the copy that it makes, if it makes one."""
    return None if read.is_contiguous() else recorder.hold(_bytes(read), name)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _empty(shape: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
