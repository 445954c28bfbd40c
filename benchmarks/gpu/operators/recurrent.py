"""Measure how much cuDNN takes for recurrent layers on the GPU of this machine, or predict what was measured.

    python -m benchmarks.gpu.operators.recurrent [--seconds N] [--out FILE]
    python -m benchmarks.gpu.operators.recurrent --against FILE

Layers of many shapes are called in a random order, as long as the seconds last, in training and without autograd: the
workspace is what the call requests beside its results. ``--against`` needs no GPU: it prints how far the predicted
workspaces are off, and layers whose reserve space is predicted otherwise; the exit status is 1 where there are such.
"""

from __future__ import annotations

import argparse
import csv
import random
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, astuple, dataclass, fields
from itertools import product
from pathlib import Path

import torch
from torch import nn

from benchmarks.harness.checked import content
from benchmarks.harness.command import arguments_of
from vram_guard.errors import InvalidInputError
from vram_guard.scratch import Card, RecurrentLayer

FOLDER = Path(__file__).parent
#: cuDNN's numbers of the kinds.
MODES = {"relu": 0, "tanh": 1, "LSTM": 2, "GRU": 3}
GATES = {"LSTM": 4, "GRU": 3}
H100 = Card((9, 0), 132)
#: Bytes by which a reserve space may be off: those that fill up the bits of what dropout has dropped.
FILLED_UP = 256


