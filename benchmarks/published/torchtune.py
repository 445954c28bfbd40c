"""Predict the rows of torchtune's README, "Optimization flags": one training, one saving after the other.

Llama 3.2 3B on an A100, two packed sequences of 4,096 tokens, bfloat16 throughout, the peak of active memory of
``full_finetune_single_device`` and ``lora_finetune_single_device``. The model is written here after its description:
tied embeddings, RMSNorm and rotary positions in float32, keys and values repeated for grouped queries, logits in eight
chunks that are lifted to float32 in the loss; adapters of rank 64 (``3B_lora_single_device.yaml``). The packed mask is
taken for a causal one. From the third row on layers are compiled one by one, and the loss of each chunk; checkpoints
lie around the compiled layers, as torchtune's do. The README names ``AdamW8bit``, which is torchao's name, and says
that the last two rows have neither it nor the optimizer in the backward pass.
"""

from __future__ import annotations

import contextlib
import importlib.util
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks.harness.records import NotReproducible, Row
from benchmarks.published.source import Record, Source, predicted, records_of
from vram_guard import Timeline, TrainingStep
from vram_guard.techniques import Recipe

LAYERS, WIDTH, HEADS, KEYS, INNER, WORDS, TOKENS, RANK, CHUNKS = 28, 3072, 24, 8, 8192, 128_256, 4096, 64, 8
HEAD = WIDTH // HEADS
GIB = 2**30


class Way(NamedTuple):
    """The savings that a row has."""

    compiled: bool = False
    chunked: bool = False
    checkpointed: bool = False
    in_backward: bool = False
    offloaded: bool = False
    eight_bit: bool = False
    adapters: bool = False
    four_bit: bool = False


#: The marked part of a row's recipe -> what it has; each row has what those before it have.
WAYS = {
    "[+ Packed Dataset]": Way(),
    "[+ Compile]": Way(True),
    "[+ Chunked Cross Entropy]": Way(True, True),
    "[+ Activation Checkpointing]": Way(True, True, True),
    "[+ Fuse optimizer step into backward]": Way(True, True, True, True),
    "[+ Activation Offloading]": Way(True, True, True, True, True),
    "[+ 8-bit AdamW]": Way(True, True, True, True, True, True),
    "[LoRA]": Way(True, True, True, offloaded=True, adapters=True),
    "[QLoRA]": Way(True, True, True, offloaded=True, adapters=True, four_bit=True),
}


class Norm(nn.Module):
    """RMSNorm in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.scale


class InFourBits(nn.Module):
    """A frozen layer whose weight is in NF4."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        nf4 = importlib.import_module("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")
        self.weight = nn.Parameter(nf4.to_nf4(torch.empty(columns, rows, dtype=torch.bfloat16)), requires_grad=False)
        self.linear = nf4.linear_nf4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(x, self.weight)
        return result


