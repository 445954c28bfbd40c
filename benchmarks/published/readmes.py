"""Predict what READMEs and logs of training libraries state of their own runs.

ViT-L/16 (rasbt/pytorch-memory-optim, logs.md and its scripts): the reserved peak of fine-tuning on an A100 (the card is
not named; the number of its multiprocessors fits), torch 2.1.0.dev20230623. Images of 224 x 224, 10 classes, gradients
freed before the backward pass (after the step where they are accumulated); under Fabric the last batch lives until the
next one is loaded. The runs' Adam and attention are theirs: :class:`EarlierAdam`, :class:`EarlierFlash`.

litgpt (Lightning-AI/litgpt, config_hub/finetune): the allocated peak of fine-tuning on an A10G, in bfloat16, with
litgpt's own model, which has to be installed (``--libraries``: a folder ``litgpt``); its release and torch's at the
time are not stated. Sequences are cut at 512 tokens, and the longest batch is taken to be full of them. The names of
the loop keep logits and loss into the next forward.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional

from benchmarks.harness.networks.batches import shapes_of_images
from benchmarks.harness.networks.vision_transformer import VisionTransformer
from benchmarks.harness.records import NotReproducible, Row
from benchmarks.harness.workloads import optimizer_of
from benchmarks.published.source import Record, Source, predicted, records_of
from vram_guard import Budget, Timeline, TrainingStep

GIGABYTE = 10**9


def measured(row: Record) -> int | None:
    """Bytes; None where the run ran out of memory."""
    return None if row["figure"].startswith("O") else round(float(row["figure"].split()[0]) * GIGABYTE)


# --- ViT-L/16 -------------------------------------------------------------------------------------------------


class EarlierAdam(torch.optim.Adam):
    """Adam of torch 2.1, over all parameters at once: the denominators are a second temporary list beside the roots.

    ``_multi_tensor_adam`` in torch/optim/adam.py: ``denom = torch._foreach_add(exp_avg_sq_sqrt, eps)`` until 2.1, in
    place later.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        del closure
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            for parameter in parameters:
                if not self.state[parameter]:
                    names = ("exp_avg", "exp_avg_sq")
                    self.state[parameter] = {"step": torch.tensor(0.0)}
                    self.state[parameter] |= {name: torch.zeros_like(parameter) for name in names}
            states = [self.state[parameter] for parameter in parameters]
            for parameter, state in zip(parameters, states, strict=True):
                state["exp_avg"].lerp_(parameter.grad, 0.1)
                state["exp_avg_sq"].mul_(0.999).addcmul_(parameter.grad, parameter.grad, value=0.001)
            roots = [state["exp_avg_sq"].sqrt() for state in states]
            denominators = [root + group["eps"] for root in roots]
            for parameter, state, denominator in zip(parameters, states, denominators, strict=True):
                parameter.addcdiv_(state["exp_avg"], denominator, value=-group["lr"])


class EarlierFlash(torch.autograd.Function):
    """FlashAttention of torch 2.1, its first version: over the rows of all samples, which are copied where needed.

    ``_scaled_dot_product_flash_attention_cuda`` and its backward in ATen/native/transformers/cuda, ``mha_fwd`` and
    ``mha_bwd`` in flash_attn/fmha_api.cpp: lengths rounded up to 16; up to 256 keys no other temporaries.
    """

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Query, key and value are (batch, heads, length, head)."""
        batch, heads, length, head = query.shape
        ends = [torch.arange(batch + 1, dtype=torch.int32, device=query.device) for _ in range(2)]
        rows = [each.transpose(1, 2).reshape(-1, heads, head) for each in (query, key, value)]
        attended = torch.empty_like(rows[0])
        sums = torch.empty(batch, heads, -(-length // 16) * 16, device=query.device)
        result = attended.view(batch, length, heads, head).transpose(1, 2)
        ctx.save_for_backward(query, key, value, result, sums, *ends)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        """The gradients of the three."""
        query, key, value, result, sums, *_ends = ctx.saved_tensors
        batch, heads, length, head = query.shape
        given = (query, key, value, gradient, result)
        rows = [each.transpose(1, 2).reshape(-1, heads, head) for each in given]
        made = [torch.empty_like(each) for each in rows[:3]]
        torch.empty_like(sums)
        return tuple(each.view(batch, length, heads, head).transpose(1, 2) for each in made)


_ATTENTION = functional.scaled_dot_product_attention


def _earlier_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_others: Any) -> torch.Tensor:
    """FlashAttention for halves, as ``sdp_utils.cpp`` chooses."""
    if query.dtype == torch.float32:
        return _ATTENTION(query, key, value)
    return EarlierFlash.apply(query, key, value)  # type: ignore[no-any-return, no-untyped-call]


def _with_earlier_attention(model: Any, images: torch.Tensor) -> Any:
    with mock.patch.object(functional, "scaled_dot_product_attention", _earlier_attention):
        return model(images)


#: The beginning of a row's recipe -> precision, batch, micro-batches, optimizer, whether Fabric runs it.
VITS: dict[str, tuple[Any, int, int, Callable[[Any], torch.optim.Optimizer], bool]] = {
    "01_": ("32-true", 64, 1, EarlierAdam, False),
    "01-2_": ("32-true", 64, 1, EarlierAdam, True),
    "02_": ("16-mixed", 64, 1, EarlierAdam, True),
    "03_": ("bf16-true", 64, 1, EarlierAdam, True),
    "04_": ("bf16-true", 16, 1, EarlierAdam, True),
    "05_": ("bf16-true", 4, 4, EarlierAdam, True),
    "06_": ("bf16-true", 4, 4, optimizer_of("SGD", lr=0.01), True),
}


def _classified(model: Any, batch: Any) -> tuple[Any, Any]:
    images, labels = batch
    logits = _with_earlier_attention(model, images)
    return functional.cross_entropy(logits, labels), logits


def _classified_by_fabric(model: Any, batch: Any) -> tuple[Any, Any]:
    """Fabric converts the images of a loaded batch to the weights' dtype, and gives logits back in float32."""
    images, labels = batch
    logits = _with_earlier_attention(model, images.to(next(model.parameters()).dtype)).float()
    return functional.cross_entropy(logits, labels), (logits, batch)


