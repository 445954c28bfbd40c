"""The language models of the recordings, predicted without a GPU and compared with what was recorded."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from benchmarks.harness.records import Row
from benchmarks.recorded import lm_2_7b, lm_medium
from benchmarks.recorded.recordings import path_of, recordings, source_of
from vram_guard.allocator import Placement, compare, replay
from vram_guard.job import Job, JobRun
from vram_guard.simulate import trace_at
from vram_guard.step import TrainingStep
from vram_guard.timeline import Timeline


@dataclass(frozen=True)
class Run:
    """One recorded run of a language model, as a step that can be predicted."""

    step: TrainingStep
    batch_size: int
    capability: tuple[int, int]
    """Of the GPU: 9.0 for the H100. Nobody names the card of lm-medium; its cuBLAS workspaces are not Hopper's."""
    recorded_step: int
    """The traced step that was recorded, with which the run ended."""
    placement: Placement
    """Read out of the recorded addresses."""


def medium_training(context: int, precision: str) -> Run:
    """``memory_profile`` of Wedsonlin/assignment2-systems: five steps before the recorded one."""

    def batch(size: int) -> dict[str, torch.Tensor]:
        shapes = {"warm_up": lm_medium.WARM_UPS, "recorded": 1}
        return {
            f"{name}_{part}": torch.zeros(count, size, context, dtype=torch.long)
            for part in ("inputs", "targets")
            for name, count in shapes.items()
        }

    def loss(model: lm_medium.LanguageModel, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        logits = model(batch["warm_up_inputs"][0])
        return lm_medium.cross_entropy(logits, batch["warm_up_targets"][0]), logits

    def play(run: JobRun) -> None:
        run.train(lm_medium.WARM_UPS - 1)
        run.train(1, keeps="nothing")  # del output, loss
        run.train(1)

    step = TrainingStep(
        lambda: lm_medium.LanguageModel(context),
        batch,
        loss,
        lm_medium.AdamW,
        precision,
        keeps="outputs",
        job=Job(play),
    )
    return Run(step, lm_medium.BATCH, (8, 9), lm_medium.WARM_UPS + 1, "above")


def medium_inference(context: int, precision: str) -> Run:
    """The same without gradients; nothing holds the logits."""

    def batch(size: int) -> dict[str, torch.Tensor]:
        return {
            "warm_up": torch.zeros(lm_medium.WARM_UPS, size, context, dtype=torch.long),
            "recorded": torch.zeros(1, size, context, dtype=torch.long),
        }

    def forward(model: lm_medium.LanguageModel, batch: dict[str, torch.Tensor]) -> None:
        with torch.inference_mode():
            model(batch["warm_up"][0])

    step = TrainingStep(lambda: lm_medium.LanguageModel(context), batch, forward, None, precision)
    return Run(step, lm_medium.BATCH, (8, 9), 2, "above")


def billions_training(context: int) -> Run:
    """``run_memory_foward_fullstep`` of kkaitlyn111/cs336-a2-systems: the first step of all is recorded."""

    def loss(model: lm_2_7b.LanguageModel, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = model(tokens)
        return lm_2_7b.cross_entropy(logits, tokens), logits

    step = TrainingStep(
        lambda: lm_2_7b.LanguageModel(context),
        _tokens(context),
        loss,
        lm_2_7b.AdamW,
        zero_grad="before_forward",
        keeps="outputs",
    )
    return Run(step, lm_2_7b.BATCH, (9, 0), 1, "below")


def billions_forward(context: int, precision: str) -> Run:
    """The same for a forward alone, with gradients switched on: everything is kept for a backward that never comes."""

    def forward(model: lm_2_7b.LanguageModel, tokens: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            return model(tokens)

    step = TrainingStep(
        lambda: lm_2_7b.LanguageModel(context), _tokens(context), forward, None, precision, keeps="outputs"
    )
    return Run(step, lm_2_7b.BATCH, (9, 0), 1, "below")


def _tokens(context: int) -> Callable[[int], torch.Tensor]:
    return lambda size: torch.zeros(size, context, dtype=torch.long)


#: Recording -> its run. lm-2.7b-forward is only replayed: another model was left in its process.
RUNS: dict[str, Callable[[], Run]] = {
    "lm-medium-128-training": lambda: medium_training(128, "32-true"),
    "lm-medium-256-training": lambda: medium_training(256, "32-true"),
    "lm-medium-512-training": lambda: medium_training(512, "bf16-mixed"),
    "lm-medium-1024-training": lambda: medium_training(1024, "bf16-mixed"),
    "lm-medium-128-inference": lambda: medium_inference(128, "32-true"),
    "lm-medium-256-inference": lambda: medium_inference(256, "32-true"),
    "lm-medium-512-inference": lambda: medium_inference(512, "bf16-mixed"),
    "lm-medium-1024-inference": lambda: medium_inference(1024, "32-true"),
    "lm-2.7b-128-fullstep": lambda: billions_training(128),
    "lm-2.7b-512-fullstep": lambda: billions_training(512),
    "lm-2.7b-256-forward": lambda: billions_forward(256, "32-true"),
    "lm-2.7b-256-forward-mixed": lambda: billions_forward(256, "bf16-mixed"),
}


def predicted(name: str) -> Row:
    """The reserved peak of a recorded run, recorded and predicted, in bytes.

    ``details``: ``allocated`` and ``predicted_allocated``: peaks in bytes; ``allocations`` of the recorded step;
    ``in_order``: their share that the prediction finds (:func:`share_in_order`).
    """
    started = time.perf_counter()
    run = RUNS[name]()
    timeline = trace_at(run.step, run.batch_size, compute_capability=run.capability)
    sizes = timeline.sizes(run.batch_size)
    start, end = _bounds(timeline, run.recorded_step)
    answer = replay(
        timeline.events[:end], sizes, streams=timeline.streams, starts=(0, start), placement=run.placement
    ).stretches[-1]
    (recording,) = recordings(path_of(name))
    followed = compare(recording)
    recorded = [entry.size for entry in recording.trace if entry.action == "alloc"]
    asked_for = [sizes[event] for event in timeline.events[start:end] if event >= 0 and sizes[event]]
    return Row(
        source=source_of(name),
        name=name,
        measured=followed.recorded_peak_reserved,
        predicted=answer.reserved,
        tier=timeline.tier,
        seconds=round(time.perf_counter() - started, 3),
        details={
            "allocated": followed.simulated_peak_allocated,
            "predicted_allocated": answer.allocated,
            "allocations": len(recorded),
            "in_order": share_in_order(recorded, asked_for),
        },
    )


def _bounds(timeline: Timeline, step: int) -> tuple[int, int]:
    """The events of one step from its forward on; the batch had been there before the recordings began."""
    start = next(phase.start for phase in timeline.phases if phase.step == step and phase.name == "forward")
    after = [phase.start for phase in timeline.phases if phase.step == step + 1]
    return start, after[0] if after else len(timeline.events)


def common_in_order(one: Sequence[int], other: Sequence[int]) -> int:
    """The length of the longest common subsequence.

    The greedy algorithm of E. Myers, "An O(ND) difference algorithm and its variations" (Algorithmica, 1986): fast
    where little differs. After ``edits`` insertions and deletions, ``furthest[diagonal]`` is the furthest position in
    ``one`` that can be reached on that diagonal; a common subsequence is what is neither inserted nor deleted.
    """
    furthest = {1: 0}
    for edits in range(len(one) + len(other) + 1):
        for diagonal in range(-edits, edits + 1, 2):
            left, right = furthest.get(diagonal - 1, -1), furthest.get(diagonal + 1, -1)
            x = right if diagonal == -edits or (diagonal != edits and left < right) else left + 1
            y = x - diagonal
            while x < len(one) and y < len(other) and one[x] == other[y]:
                x, y = x + 1, y + 1
            furthest[diagonal] = x
            if x >= len(one) and y >= len(other):
                return (len(one) + len(other) - edits) // 2
    return 0


def share_in_order(recorded: Sequence[int], predicted: Sequence[int]) -> float:
    """The share of allocations that a prediction finds in order: the longest common subsequence over the longer one.

    Both are requested sizes in bytes, before the allocator rounds them, and equal only to the byte. An allocation that
    is missing counts against the prediction, and so does one that is too much.
    """
    return common_in_order(recorded, predicted) / max(len(recorded), len(predicted), 1)
