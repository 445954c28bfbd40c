"""Recurrent language models, and transformers' models with random weights. Nothing is downloaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

#: Hyper-parameters of the models that xMem measured; published/data/SOURCES.md says where they come from.
PUBLISHED = Path(__file__).parents[2] / "published" / "data" / "xmem_models.json"


class RecurrentLM(nn.Module):
    """Embedding, two recurrent layers with dropout, projection to the vocabulary."""

    def __init__(self, kind: type[nn.LSTM | nn.GRU], width: int = 512, vocabulary: int = 10_000) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.rnn = kind(width, width, num_layers=2, batch_first=True, dropout=0.2)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.rnn(self.embedding(ids))[0])  # type: ignore[no-any-return]


def from_config(config: str, model: str, checkpointing: bool = False, **sizes: Any) -> nn.Module:
    """A model of transformers from the names of its configuration and model classes."""
    import transformers

    built: Any = getattr(transformers, model)(getattr(transformers, config)(**sizes))
    if checkpointing:
        built.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return built  # type: ignore[no-any-return]


def published(name: str) -> Callable[[], nn.Module]:
    """A model as xMem ran it; transformers 4.51.3, which it ran with, had no fused attention for T5."""

    def build() -> nn.Module:
        spec = json.loads(PUBLISHED.read_text(encoding="utf-8"))[name]
        extra = {"attn_implementation": "eager"} if spec["class"].startswith("T5") else {}
        return from_config(spec["config_class"], spec["class"], **spec["config"], **extra)

    return build


def gpt2(checkpointing: bool = False) -> nn.Module:
    """GPT-2 small: 124,439,808 parameters, up to 1024 positions."""
    return from_config("GPT2Config", "GPT2LMHeadModel", checkpointing, use_cache=False)


def bert(checkpointing: bool = False) -> nn.Module:
    """BERT-base that predicts masked tokens."""
    return from_config("BertConfig", "BertForMaskedLM", checkpointing)


def llama_small(checkpointing: bool = False) -> nn.Module:
    """About 100 million parameters: 10 layers of width 768, grouped queries, SwiGLU, RMSNorm."""
    sizes = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 10, "vocab_size": 32_000}
    heads = {"num_attention_heads": 12, "num_key_value_heads": 4}
    return from_config("LlamaConfig", "LlamaForCausalLM", checkpointing, use_cache=False, **sizes, **heads)


def llama_7b() -> nn.Module:
    """6,738,415,616 parameters."""
    return from_config("LlamaConfig", "LlamaForCausalLM", use_cache=False)


def vit(checkpointing: bool = False) -> nn.Module:
    """ViT-B/16 for 2 classes."""
    return from_config("ViTConfig", "ViTForImageClassification", checkpointing)
