"""Predict the fine-tuning runs of peft's method comparison: one model, many adapters, reserved bytes on an L40S.

The recipe, as the comparison's own scripts give it: bfloat16 weights without autocast, adapters in float32 (not those
of OSF), AdamW, gradient norms clipped at 1, gradients freed before the forward pass.

Llama-3.2-3B: 4 sequences of a question and its answer, padded to the batch's longest; the loss from the model, whose
outputs live until the next ones. How long the longest batches are is not published: the length is inferred from one row
(LN_TUNING: the longest sequence whose prediction is not above the measurement), which therefore is not judged; all
others are predicted with that length.

FLUX.2-klein-base-4B: images of 512 x 512 (1,024 latent tokens of 128 channels) and prompts of 512 tokens, 2 at a time,
from caches on the GPU (the prompts' and images' embeddings of the 14 training samples); a DINOv2-base encoder, for
evaluation, lies on the GPU as well. Activations are recomputed: no published setting says so, but without it the peaks
would be twice those measured.

Measured is what the allocator held at the end of a step, less what it held at the start, as the 99th percentile of all
steps: the cache was emptied every 10 (25) steps, so this is the reserved peak of the longest batches.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
from typing import Any

import torch
from torch import nn

from benchmarks.harness.networks.batches import whole_sequences
from benchmarks.harness.records import NotReproducible, Row
from benchmarks.harness.workloads import optimizer_of
from benchmarks.published.source import DATA, Record, Source, predicted, records_of
from vram_guard import Timeline, TrainingStep
from vram_guard.budget.catalogue import find_gpu
from vram_guard.simulate import trace_at

CARD = "L40S"

#: What cannot be rebuilt without data.
LEFT_OUT = {
    "shira--flux2-klein-default": "the positions of its trainable weights are drawn, and counted, while it is built"
}

LOADED_EARLY = {
    "transformers": ("LlamaForCausalLM", "Qwen2ForCausalLM", "MistralForCausalLM", "Dinov2Model"),
    "peft": ("get_peft_model",),
    "diffusers": ("Flux2Transformer2DModel",),
}

REFERENCE = "ln_tuning--llama-3.2-3B-default"

#: Tokens, between which the reference row's length lies: the comparison cuts at 768.
SHORTEST, LONGEST = 256, 768

#: Samples that remain for training of the comparison's 20 images (2 to validate, 4 to test).
TRAINING_IMAGES = 14
PROMPT_TOKENS, PROMPT_WIDTH = 512, 7680
LATENT_CHANNELS, LATENT_SIDE = 128, 32


def rows(bench: str) -> list[Record]:
    """One benchmark's rows, in the file's order; the reference first."""
    found = [row for row in records_of("peft_methods.csv") if row["bench"] == bench]
    return sorted(found, key=lambda row: row["file"] != REFERENCE)


def _adapted(model: nn.Module, file: str) -> nn.Module:
    import peft

    if file in LEFT_OUT:
        raise NotReproducible(LEFT_OUT[file])
    method = json.loads((DATA / "peft_methods.json").read_text(encoding="utf-8"))[file]
    if not hasattr(peft, method["config"]):
        raise NotReproducible(f"peft {peft.__version__} has no {method['config']}")
    config = getattr(peft, method["config"])(**method["arguments"])
    adapted: nn.Module = peft.get_peft_model(
        model, config, autocast_adapter_dtype=method["config"] != "OSFConfig", low_cpu_mem_usage=False
    )
    return adapted.train()


def need(*names: str) -> None:
    """Say what is missing, and load what must not load itself in a trace."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise NotReproducible(f"{' and '.join(missing)} not installed")
    # Some load themselves at first use: that must not happen while a trace simulates a GPU.
    for name in names:
        module = importlib.import_module(name)
        _ = [getattr(module, each) for each in LOADED_EARLY.get(name, ())]


# --- Llama ----------------------------------------------------------------------------------------------------


