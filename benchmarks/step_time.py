"""Published step-time ratios compared with those of the cost model: a sanity check, nothing was fitted to them.

Hugging Face measured one epoch of BERT-large on a Tesla V100 with 16 GB (transformers' guide "Performance and
Scalability: How To Fit a Bigger Model and Train It Faster", v4.18 to v4.27): 512 samples of 512 tokens, the Trainer's
defaults of that time (AdamW in a for-loop, gradients clipped at 1.0, attention without a fused kernel). Seconds of an
epoch contain what the Trainer does besides training, and the first steps.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks.harness.command import arguments_of
from benchmarks.harness.networks.batches import own_loss
from benchmarks.harness.networks.language import from_config
from benchmarks.harness.workloads import step_of
from vram_guard import trace
from vram_guard.plan.step_time import step_seconds

CARD, CAPABILITY = "Tesla V100 SXM2 16GB", (7, 0)
SAMPLES, LENGTH = 512, 512


class Epoch(NamedTuple):
    """One measured epoch."""

    name: str
    precision: str
    micro_batch: int
    micro_batches: int
    checkpointing: bool
    seconds: float
    """For the 512 samples."""


EPOCHS = (
    Epoch("as written: batch 4", "32-true", 4, 1, False, 57.82),
    Epoch("4 micro-batches of 1", "32-true", 1, 4, False, 66.03),
    Epoch("4 micro-batches of 1, checkpointing", "32-true", 1, 4, True, 85.47),
    Epoch("batch 4, fp16", "16-mixed", 4, 1, False, 27.46),
    Epoch("4 micro-batches of 1, checkpointing, fp16", "16-mixed", 1, 4, True, 50.76),
)


def predicted_seconds(epoch: Epoch) -> float:
    """The cost model's seconds for the same samples, without whatever the Trainer does besides training."""
    settings: dict[str, Any] = {"precision": epoch.precision, "accumulate": min(epoch.micro_batches, 2)}
    step = step_of(lambda: _bert_large(epoch.checkpointing), _batch, own_loss, lr=5e-5, foreach=False)
    timeline = trace(step.with_(clip_grad_norm=1.0, **settings), compute_capability=CAPABILITY)
    time = step_seconds(timeline, epoch.micro_batch, CARD, micro_batches=epoch.micro_batches)
    return time.seconds * SAMPLES / (epoch.micro_batch * epoch.micro_batches)


def _bert_large(checkpointing: bool) -> nn.Module:
    sizes = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    model: Any = from_config("BertConfig", "BertForSequenceClassification", attn_implementation="eager", **sizes)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    return model.train()  # type: ignore[no-any-return]


def _batch(size: int) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.full((size, LENGTH), 100), "labels": torch.zeros(size, dtype=torch.long)}


def main() -> None:
    """Print every epoch: measured and predicted seconds, and both relative to the first one."""
    arguments_of("step_time.py", __doc__).parse_args()
    title = f"BERT-large, 512 samples, {CARD}"
    print(f"{title:<46}{'measured s':>11}{'model s':>9}{'ratio':>8}{'model':>7}{'error':>7}")
    predicted = [predicted_seconds(epoch) for epoch in EPOCHS]
    before = predicted[0]
    for epoch, seconds in zip(EPOCHS, predicted, strict=True):
        measured, ours = epoch.seconds / EPOCHS[0].seconds, seconds / before
        error = f"{ours / measured - 1:+.0%}"
        print(f"{epoch.name:<46}{epoch.seconds:>11.2f}{seconds:>9.2f}{measured:>8.2f}{ours:>7.2f}{error:>7}")
    pairs = list(combinations(zip(EPOCHS, predicted, strict=True), 2))
    wrong = [(one, other) for (one, ours), (other, theirs) in pairs if not ranked_right(one, other, ours, theirs)]
    print(f"pairs ranked right: {len(pairs) - len(wrong)} of {len(pairs)}")
    for one, other in wrong:
        print(f"  wrong: {one.name} and {other.name}")


def ranked_right(one: Epoch, other: Epoch, ours: float, theirs: float) -> bool:
    """True if the model puts two epochs in the order in which they were measured."""
    return (one.seconds < other.seconds) == (ours < theirs)


if __name__ == "__main__":
    main()
