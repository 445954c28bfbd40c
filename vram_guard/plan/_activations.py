"""The modules that hold the activations saved for the backward pass (pure over a timeline)."""

from __future__ import annotations

from itertools import accumulate

from vram_guard.timeline import Phase, Timeline


def activation_bytes(timeline: Timeline, batch_size: int) -> dict[str, int]:
    """Module path -> requested bytes of its activations at the end of a forward pass, largest first.

    Those of the second step's first micro-batch: what checkpointing or offloading a module can take off the GPU until
    the backward pass. A module's own only; sum over its inner modules for the whole of it. A timeline without a second
    step gives that of its last forward pass.
    """
    timeline = timeline.exact(batch_size)
    by_module: dict[str, int] = {}
    forwards = first_forwards(timeline)
    for block in timeline.alive_at(forwards[-1][1] if forwards else 0):
        if block.category == "activations":
            by_module[block.module] = by_module.get(block.module, 0) + block.bytes_at(batch_size)
    return dict(sorted(by_module.items(), key=lambda item: -item[1]))


def first_forwards(timeline: Timeline) -> list[tuple[Phase, int]]:
    """The forward phases of the second step's first micro-batch, each with its end.

    They are several where a loop loads a batch between two of them: a group of batches that are all loaded before the
    first is computed, batches of two loaders. What they keep is wanted by the first backward pass, so that one ends
    them. A timeline without a second step gives its last forward pass.
    """
    forwards: list[tuple[Phase, int]] = []
    for phase, end in timeline.spans():
        if phase.step == 2 and phase.name == "backward" and forwards:
            return forwards
        if phase.step == 2 and phase.name == "forward":
            forwards.append((phase, end))
    return forwards or [(phase, end) for phase, end in timeline.spans() if phase.name == "forward"][-1:]


def peak_outside(timeline: Timeline, phase: str, batch_size: int) -> int:
    """The most requested bytes alive at once while any phase but this one runs; no allocator reserves less."""
    timeline = timeline.exact(batch_size)
    sizes = timeline.sizes(batch_size)
    held = list(accumulate([sizes[event] if event >= 0 else -sizes[~event] for event in timeline.events]))
    return max(
        (max(held[part.start : end], default=0) for part, end in timeline.spans() if part.name != phase), default=0
    )