def llama() -> nn.Module:
    """Llama-3.2-3B with random weights, from its public configuration."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=3072,
        intermediate_size=8192,
        num_hidden_layers=28,
        num_attention_heads=24,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_parameters={
            "rope_theta": 500000.0,
            "rope_type": "llama3",
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
        },
    )
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model


def _llama_step(file: str, length: int) -> TrainingStep:
    def outputs(model: Any, inputs: Any) -> Any:
        return model(**inputs, num_items_in_batch=inputs["input_ids"].numel())

    step = _step(lambda: _adapted(llama(), file), whole_sequences(length), outputs, weight_decay=0.1)
    return step.with_(keeps="outputs")


def _step(build: Any, batch: Any, loss: Any, weight_decay: float) -> TrainingStep:
    return TrainingStep(
        model=build,
        batch=batch,
        loss=loss,
        optimizer=optimizer_of("AdamW", lr=1e-4, weight_decay=weight_decay),
        zero_grad="before_forward",
        clip_grad_norm=1.0,
    )


@functools.cache
def length() -> int:
    """Tokens of the longest batches, from the one row that is given up for it."""
    measured = next(int(row["mem_res_99"]) for row in rows("MetaMathQA") if row["file"] == REFERENCE)
    low, high = SHORTEST, LONGEST
    while low < high:
        middle = (low + high + 1) // 2
        peak = (
            trace_at(_llama_step(REFERENCE, middle), 4, compute_capability=find_gpu(CARD).compute_capability)
            .at(4)
            .peak_reserved
        )
        low, high = (middle, high) if peak <= measured else (low, middle - 1)
    return low


def predict_llama(row: Record) -> list[Row]:
    """The reserved peak of one method."""
    need("transformers", "peft")
    return [_predicted(LLAMA, row, _llama_step(row["file"], length()))]


# --- FLUX -----------------------------------------------------------------------------------------------------


class Painter(nn.Module):
    """The transformer with its adapter, and what else lies on the GPU while it trains."""

    def __init__(self, file: str) -> None:
        import diffusers
        import transformers

        super().__init__()
        # The public configuration's numbers; the parameters are as many as the comparison counted (3,875,544,576).
        transformer = diffusers.Flux2Transformer2DModel(
            num_layers=5,
            num_single_layers=20,
            num_attention_heads=24,
            joint_attention_dim=PROMPT_WIDTH,
            guidance_embeds=False,
        )
        transformer.enable_gradient_checkpointing()
        self.transformer = _adapted(transformer.to(torch.bfloat16), file)
        encoder = transformers.Dinov2Model(transformers.Dinov2Config(image_size=518, patch_size=14))
        self.encoder = encoder.requires_grad_(requires_grad=False)
        prompts = torch.empty(TRAINING_IMAGES, PROMPT_TOKENS, PROMPT_WIDTH, dtype=torch.bfloat16)
        latents = torch.empty(TRAINING_IMAGES, LATENT_CHANNELS, LATENT_SIDE, LATENT_SIDE, dtype=torch.bfloat16)
        self.register_buffer("prompts", prompts)
        self.register_buffer("latents", latents)

    def forward(self, latents: torch.Tensor, prompts: torch.Tensor, ids: tuple[torch.Tensor, ...]) -> torch.Tensor:
        noise = torch.randn_like(latents)
        prompt_ids, image_ids, times, sigmas = ids
        noisy = (1.0 - sigmas) * latents + sigmas * noise
        packed = noisy.flatten(2).transpose(1, 2)
        predicted = self.transformer(
            hidden_states=packed,
            timestep=times / 1000,
            guidance=None,
            encoder_hidden_states=prompts,
            txt_ids=prompt_ids,
            img_ids=image_ids,
            return_dict=False,
        )[0]
        predicted = predicted[:, : packed.size(1)].transpose(1, 2).reshape(latents.shape)
        target = noise - latents
        squared = torch.ones_like(sigmas).float() * (predicted.float() - target.float()) ** 2
        return squared.reshape(target.shape[0], -1).mean(1).mean()


def _flux_batch(size: int) -> tuple[Any, ...]:
    tokens = LATENT_SIDE**2
    latents = torch.empty(size, LATENT_CHANNELS, LATENT_SIDE, LATENT_SIDE, dtype=torch.bfloat16, device="meta")
    prompts = torch.empty(size, PROMPT_TOKENS, PROMPT_WIDTH, dtype=torch.bfloat16, device="meta")
    prompt_ids = torch.zeros(size, PROMPT_TOKENS, 4, dtype=torch.long)
    image_ids = torch.zeros(size, tokens, 4, dtype=torch.long)
    sigmas = torch.empty(size, 1, 1, 1, dtype=torch.bfloat16, device="meta")
    return latents, prompts, (prompt_ids, image_ids, torch.zeros(size), sigmas)


def predict_flux(row: Record) -> list[Row]:
    """The reserved peak of one method."""
    need("transformers", "peft", "diffusers")
    step = _step(lambda: Painter(row["file"]), _flux_batch, lambda model, batch: model(*batch), weight_decay=1e-4)
    return [_predicted(FLUX, row, step)]


def _predicted(source: Source, row: Record, step: TrainingStep) -> Row:
    size = int(row["batch"])

    def answer(timeline: Timeline) -> dict[str, Any]:
        if timeline.tier == "formula":
            raise NotReproducible(f"only a lower bound: {timeline.notes[-1].message.splitlines()[0][:200]}")
        return {"predicted": timeline.at(size).peak_reserved}

    return predicted(
        step,
        size,
        CARD,
        answer,
        source=source.title,
        name=row["file"],
        measured=int(row["mem_res_99"]),
        judged=row["file"] != REFERENCE,
    )


LLAMA = Source("peft's methods, Llama-3.2-3B", lambda: rows("MetaMathQA"), lambda row: str(row["file"]), predict_llama)
FLUX = Source("peft's methods, FLUX.2-klein-4B", lambda: rows("image-gen"), lambda row: str(row["file"]), predict_flux)

SOURCES = (LLAMA, FLUX)