def predict_vit(row: Record) -> list[Row]:
    """The reserved peak of one script."""
    precision, size, slices, optimizer, fabric = VITS[row["recipe"].split("_")[0] + "_"]
    halved = precision == "bf16-true"  # by Fabric itself, which leaves the batch as it is loaded
    step = TrainingStep(
        model=lambda: VisionTransformer(classes=10).to(torch.bfloat16 if halved else torch.float32),
        batch=shapes_of_images(224),
        loss=_classified_by_fabric if fabric else _classified,
        keeps="outputs",
        optimizer=optimizer,
        precision="32-true" if halved else precision,
        accumulate=slices,
        zero_grad="before_backward" if slices == 1 else "after_step",
    )

    def answer(timeline: Timeline) -> dict[str, Any]:
        return {"predicted": timeline.at(size).peak_reserved}

    return [predicted(step, size, "A100 40GB", answer, source=VIT.title, name=row["recipe"], measured=measured(row))]


# --- litgpt ---------------------------------------------------------------------------------------------------

#: The folder of a configuration -> litgpt's name of the model, the rank of the adapters, and whether all linear layers
#: have one (otherwise queries and values).
MODELS: dict[str, tuple[str, int, bool]] = {
    "falcon-7b": ("falcon-7b", 32, False),
    "gemma-2b": ("Gemma-2b", 8, True),
    "gemma-7b": ("Gemma-7b", 16, True),
    "gemma2-2b": ("Gemma-2-2b", 8, True),
    "gemma2-9b": ("Gemma-2-9b", 16, True),
    "llama-2-7b": ("Llama-2-7b-hf", 32, False),
    "llama-3-8b": ("Llama-3-8B", 32, False),
    "llama-3.1-8b": ("Llama-3.1-8B", 32, False),
    "llama-3.2-1b": ("Llama-3.2-1B", 32, False),
    "llama-3.2-3b": ("Llama-3.2-3B", 32, False),
    "mistral-7b": ("Mistral-7B-v0.1", 32, False),
    "mistral-7b-v0.2": ("Mistral-7B-v0.2", 32, False),
    "phi-2": ("phi-2", 8, True),
    "phi-3": ("Phi-3-mini-4k-instruct", 8, True),
    "stablelm-base-alpha-3b": ("stablelm-base-alpha-3b", 32, False),
    "tiny-llama": ("tiny-llama-1.1b", 32, True),
}
TOKENS = 512

#: Configurations that came into the table after the norm had changed (916a84ca, 2024-07-23).
WITH_TODAYS_NORM = ("gemma2-2b", "gemma2-9b", "llama-3.1-8b", "llama-3.2-1b", "llama-3.2-3b")