@dataclass(frozen=True)
class Layer:
    """One recurrent layer and the batch of its call."""

    kind: str
    layers: int
    directions: int
    dropout: float
    hidden: int
    inputs: int
    steps: int
    batch: int
    dtype: str
    packed: bool

    @property
    def lengths(self) -> list[int]:
        """Of the sequences: where they are packed, the last ones are half as long as the first."""
        cut = self.steps if self.packed else 0
        return [max(1, self.steps - (i * cut) // (2 * self.batch)) for i in range(self.batch)]

    @property
    def matrices(self) -> int:
        """Elements of all weights without biases."""
        inputs = [self.inputs, *[self.hidden * self.directions] * (self.layers - 1)]
        gates = GATES.get(self.kind, 1) * self.hidden
        return sum(self.directions * gates * (each + self.hidden) for each in inputs)

    def known(self) -> RecurrentLayer:
        """What the prediction goes by."""
        return RecurrentLayer(
            *(MODES[self.kind], self.inputs, self.hidden, self.layers, self.directions, self.matrices),
            dtype=self.dtype,
            drops=bool(self.dropout),
            packed=self.packed,
            projected=False,
        )

    def workspace(self, *, forward: bool = True) -> int:
        """The predicted one, in bytes."""
        return self.known().workspace(sum(self.lengths), self.batch, H100, forward=forward)

    def reserve(self) -> int:
        """The predicted reserve space, in bytes."""
        return self.known().reserve(self.steps, sum(self.lengths), self.batch)


@dataclass(frozen=True)
class Taken:
    """What cuDNN took for a layer's forward call. Sizes in bytes."""

    layer: Layer
    reserve: int
    workspace: int


def grid() -> list[Layer]:
    """The layers, in random order."""
    shapes = product(MODES, (1, 2, 3, 4), (1, 2), (0.0, 0.2), (64, 96, 256, 512), (0, 128, 700))
    batches = ((8, 1), (100, 32), (50, 64), (33, 7), (128, 16))
    found = [
        Layer(kind, layers, directions, dropout, hidden, inputs or hidden, *batch, dtype, packed)
        for (kind, layers, directions, dropout, hidden, inputs), batch, dtype, packed in product(
            shapes, batches, ("float32", "float16", "bfloat16"), (False, True)
        )
        if layers > 1 or not dropout
    ]
    random.Random(0).shuffle(found)  # noqa: S311 - an order, no secret
    return found


def taken(layer: Layer) -> Taken:
    """Call the layer on the GPU."""
    dtype = getattr(torch, layer.dtype)
    module = _module(layer).to("cuda", dtype)
    source = torch.randn(layer.steps, layer.batch, layer.inputs, device="cuda", dtype=dtype)
    sizes: list[int] = []
    if layer.packed:
        packed = nn.utils.rnn.pack_padded_sequence(source, torch.tensor(layer.lengths))
        source, sizes = packed.data, packed.batch_sizes.tolist()
    state = torch.zeros(layer.layers * layer.directions, layer.batch, layer.hidden, device="cuda", dtype=dtype)
    cell = torch.zeros_like(state) if layer.kind == "LSTM" else None
    random_state = None
    if layer.dropout:
        random_state = torch._cudnn_init_dropout_state(  # noqa: SLF001
            layer.dropout, train=True, dropout_seed=0, dtype=torch.uint8, device=torch.device("cuda")
        )

    def call() -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            found: tuple[torch.Tensor, ...] = torch.ops.aten._cudnn_rnn(  # noqa: SLF001
                *(source, module._flat_weights, 4, None, state, cell, MODES[layer.kind], layer.hidden, 0),  # noqa: SLF001
                *(layer.layers, False, layer.dropout, True, layer.directions == 2, sizes, random_state),
            )
        return found

    call()  # cuDNN keeps buffers of its own from the first call on
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    made = call()
    peak = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
    return Taken(layer, made[3].nbytes, peak - sum(each.nbytes for each in made))


def _module(layer: Layer) -> nn.RNNBase:
    sizes = (layer.inputs, layer.hidden, layer.layers)
    both = layer.directions == 2
    if layer.kind in GATES:
        kind = nn.LSTM if layer.kind == "LSTM" else nn.GRU
        return kind(*sizes, bidirectional=both, dropout=layer.dropout)
    return nn.RNN(*sizes, nonlinearity=layer.kind, bidirectional=both, dropout=layer.dropout)


def write(path: Path, rows: Iterable[Taken]) -> None:
    """One line for each layer."""
    with path.open("w", encoding="utf-8", newline="") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow([*(field.name for field in fields(Layer)), "reserve", "workspace"])
        lines.writerows((*astuple(row.layer), row.reserve, row.workspace) for row in rows)


def read(path: Path) -> list[Taken]:
    """What :func:`write` wrote.

    Raises:
        InvalidInputError: the file cannot be read, or holds something else.
    """
    found = content(path)
    try:
        rows = [_taken_of(row) for row in csv.DictReader(found.decode().splitlines())]
    except (KeyError, TypeError, ValueError, csv.Error):
        rows = []
    if not rows:
        raise InvalidInputError(f"{path} does not hold measured recurrent layers: expected what --out wrote")
    return rows


def _taken_of(row: dict[str, str]) -> Taken:
    numbers = {name: int(row[name]) for name in ("layers", "directions", "hidden", "inputs", "steps", "batch")}
    words = {"kind": row["kind"], "dtype": row["dtype"]}
    layer = Layer(**words, **numbers, dropout=float(row["dropout"]), packed=row["packed"] == "True")
    return Taken(layer, int(row["reserve"]), int(row["workspace"]))


def compared(rows: Iterable[Taken]) -> int:
    """Print how the prediction stands; 1 where a reserve space is predicted otherwise."""
    errors, wrong = [], 0
    for row in rows:
        errors.append(row.layer.workspace() / row.workspace - 1)
        if not 0 <= row.reserve - row.layer.reserve() < FILLED_UP:
            wrong += 1
            print(f"{asdict(row.layer)}: reserve space {row.reserve:,} predicted {row.layer.reserve():,}")
    errors.sort()
    print(f"{len(errors)} layers; reserve space predicted otherwise for {wrong}")
    near = sum(abs(error) < 0.01 for error in errors)
    print(f"workspace: {errors.count(0.0)} equal, {near} within 1%, {errors[0]:+.1%} to {errors[-1]:+.1%}")
    return int(wrong > 0)


def main(arguments: list[str] | None = None) -> int:
    """Measure or compare."""
    options = _options(arguments)
    if options.against is not None:
        try:
            return compared(read(options.against))
        except InvalidInputError as error:
            print(error, file=sys.stderr)
            return 2
    end = time.monotonic() + options.seconds
    rows = []
    for layer in grid():
        if time.monotonic() > end:
            break
        rows.append(taken(layer))
    write(options.out, rows)
    print(f"{len(rows)} layers, {torch.cuda.get_device_name()}, cuDNN {torch.backends.cudnn.version()}; {options.out}")
    return 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = arguments_of("benchmarks.gpu.operators.recurrent", __doc__)
    parser.add_argument("--seconds", type=float, default=70.0, metavar="N")
    parser.add_argument("--out", type=Path, default=FOLDER / "recurrent.csv", metavar="FILE")
    parser.add_argument("--against", type=Path, metavar="FILE", help="predict what FILE holds, instead of measuring")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
