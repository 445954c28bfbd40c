"""Predict LoRA and QLoRA trainings that were measured on a Tesla T4: allocated and reserved peaks.

The recipe, as far as the source states it: the base's weights in half precision, or in NF4 by bitsandbytes; adapters in
float32; AdamW; non-reentrant checkpointing; labels equal to inputs; no dropout. A step is a function: its outputs live
until it returns. "sdpa" ran torch's memory-efficient attention with repeated key and value heads.

QLoRA's weights come to the GPU while transformers loads the model: a block of the size of all weights is taken and let
go, then each weight arrives in half precision and is quantised there. That is **not** followed here: NF4's weights
arrive as such.

These rows were used to choose how the T4's segments lie (:attr:`vram_guard.GPU.placement`), and for nothing else. The
rule itself was read out of other cards' addresses (benchmarks/gpu/results/NOTES.md).
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn

from benchmarks.harness.pages import MIB
from benchmarks.harness.records import NotReproducible, Row
from benchmarks.harness.workloads import optimizer_of
from benchmarks.published.peft_methods import need
from benchmarks.published.source import Record, Source, records_of
from vram_guard import TrainingStep
from vram_guard.budget.catalogue import find_gpu
from vram_guard.simulate import trace_at
from vram_guard.timeline import Estimate

FILE = "lora_t4.csv"
CARD = "T4"

#: How a model's name begins -> its configuration's class in transformers.
KINDS = {"Qwen/": "Qwen2Config", "mistralai/": "MistralConfig", "": "LlamaConfig"}
SIZES = {
    "hidden_size": "hidden_size",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "intermediate_size": "intermediate_size",
    "vocab_size": "vocab_size",
}
RECIPE = ("model", "attention", "batch", "tokens", "quantization", "lora_rank", "lora_targets")


def _base(row: Record) -> nn.Module:
    """The model with random weights. Some rows leave its sizes out: those of its other rows are taken."""
    import transformers

    sizes = next(each for each in records_of(FILE) if each["model"] == row["model"] and each["hidden_size"])
    kind = next(kind for start, kind in KINDS.items() if row["model"].startswith(start))
    config = getattr(transformers, kind)(
        **{name: int(sizes[column]) for name, column in SIZES.items()},
        tie_word_embeddings=sizes["tied"] == "True",
        max_position_embeddings=8192,
        use_cache=False,
        pad_token_id=0,
    )
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float16, attn_implementation=row["attention"]
    )
    return model


def _quantised(model: Any) -> Any:
    import bitsandbytes as bnb
    import peft
    import transformers
    from transformers.integrations import replace_with_bnb_linear

    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float16
    )
    model = replace_with_bnb_linear(model, modules_to_not_convert=["lm_head"], quantization_config=config)
    for layer in model.modules():
        if isinstance(layer, bnb.nn.Linear4bit):
            weight = torch.empty(layer.out_features, layer.in_features, dtype=torch.float16)
            layer.weight = bnb.nn.Params4bit(weight, quant_type="nf4", compress_statistics=False, module=layer)
    model.is_loaded_in_4bit = True
    return peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False, auto_clear_cache=False)


def _tuned(row: Record) -> nn.Module:
    import peft

    model: Any = _base(row) if row["quantization"] == "none" else _quantised(_base(row))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    config = peft.LoraConfig(
        r=int(row["lora_rank"]), target_modules=row["lora_targets"].split(), lora_dropout=0.0, task_type="CAUSAL_LM"
    )
    tuned: nn.Module = peft.get_peft_model(model, config)
    return tuned.train()


@contextlib.contextmanager
def _attention(row: Record) -> Iterator[None]:
    """Repeated key and value heads, over which torch takes the memory-efficient backend on this card."""
    if row["attention"] != "sdpa":
        yield
        return
    from transformers.integrations import sdpa_attention

    def never(*_tensors: object) -> bool:  # a Mock would keep the tensors which it is called with
        return False

    with mock.patch.object(sdpa_attention, "use_gqa_in_sdpa", never):
        yield


def _step(row: Record) -> TrainingStep:
    outputs: list[Any] = []

    def loss(model: Any, ids: torch.Tensor) -> torch.Tensor:
        outputs.clear()
        outputs.append(model(input_ids=ids, labels=ids))
        found: torch.Tensor = outputs[0].loss
        return found

    return TrainingStep(
        model=lambda: _tuned(row),
        batch=lambda size: torch.zeros(size, int(row["tokens"]), dtype=torch.long),
        loss=loss,
        optimizer=optimizer_of("AdamW", lr=1e-4),
    )


@functools.cache
def _estimate(recipe: tuple[str, ...]) -> tuple[Estimate, float]:
    row = dict(zip(RECIPE, recipe, strict=True))
    gpu = find_gpu(CARD)
    start = time.perf_counter()
    with _attention(row):  # the backward pass too: it computes the blocks again
        timeline = trace_at(
            _step(row),
            int(row["batch"]),
            compute_capability=gpu.compute_capability,
            multiprocessors=gpu.multiprocessors,
            placement=gpu.placement,
        )
    return timeline.at(int(row["batch"])), time.perf_counter() - start


def _source(title: str, *, quantised: bool, reserved: bool) -> Source:
    def predict(row: Record) -> list[Row]:
        need("transformers", "peft", *(["bitsandbytes"] if quantised else []))
        found, seconds = _estimate(tuple(row[name] for name in RECIPE))
        if found.tier == "formula":
            raise NotReproducible(f"only a lower bound: {found.notes[-1].message.splitlines()[0][:200]}")
        measured = float(row["peak_reserved_mib" if reserved else "peak_allocated_mib"])
        return [
            Row(
                source=title,
                name=_name(row),
                measured=round(measured * MIB),
                predicted=found.peak_reserved if reserved else found.peak_allocated,
                tier=found.tier,
                network=found.network,
                seconds=seconds,
            )
        ]

    rows = [row for row in records_of(FILE) if (row["quantization"] != "none") == quantised]
    return Source(title, lambda: rows, _name, predict)


def _name(row: Record) -> str:
    return f"{row['model'].partition('/')[2]} {row['attention']}, {row['batch']} x {row['tokens']}"


LORA = _source("LoRA on a T4, reserved", quantised=False, reserved=True)
LORA_ALLOCATED = _source("LoRA on a T4, allocated", quantised=False, reserved=False)
QLORA = _source("QLoRA on a T4, reserved", quantised=True, reserved=True)
QLORA_ALLOCATED = _source("QLoRA on a T4, allocated", quantised=True, reserved=False)

SOURCES = (LORA, LORA_ALLOCATED, QLORA, QLORA_ALLOCATED)
