"""Predict the rows of torchtune's README, "Optimization flags": one training, one saving after the other.

    python benchmarks/published/torchtune.py [--only WORD ...] [--json FILE]

Llama 3.2 3B on an A100, two packed sequences of 4,096 tokens, bfloat16 throughout, the peak of active memory of
``full_finetune_single_device`` and ``lora_finetune_single_device``. The model is written here after its description:
tied embeddings, RMSNorm and rotary positions in float32, keys and values repeated for grouped queries, logits in eight
chunks that are lifted to float32 in the loss; adapters of rank 64 (``3B_lora_single_device.yaml``). The packed mask is
taken for a causal one. From the third row on the published runs compiled layers and loss, which eager PyTorch does not
show. A compiled loss keeps no float32 logits of its chunks for the backward pass: here it is checkpointed, which keeps
as little.
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
from benchmarks.published.source import Record, Source, main, predicted, records_of
from vram_guard import Timeline, TrainingStep
from vram_guard.techniques import Recipe

LAYERS, WIDTH, HEADS, KEYS, INNER, WORDS, TOKENS, RANK, CHUNKS = 28, 3072, 24, 8, 8192, 128_256, 4096, 64, 8
HEAD = WIDTH // HEADS
GIB = 2**30


class Way(NamedTuple):
    """The savings that a row has."""

    chunked: bool = False
    checkpointed: bool = False
    in_backward: bool = False
    offloaded: bool = False
    eight_bit: bool = False
    adapters: bool = False


#: The marked part of a row's recipe -> what it has; each row has what those before it have.
WAYS = {
    "[+ Packed Dataset]": Way(),
    "[+ Chunked Cross Entropy]": Way(True),
    "[+ Activation Checkpointing]": Way(True, True),
    "[+ Fuse optimizer step into backward]": Way(True, True, True),
    "[+ Activation Offloading]": Way(True, True, True, True),
    "[+ 8-bit AdamW]": Way(True, True, True, True, True),
    "[LoRA]": Way(True, True, offloaded=True, adapters=True),
}


class Norm(nn.Module):
    """RMSNorm in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.scale


class Adapted(nn.Module):
    """A frozen layer, with two small ones beside it."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(columns, rows), requires_grad=False)
        self.down, self.up = nn.Linear(rows, RANK, bias=False), nn.Linear(RANK, columns, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight) + 2.0 * self.up(self.down(x))


class Layer(nn.Module):
    """Attention over grouped queries, and a gated network."""

    def __init__(self, *, adapters: bool) -> None:
        super().__init__()

        def linear(rows: int, columns: int, *, adapted: bool = adapters) -> nn.Module:
            return Adapted(rows, columns) if adapted else nn.Linear(rows, columns, bias=False)

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
        self.layers = nn.ModuleList(Layer(adapters=way.adapters) for _ in range(LAYERS))
        self.norm = Norm()
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.chunked, self.offloaded = way.chunked, way.offloaded
        if way.adapters:
            self._only_adapters()

    def _only_adapters(self) -> None:
        adapted = {id(one) for part in self.modules() if isinstance(part, Adapted) for one in part.children()}
        for part in self.modules():
            for weight in part.parameters(recurse=False):
                weight.requires_grad_(id(part) in adapted)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor | list[torch.Tensor]:
        saved = torch.autograd.graph.save_on_cpu(pin_memory=True) if self.offloaded else contextlib.nullcontext()
        with saved:
            x = self.words(tokens)
            for layer in self.layers:
                x = layer(x, self.turns)
            x = self.norm(x)
        logits: torch.Tensor | list[torch.Tensor]
        logits = [self.head(part) for part in x.chunk(CHUNKS, 1)] if self.chunked else self.head(x)
        return logits


def loss(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Cross-entropy in float32, of the whole or of each chunk of logits."""
    labels, logits = torch.cat([tokens[:, 1:], tokens[:, :1]], 1), model(tokens)
    if isinstance(logits, torch.Tensor):
        return _summed(logits, labels) / labels.numel()
    pairs = zip(logits, labels.chunk(CHUNKS, 1), strict=True)
    losses = [checkpoint(_summed, part, wanted, use_reentrant=False) for part, wanted in pairs]
    return torch.stack(losses).sum() / labels.numel()


def _summed(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.float().reshape(-1, WORDS), labels.reshape(-1), reduction="sum")


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([weight for weight in parameters if weight.requires_grad], lr=2e-5, fused=True)


def predict(row: Record) -> list[Row]:
    """The peak of active memory of one row."""
    marked = row["recipe"][row["recipe"].find("[") :]
    way = WAYS.get(marked)
    if way is None:
        raise NotReproducible(
            {
                "[+ Compile]": "compiled, which eager PyTorch does not show",
                "[QLoRA]": "weights in NF4 of a release of torchao that is no longer there",
            }.get(marked, "how long its unpacked sequences are is not stated")
        )
    if way.eight_bit and importlib.util.find_spec("bitsandbytes") is None:
        raise NotReproducible("8-bit states of bitsandbytes, which is not installed")
    recipe = Recipe(
        checkpoint=tuple(f"layers.{number}" for number in range(LAYERS)) if way.checkpointed else (),
        optimizer_in_backward=way.in_backward,
        optimizer="8bit" if way.eight_bit else "as-written",
    )
    with torch.device("meta"):
        model = Llama(way).to(torch.bfloat16)
    step = TrainingStep(
        model=model,
        batch=lambda size: torch.zeros(size, TOKENS, dtype=torch.long),
        loss=loss,
        optimizer=_adamw,
        precision="bf16-true",
        recipe=recipe,
    )

    def answer(timeline: Timeline) -> dict[str, Any]:
        return {"predicted": timeline.at(2).peak_allocated}

    measured = round(float(row["figure"].split()[0]) * GIB)
    return [predicted(step, 2, "A100 80GB", answer, source=TORCHTUNE.title, name=marked, measured=measured)]


def _rows() -> list[Record]:
    return [row for row in records_of("published_runs.csv") if "optimization flags" in row["source"]]


TORCHTUNE = Source("torchtune's optimization flags", _rows, lambda row: row["recipe"], predict)

if __name__ == "__main__":
    raise SystemExit(main(torchtune=TORCHTUNE))