class EarlierNorm(nn.Module):
    """RMSNorm of litgpt until July 2024: what it scales, and so keeps where the scale is trained, is in half precision.

    ``RMSNorm`` in litgpt/model.py at 43c44323, 2024-04-24; today it scales in float32.
    """

    def __init__(self, size: int, dim: int = -1, eps: float = 1e-6, add_unit_offset: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.dim, self.eps, self.offset = dim, eps, int(add_unit_offset)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rows of length one, scaled."""
        exact = x.float()
        squares = torch.mean(exact * exact, dim=self.dim, keepdim=True)
        normed = (exact * torch.rsqrt(squares + self.eps)).to(x.dtype)
        return normed * (self.offset + self.weight) if self.offset else normed * self.weight


def _litgpt(folder: str, kind: str) -> nn.Module:
    import litgpt.model

    name, rank, everywhere = MODELS[folder]
    norm = litgpt.model.RMSNorm if folder in WITH_TODAYS_NORM else EarlierNorm
    with mock.patch.object(litgpt.model, "RMSNorm", norm):
        return _built(name, rank, everywhere, kind)


def _built(name: str, rank: int, everywhere: bool, kind: str) -> nn.Module:
    import litgpt.lora
    import litgpt.model

    if kind == "full":
        model: nn.Module = litgpt.model.GPT(litgpt.model.Config.from_name(name))
    else:
        names = ("query", "key", "value", "projection", "mlp", "head")
        chosen = {f"lora_{each}": everywhere or each in ("query", "value") for each in names}
        settings = {"lora_r": rank, "lora_alpha": 16, "lora_dropout": 0.05, **chosen}
        # The model with adapters did not cap the chunks of its logits then (litgpt/lora.py at 2b195c7f, 2024-08-02).
        settings["final_logit_softcapping"] = None
        model = litgpt.lora.GPT(litgpt.lora.Config.from_name(name, **settings))
        litgpt.lora.mark_only_lora_as_trainable(model)
    model.max_seq_length = TOKENS
    return model


# Fabric's bf16-true gives the loop a model's outputs in float32 (HalfPrecision.convert_output).


def _chunks_of_next_tokens(model: Any, ids: torch.Tensor) -> tuple[Any, Any]:
    """The loop of litgpt/finetune/lora.py at e5493986, 2024-07-22."""
    from litgpt.utils import chunked_cross_entropy

    logits = [chunk.float() for chunk in model(ids, lm_head_chunk_size=128)]
    logits[-1] = logits[-1][..., :-1, :]
    return chunked_cross_entropy(logits, ids[..., 1:]), logits


def _next_tokens(model: Any, ids: torch.Tensor) -> tuple[Any, Any]:
    """The loop of litgpt/finetune/full.py at e5493986, 2024-07-22."""
    from litgpt.utils import chunked_cross_entropy

    logits = model(ids).float()
    return chunked_cross_entropy(logits[..., :-1, :], ids[..., 1:]), logits


def predict_litgpt(row: Record) -> list[Row]:
    """The allocated peak of one configuration, or whether it runs."""
    path, *_rest, micro = row["recipe"].split("; ")
    folder, kind = path.removesuffix(".yaml").split("/")[-2:]
    if kind == "qlora":
        raise NotReproducible("its weights are in 4 bits, by bitsandbytes' own CUDA code")
    if importlib.util.find_spec("litgpt") is None:
        raise NotReproducible("litgpt is not installed")
    size, peak = int(micro.split()[-1]), measured(row)
    model: Any = None

    def build() -> nn.Module:
        nonlocal model
        model = _litgpt(folder, kind)
        return model

    step = TrainingStep(
        model=build,
        batch=lambda samples: torch.zeros(samples, TOKENS, dtype=torch.long),
        loss=_next_tokens if kind == "full" else _chunks_of_next_tokens,
        keeps="outputs",
        optimizer=optimizer_of("AdamW", lr=2e-4),
        precision="bf16-true",
        accumulate=2,
        zero_grad="after_step",
    )

    def answer(timeline: Timeline) -> dict[str, Any]:
        # Weights, gradients and two states.
        least = sum((4 if p.requires_grad else 1) * p.numel() * 2 for p in model.parameters())
        if peak is not None and least > peak:
            raise NotReproducible("weights, gradients and AdamW's states alone are more than was measured: another run")
        found = timeline.at(size, capacity=Budget.of("A10G", margin=0).available)
        fits = found.out_of_memory is None
        return {"predicted": (found if fits else timeline.at(size)).peak_allocated, "fits": fits}

    name = f"{folder} {kind}, {size} at a time"
    return [predicted(step, size, "A10G", answer, source=LITGPT.title, name=name, measured=peak, ran=peak is not None)]


# --- the sources --------------------------------------------------------------------------------------------------


def _is_vit(row: Record) -> bool:
    return row["source"].startswith("rasbt") and row["model"].startswith("torchvision")


def _is_litgpt(row: Record) -> bool:
    return "config_hub" in row["source"]


def _name(row: Record) -> str:
    parts = (
        row["model"],
        row.get("recipe") or row.get("parallel", ""),
        row.get("figure") or row.get("measured_gib", ""),
    )
    return " ".join(parts)


def _single(chosen: Callable[[Record], bool]) -> list[Record]:
    return [row for row in records_of("published_runs.csv") if chosen(row)]


VIT = Source("rasbt's ViT-L/16", lambda: _single(_is_vit), _name, predict_vit)
LITGPT = Source("litgpt's configurations", lambda: _single(_is_litgpt), _name, predict_litgpt, "litgpt")

SOURCES = (VIT, LITGPT)
