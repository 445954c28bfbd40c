"""How much cuDNN takes for recurrent layers: its workspace, and the reserve space that the backward pass needs.

The sizes (``cudnnGetRNNTempSpaceSizes``) are published nowhere. The rules here are read off what cuDNN 9.19 took on an
H100 for 2,249 layers (benchmarks/gpu/operators/recurrent-h100.csv): LSTM, GRU and plain layers, one to four of them, in
one and both directions, with and without dropout, states 64 to 512 wide, inputs as wide, narrower and wider, 1 to 64
sequences of 8 to 128 steps, packed or not, in float32, float16 and bfloat16. The reserve space is equal for all of
them but for the bytes that fill up bits, the workspace is for 1,585, and within 2% for the others. Layers with
projections were not measured.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from vram_guard.scratch._card import Card

LSTM, GRU = 2, 3

#: In every workspace for each layer and direction, whatever the kind, the sizes and the dtype.
_FIXED = 8 * 2**20
_ALIGNED = 256
_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}

#: The widest states for which RNN.cpp (``use_rnn_persist_small_h``) asks for kernels that keep their weights on the
#: multiprocessors: in the forward and the backward pass, of LSTM and GRU, and of plain layers.
_PERSISTENT = {True: (192, 128), False: (384, 256)}


class RecurrentLayer(NamedTuple):
    """What of a recurrent layer cuDNN's two buffers depend on."""

    mode: int
    """cuDNN's number of the kind: plain layers 0 and 1, :data:`LSTM`, :data:`GRU`."""
    inputs: int
    hidden: int
    layers: int
    directions: int
    matrices: int
    """Elements of all weights without biases."""
    dtype: str
    """Without "torch.": "float16"."""
    drops: bool
    """Something is dropped out between layers."""
    packed: bool
    projected: bool

    @property
    def _gates(self) -> int:
        return {LSTM: 4, GRU: 3}.get(self.mode, 1)

    def workspace(self, rows: int, batch: int, card: Card, *, forward: bool) -> int:
        """Bytes of a call in training, forward or backward.

        Each call is given what the larger one of the two passes needs with its kernels: for all steps gates, outputs
        and inputs; states of single steps; a copy of the matrices; two numbers for each sequence that is not packed.

        Args:
            rows: of all steps together: steps times sequences, and fewer where sequences are packed.
            batch: sequences.
            card: whose kernels run.
            forward: which of the two calls.
        """
        persistent = self._persistent(batch, card, forward=forward)
        passes = (self._of_forward(persistent=persistent), self._of_backward(persistent=persistent))
        of_steps = self.layers * batch * self.hidden
        fewer = 4 * self.directions if self.packed else 0
        needed = max(rows * of_row + of_steps * (of_step - fewer) for of_row, of_step in passes)
        numbers = 0 if self.packed else math.ceil(8 * batch / 32) * 32
        fixed = self.layers * self.directions * _FIXED + _ALIGNED + numbers
        return (needed + self.matrices) * _BYTES[self.dtype] + fixed

    def _of_forward(self, *, persistent: bool) -> tuple[int, int]:
        """Elements of a row and of a step's state: gates, outputs (twice where some are dropped), and copies."""
        one, lstm = self.directions == 1, self.mode == LSTM
        wide = self.hidden * self.directions
        outputs = 2 if not one else int(self.drops and self.layers > 1)
        of_row = (self._gates + outputs) * wide + (0 if self.packed else wide + self.inputs)
        of_step = (10 if one else 24) if lstm else (self._gates + 2 if one else 14)
        if persistent and lstm:
            of_row += 16 * self.hidden
            of_step = 8 if one else 18
        return of_row, of_step

    def _of_backward(self, *, persistent: bool) -> tuple[int, int]:
        """Elements of a row and of a step's state: gradients of outputs and inputs, and what stands between layers."""
        lstm, one, several = self.mode == LSTM, self.directions == 1, self.layers > 1
        wide, narrow = self.hidden * self.directions, max(0, self.hidden - self.inputs)
        if one:
            of_row = (0 if several else self.hidden) + self.inputs + narrow
            of_step = 11 if lstm else 5
        else:
            of_row = (4 if several else 2) * self.hidden + 4 * self.inputs + 4 * narrow
            of_step = 26 if lstm else 14
        of_row += 0 if self.packed else 2 * (wide + self.inputs)
        if persistent:
            of_row += ({LSTM: 12, GRU: 14}.get(self.mode, 9) + (2 if one and several else 0)) * self.hidden
            of_step += 1 if one else 0
        elif one and several:
            of_step += 8
        return of_row, of_step

    def _persistent(self, batch: int, card: Card, *, forward: bool) -> bool:
        """True where the kernels keep their weights on the multiprocessors (RNN.cpp, ``get_algo``).

        cuDNN has none for bfloat16, and takes what others take. Of the conditions for one layer in float16, those of
        the card (``use_persist_device_heuristics``) are taken for GPUs since Ampere.
        """
        if self.packed or self.projected or self.dtype not in ("float16", "float32"):
            return False
        if self.hidden <= _PERSISTENT[self.mode in (LSTM, GRU)][0 if forward else 1]:
            return True
        divisible = self.hidden % 128 == 0 and self.inputs % 128 == 0 and batch % 8 == 0
        few = self.layers == 1 and self.directions == 1 and self.hidden <= 1024 and batch <= 128
        (major, minor), many = card.capability, card.multiprocessors >= 98
        kept = self.mode == LSTM and major >= 8 and minor != 6 and many
        return kept and self.dtype == "float16" and divisible and few

    def reserve(self, steps: int, rows: int, batch: int) -> int:
        """Bytes that the backward pass needs of the forward pass.

        Of each layer, for all steps, an LSTM's gates and cells, a GRU's gates and as much again, or plain states; the
        outputs between layers, and a bit for each of their elements that dropout may have dropped, packed or not, for
        each direction (cuDNN fills the bits up to 16 bytes).

        Args:
            steps: of the longest sequence.
            rows: of all steps together.
            batch: sequences.
        """
        width = rows * self.hidden * self.directions
        kept = {LSTM: 5, GRU: 6}.get(self.mode, 1)
        between = width * (self.layers - 1)
        outputs = steps * batch * self.hidden * self.directions * (self.layers - 1)
        mask = math.ceil(outputs / 8) * self.directions if self.drops else 0
        return (width * self.layers * kept + between) * _BYTES[self.dtype] + mask + _ALIGNED


class RecurrentWorkspace(NamedTuple):
    """The workspace of one call of a layer; its numbers are rows and sequences."""

    layer: RecurrentLayer
    forward: bool

    def bytes(self, numbers: tuple[int, ...], card: Card) -> int:
        rows, batch = numbers
        return self.layer.workspace(rows, batch, card, forward=self.forward)
