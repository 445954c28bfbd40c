"""The training of ``benchmarks/fsdp2`` in Accelerate's repository: Qwen2.5-1.5B over 8 GPUs with FSDP2."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from vram_guard import Parallel, TrainingStep

#: The model's published configuration (config.json of Qwen/Qwen2.5-1.5B-Instruct).
SIZES: dict[str, Any] = {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151_936,
    "max_position_embeddings": 32_768,
    "rope_theta": 1_000_000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
LENGTH = 128


def qwen() -> TrainingStep:
    """The first of its four runs: torch's own FSDP2, with the optimizer made before and mended after."""
    return TrainingStep(
        model=_built,
        batch=lambda samples: {
            "input_ids": torch.zeros(samples, LENGTH, dtype=torch.long),
            "attention_mask": torch.ones(samples, LENGTH, dtype=torch.long),
            "labels": torch.zeros(samples, LENGTH, dtype=torch.long),
        },
        loss=_loss,
        optimizer=lambda weights: torch.optim.AdamW(list(weights), lr=3e-5),
        zero_grad="before_forward",
        keeps="outputs",
        parallel=Parallel(gpus=8, apply=_sharded, init="cpu"),
    )


def _built() -> nn.Module:
    import transformers

    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES))


def _loss(model: Any, batch: dict[str, torch.Tensor]) -> Any:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        outputs = model(**batch, use_cache=False)
    outputs["logits"] = outputs["logits"].float()
    return outputs


def _sharded(model: nn.Module, mesh: Any) -> nn.Module:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    half = torch.bfloat16
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=half, output_dtype=half)
    for module in model.model.layers:  # type: ignore[union-attr]
        fully_shard(module, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model
