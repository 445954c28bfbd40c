"""Allocations of cuDNN's recurrent layers, in the order of RNN.cpp (``_cudnn_rnn``, ``_cudnn_rnn_backward``).

How much cuDNN takes (``cudnnGetRNNTempSpaceSizes``) is published nowhere. The sizes here are read off what cuDNN 9.19
took for float32 and float16, LSTM and GRU, batches of 1, 16 and 64, sequences of 8 and 128 steps, widths of 256 and
512, and inputs narrower than the states: to the byte, in a batch of 1 to the MiB. Batches of 128 under autocast, which
they were not read off, are equal as well. All of these had two layers, one direction and dropout: how the terms grow
with either, plain recurrent layers and projections are concluded from what the terms are, and were not measured.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from vram_guard.scratch import DropoutStates
from vram_guard.simulate.memory.recorder import Recorder

_LSTM, _GRU = 2, 3

#: In every workspace, whatever the kind, the sizes and the dtype.
_FIXED = 16 * 2**20
_ALIGNED = 256


class _Sizes(NamedTuple):
    """What cuDNN's two buffers depend on."""

    mode: int
    steps: int
    batch: int
    inputs: int
    hidden: int
    layers: int
    directions: int
    matrices: int
    """Elements of all weights without biases."""
    element: int
    """Bytes."""
    dropout: float

    @property
    def _gates(self) -> int:
        return {_LSTM: 4, _GRU: 3}.get(self.mode, 1)

    def workspace(self) -> int:
        """Of every call in training, forward and backward alike.

        For all steps the gates of a layer with its outputs in two places, and its input; states of single steps; a copy
        of the matrices; two numbers for each sequence.
        """
        wide = self.hidden * self.directions
        of_step = self.layers * wide * ((2 * self._gates if self.mode == _LSTM else self._gates) + 2)
        sequences = self.steps * (wide * (self._gates + 2) + self.inputs) + of_step
        return (self.batch * sequences + self.matrices) * self.element + _FIXED + _ALIGNED + 8 * self.batch

    def reserve(self) -> int:
        """What the backward pass needs.

        Of each layer, for all steps, an LSTM's gates and cells, or a GRU's gates and as much again; the outputs between
        layers, and a bit for each of their elements that dropout may have dropped.
        """
        width = self.steps * self.batch * self.hidden * self.directions
        kept = {_LSTM: 5, _GRU: 6}.get(self.mode, 2)
        between = width * (self.layers - 1)
        mask = math.ceil(between / 8) if self.dropout else 0
        return (width * self.layers * kept + between) * self.element + mask + _ALIGNED


def rnn_forward(recorder: Recorder, func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """Output, last states, cuDNN's reserve space for backward, the flattened weights (no copy: they are flat)."""
    source, weights, _stride, _buffer, state, cell, mode, hidden_size, projection = args[:9]
    layers, batch_first, dropout, train, bidirectional = args[9:14]
    directions = 2 if bidirectional else 1
    read = source.transpose(0, 1) if batch_first else source  # cuDNN runs time-major
    steps, batch = read.shape[:2]
    name = str(func)
    if dropout and train:
        recorder.once(DropoutStates(), name)  # RNN.cpp, ``get_dropout_state``: kept for the process
    held = [_copied(recorder, read, name)]
    out = _empty((steps, batch, (projection or hidden_size) * directions), source.dtype)
    last = _empty(state.shape, source.dtype)
    last_cell = _empty(cell.shape if cell is not None else 0, source.dtype)
    for tensor in (out, last, last_cell):
        recorder.track(tensor, name)
    reserve = _empty(0, torch.uint8)
    if train:
        sizes = _sizes(source, weights, mode, hidden_size, layers, batch_first, dropout, bidirectional)
        held.append(recorder.hold(sizes.workspace(), name))
        reserve = _empty(sizes.reserve(), torch.uint8)
        recorder.track(reserve, name)
    recorder.release(held)
    made = out.transpose(0, 1) if batch_first else out
    return made, last, last_cell, reserve, _empty(0, source.dtype)


def rnn_backward(recorder: Recorder, func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """Gradients of input and states, and of all weights as views of one flat buffer."""
    source, weights, _stride, _buffer, state, cell, _output, grad, grad_state, grad_cell, mode, hidden_size = args[:12]
    _projection, layers, batch_first, dropout, _train, bidirectional = args[12:18]
    wanted = args[-1]
    name = str(func)
    workspace = _sizes(source, weights, mode, hidden_size, layers, batch_first, dropout, bidirectional).workspace()
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


def _sizes(
    source: torch.Tensor,
    weights: list[torch.Tensor],
    mode: int,
    hidden: int,
    layers: int,
    batch_first: bool,
    dropout: float,
    bidirectional: bool,
) -> _Sizes:
    batch, steps = source.shape[:2] if batch_first else reversed(source.shape[:2])
    matrices = sum(weight.numel() for weight in weights if weight.dim() > 1)
    return _Sizes(
        *(mode, steps, batch, source.shape[2], hidden, layers, 2 if bidirectional else 1, matrices),
        *(source.element_size(), dropout),
    )


def _copied(recorder: Recorder, read: torch.Tensor, name: str) -> int | None:
    """``contiguous()``: the block of the copy that it makes, if it makes one."""
    return None if read.is_contiguous() else recorder.hold(_bytes(read), name)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _empty(shape: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
