"""What a plan costs in the memory of full recomputation, of the network that GPT-2's authors published."""

from __future__ import annotations

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from vram_guard import Budget, TrainingStep, plan

#: Samples of 1024 tokens.
BATCH = 8


def test_a_plan_costs_less_than_full_recomputation_in_the_same_memory() -> None:
    """By the model of step times, of an A100: half of the blocks recomputed in two micro-batches."""
    step = TrainingStep(
        lambda: GPT2LMHeadModel(GPT2Config(loss_type="ForCausalLM")),
        lambda size: torch.zeros(size, 1024, dtype=torch.long),
        lambda model, tokens: model(tokens, labels=tokens).loss,
        torch.optim.AdamW,
        precision="bf16-mixed",
    )
    card = Budget.of("A100 80GB", margin=0)
    recomputed = plan(step, BATCH, card, pin={"checkpoint": "all"}, allow=["checkpoint"])
    assert len(recomputed.recipe.checkpoint) == 12
    assert card.gpu is not None
    chosen = plan(step, BATCH, Budget.of(recomputed.peak, margin=0).on_card(card.gpu))
    assert chosen.fits
    assert chosen.peak <= recomputed.peak
    assert recomputed.slowdown is not None
    assert chosen.slowdown is not None
    assert chosen.slowdown < 0.95 * recomputed.slowdown
