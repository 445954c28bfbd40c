"""Published step-time ratios beside those of the cost model: a sanity check on numbers that nothing was fitted to.

Hugging Face measured one epoch of BERT-large on a Tesla V100 with 16 GB (transformers' guide "Performance and
Scalability: How To Fit a Bigger Model and Train It Faster", v4.18 to v4.27): 512 samples of 512 tokens, the Trainer's
defaults of that time (AdamW in a for-loop, gradients clipped at 1.0, attention without a fused kernel). Seconds of an
epoch contain what the Trainer does beside training, and the first steps.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

CARD = "Tesla V100 SXM2 16GB"
SAMPLES, LENGTH = 512, 512


class Row(NamedTuple):
    """One measured epoch."""

    name: str
    precision: str
    micro_batch: int
    micro_batches: int
    checkpointing: bool
    seconds: float
    """For the 512 samples."""


ROWS = (
    Row("as written: batch 4", "32-true", 4, 1, False, 57.82),
    Row("4 micro-batches of 1", "32-true", 1, 4, False, 66.03),
    Row("4 micro-batches of 1, checkpointing", "32-true", 1, 4, True, 85.47),
    Row("batch 4, fp16", "16-mixed", 4, 1, False, 27.46),
    Row("4 micro-batches of 1, checkpointing, fp16", "16-mixed", 1, 4, True, 50.76),
)


def predicted_seconds(row: Row) -> float:
    """The cost model's seconds for the same samples, without whatever the Trainer does beside training."""
    from vram_guard import TrainingStep, trace
    from vram_guard.plan.step_time import step_seconds

    step = TrainingStep(
        model=_bert_large(checkpointing=row.checkpointing),
        batch=_batch,
        loss=lambda model, batch: model(**batch).loss,
        optimizer=_adamw,
        precision=row.precision,  # type: ignore[arg-type]
        accumulate=min(row.micro_batches, 2),
        clip_grad_norm=1.0,
    )
    timeline = trace(step, compute_capability=(7, 0))
    time = step_seconds(timeline, row.micro_batch, CARD, micro_batches=row.micro_batches)
    return time.seconds * SAMPLES / (row.micro_batch * row.micro_batches)


def _bert_large(*, checkpointing: bool) -> Callable[[], Any]:
    def build() -> Any:
        from transformers import BertConfig, BertForSequenceClassification

        config = BertConfig(
            hidden_size=1024,
            num_hidden_layers=24,
            num_attention_heads=16,
            intermediate_size=4096,
            attn_implementation="eager",
        )
        model = BertForSequenceClassification(config).train()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
        return model

    return build


def _batch(size: int) -> dict[str, Any]:
    import torch

    return {
        "input_ids": torch.full((size, LENGTH), 100),
        "labels": torch.zeros(size, dtype=torch.long),
    }


def _adamw(parameters: Any) -> Any:
    import torch

    return torch.optim.AdamW(parameters, lr=5e-5, foreach=False)


def main() -> None:
    """Print every row: measured and predicted seconds, and both relative to the first row."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    print(
        f"{'BERT-large, 512 samples, ' + CARD:<46}{'measured s':>11}{'model s':>9}{'ratio':>8}{'model':>7}{'error':>7}"
    )
    before = predicted_seconds(ROWS[0])
    for row in ROWS:
        seconds = predicted_seconds(row)
        measured, ours = row.seconds / ROWS[0].seconds, seconds / before
        error = f"{ours / measured - 1:+.0%}"
        print(f"{row.name:<46}{row.seconds:>11.2f}{seconds:>9.2f}{measured:>8.2f}{ours:>7.2f}{error:>7}")


if __name__ == "__main__":
    main()
