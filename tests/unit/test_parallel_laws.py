"""The law of every layout: what two and three samples take says what seven take, event by event, for other loops too.

Beside the laws in the tests of each kind: settings that change what is held and sent, checkpointed blocks, and
micro-batches cut from one loaded batch.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parallel_cases import Net, Transformer, loss, step
from torch import nn

from vram_guard import Parallel, trace
from vram_guard.simulate import holds_at
from vram_guard.simulate.tracing.run import run_step
from vram_guard.techniques import Recipe

pytestmark = pytest.mark.torch_since(2, 6)

CHECKPOINTED = {"recipe": Recipe(checkpoint=("blocks.0", "blocks.2"))}
SPLIT = {"accumulate": 2, "whole_batch": True, "keeps": "nothing"}
LAYERS = Recipe(checkpoint=("layers.0",))

CASES: dict[str, tuple[Parallel, dict[str, Any]]] = {
    "ddp, checkpointed": (Parallel(2, kind="ddp"), CHECKPOINTED),
    "ddp, split, views of small buckets": (
        Parallel(4, kind="ddp"),
        {**SPLIT, "ddp_options": {"bucket_cap_mb": 0.02, "gradient_as_bucket_view": True}},
    ),
    "ddp, over nodes": (Parallel(16, kind="ddp"), {"clip_grad_norm": None, "clip_grad_value": 1.0}),
    "zero1, split": (Parallel(2, kind="zero1"), SPLIT),
    "fsdp1, checkpointed": (Parallel(4, kind="fsdp1"), CHECKPOINTED),
    "fsdp2, checkpointed": (Parallel(2, kind="fsdp2"), CHECKPOINTED),
    "fsdp2, offloaded, checkpointed": (Parallel(2, kind="fsdp2", offload=True), CHECKPOINTED),
    "hsdp, checkpointed": (Parallel(4, node=2, kind="hsdp"), CHECKPOINTED),
    "tensor alone, checkpointed": (
        Parallel(4, kind="ddp", tensor=4),
        {"model": Transformer, "recipe": LAYERS},
    ),
    "tensor and fsdp2, split": (Parallel(4, kind="fsdp2", tensor=2), {"model": Transformer, **SPLIT}),
}


@pytest.mark.parametrize(("layout", "settings"), CASES.values(), ids=CASES)
def test_batches_of_two_and_three_say_what_seven_takes_event_by_event(
    layout: Parallel, settings: dict[str, Any]
) -> None:
    given = step(layout, **settings)
    timeline = trace(given, check_at=7)
    assert timeline.traced == (2, 3, 7)
    assert not timeline.notes
    direct = run_step(given, 7, (8, 0))
    assert holds_at(direct, timeline, 7)
    assert sum(one.step == 2 for one in direct.collectives) >= 2


class Grows(Net):
    """Takes one more tensor than two and three samples do, from five samples on."""

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        scores = super().forward(words)
        return scores + torch.zeros_like(scores) if len(words) > 4 else scores


def more_is_sent(model: nn.Module, words: torch.Tensor) -> torch.Tensor:
    """The same memory, but another collective from five samples on."""
    made = loss(model, words)
    said = made.detach().clone()
    if len(words) > 4:
        torch.distributed.all_reduce(said)
    return made


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
@pytest.mark.parametrize("settings", [{"model": Grows}, {"loss": more_is_sent}], ids=["memory", "collective"])
def test_a_step_without_such_a_law_is_seen_in_every_kind(kind: Any, settings: dict[str, Any]) -> None:
    timeline = trace(step(Parallel(2, kind=kind), **settings), check_at=7)
    assert timeline.traced != (2, 3, 7)
    assert timeline.notes


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2"])
def test_a_norm_over_divided_gradients_is_added_up_over_the_ranks(kind: Any) -> None:
    def asked(**settings: Any) -> list[str]:
        timeline = run_step(step(Parallel(4, kind=kind), **settings), 2, (9, 0))
        return [one.name for one in timeline.collectives if one.phase == "optimizer"]

    assert asked(clip_grad_norm=1.0) == ["all_reduce"] * 2  # two optimizer steps
    assert asked(clip_grad_norm=None) == []