class Adapted(nn.Module):
    """A frozen layer, with two small ones beside it."""

    def __init__(self, base: nn.Module, rows: int, columns: int) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(rows, RANK, bias=False), nn.Linear(RANK, columns, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.base(x) + 2.0 * self.up(self.down(x))
        return result


class Layer(nn.Module):
    """Attention over grouped queries, and a gated network."""

    def __init__(self, way: Way) -> None:
        super().__init__()

        def linear(rows: int, columns: int, *, adapted: bool = way.adapters) -> nn.Module:
            base = InFourBits(rows, columns) if way.four_bit else nn.Linear(rows, columns, bias=False)
            return Adapted(base, rows, columns) if adapted else base

        self.before, self.between = Norm(), Norm()
        self.query, self.key = linear(WIDTH, WIDTH), linear(WIDTH, KEYS * HEAD, adapted=False)
        self.value, self.output = linear(WIDTH, KEYS * HEAD), linear(WIDTH, WIDTH)
        self.gate, self.up, self.down = linear(WIDTH, INNER), linear(WIDTH, INNER), linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        normed = self.before(x)
        query = turned(self.query(normed).view(batch, length, HEADS, HEAD), turns).transpose(1, 2)
        key = turned(self.key(normed).view(batch, length, KEYS, HEAD), turns)
        value = self.value(normed).view(batch, length, KEYS, HEAD)
        repeated = (one.unsqueeze(3).expand(-1, -1, -1, HEADS // KEYS, -1) for one in (key, value))
        key, value = (one.flatten(2, 3).transpose(1, 2) for one in repeated)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = self.output(mixed.transpose(1, 2).contiguous().view(batch, length, -1)) + x
        normed = self.between(x)
        result: torch.Tensor = x + self.down(functional.silu(self.gate(normed)) * self.up(normed))
        return result


def turned(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Rotary positions in float32."""
    pairs, turns = x.float().unflatten(-1, (-1, 2)), turns[: x.shape[1]].view(1, -1, 1, HEAD // 2, 2)
    real = pairs[..., 0] * turns[..., 0] - pairs[..., 1] * turns[..., 1]
    other = pairs[..., 1] * turns[..., 0] + pairs[..., 0] * turns[..., 1]
    return torch.stack([real, other], -1).flatten(3).type_as(x)


class Llama(nn.Module):
    """Llama 3.2 3B."""

    def __init__(self, way: Way) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.register_buffer("turns", torch.zeros(TOKENS, HEAD // 2, 2), persistent=False)
        self.layers = nn.ModuleList(Layer(way) for _ in range(LAYERS))
        self.norm = Norm()
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.way = way
        if way.adapters:
            self._only_adapters()
        if way.compiled:
            for layer in self.layers:
                layer.compile()

    def _only_adapters(self) -> None:
        self.requires_grad_(requires_grad=False)
        for part in self.modules():
            if isinstance(part, Adapted):
                part.down.requires_grad_()
                part.up.requires_grad_()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor | list[torch.Tensor]:
        saved = torch.autograd.graph.save_on_cpu(pin_memory=True) if self.way.offloaded else contextlib.nullcontext()
        with saved:
            x = self.words(tokens)
            for layer in self.layers:
                x = (
                    checkpoint(layer, x, self.turns, use_reentrant=False)
                    if self.way.checkpointed
                    else layer(x, self.turns)
                )
            x = self.norm(x)
        logits: torch.Tensor | list[torch.Tensor]
        logits = [self.head(part) for part in x.chunk(CHUNKS, 1)] if self.way.chunked else self.head(x)
        return logits


def loss(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Cross-entropy in float32, of the whole or of each chunk of logits."""
    labels, logits = torch.cat([tokens[:, 1:], tokens[:, :1]], 1), model(tokens)
    if isinstance(logits, torch.Tensor):
        return _summed(logits, labels) / labels.numel()
    summed = torch.compile(_summed)
    losses = [summed(part, wanted) for part, wanted in zip(logits, labels.chunk(CHUNKS, 1), strict=True)]
    return torch.stack(losses).sum() / labels.numel()


def _summed(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.float().reshape(-1, WORDS), labels.reshape(-1), reduction="sum")


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([weight for weight in parameters if weight.requires_grad], lr=2e-5, fused=True)


def _eight_bit_adamw(parameters: Any) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = importlib.import_module("torchao.optim").AdamW8bit(parameters, lr=2e-5)
    return made


def step_of_row(marked: str) -> TrainingStep:
    """The training of the row that is marked so."""
    way = WAYS[marked]
    return TrainingStep(
        model=lambda: Llama(way),
        batch=lambda size: torch.zeros(size, TOKENS, dtype=torch.long),
        loss=loss,
        optimizer=_eight_bit_adamw if way.eight_bit else _adamw,
        precision="bf16-true",
        recipe=Recipe(optimizer_in_backward=way.in_backward),
    )


def predict(row: Record) -> list[Row]:
    """The peak of active memory of one row."""
    marked = row["recipe"][row["recipe"].find("[") :]
    way = WAYS.get(marked)
    if way is None:
        raise NotReproducible("how long its unpacked sequences are is not stated")
    if (way.eight_bit or way.four_bit) and importlib.util.find_spec("torchao") is None:
        raise NotReproducible("states or weights of torchao, which is not installed")

    def answer(timeline: Timeline) -> dict[str, Any]:
        return {"predicted": timeline.at(2).peak_allocated}

    measured = round(float(row["figure"].split()[0]) * GIB)
    published = {"source": TORCHTUNE.title, "name": marked, "measured": measured}
    return [predicted(step_of_row(marked), 2, "A100 80GB", answer, compiled=way.compiled, **published)]


def _rows() -> list[Record]:
    return [row for row in records_of("published_runs.csv") if "optimization flags" in row["source"]]


TORCHTUNE = Source("torchtune's optimization flags", _rows, lambda row: row["recipe"], predict, aside=True)

SOURCES = (TORCHTUNE,)
