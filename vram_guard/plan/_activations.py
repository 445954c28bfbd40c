"""The modules that hold the activations saved for the backward pass (pure over a timeline)."""

from __future__ import annotations

from itertools import accumulate

from vram_guard.timeline import Timeline


def activation_bytes(timeline: Timeline, batch_size: int) -> dict[str, int]:
    """Module path -> requested bytes of its activations at the end of a forward pass, largest first.

    Those of the second step's first micro-batch: what checkpointing or offloading a module can take off the GPU until
    the backward pass. A module's own only; sum over its inner modules for the whole of it. A timeline without a second
    step gives that of its last forward pass.
    """
    timeline = timeline.exact(batch_size)
    by_module: dict[str, int] = {}
    for block in timeline.alive_at(_end_of_forward(timeline)):
        if block.category == "activations":
            by_module[block.module] = by_module.get(block.module, 0) + block.bytes_at(batch_size)
    return dict(sorted(by_module.items(), key=lambda item: -item[1]))


def _end_of_forward(timeline: Timeline) -> int:
    forwards = [(phase, end) for phase, end in timeline.spans() if phase.name == "forward"]
    second = [end for phase, end in forwards if phase.step == 2]
    if second:
        return second[0]
    return forwards[-1][1] if forwards else 0


def peak_outside(timeline: Timeline, phase: str, batch_size: int) -> int:
    """The most requested bytes alive at once while any phase but this one runs; no allocator reserves less."""
    timeline = timeline.exact(batch_size)
    sizes = timeline.sizes(batch_size)
    held = list(accumulate([sizes[event] if event >= 0 else -sizes[~event] for event in timeline.events]))
    return max(
        (max(held[part.start : end], default=0) for part, end in timeline.spans() if part.name != phase), default=0
    )
