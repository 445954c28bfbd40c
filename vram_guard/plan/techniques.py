"""What a plan may change, and what each change does to a timeline (pure functions)."""

from __future__ import annotations

from dataclasses import replace
from difflib import get_close_matches
from typing import TYPE_CHECKING

from vram_guard.errors import InvalidInputError
from vram_guard.timeline import Affine, Block, Timeline

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

TECHNIQUES: tuple[str, ...] = ("precision", "accumulate")

BFLOAT16_SINCE = (8, 0)
FLOAT16_FAST_SINCE = (7, 0)


def checked_techniques(allow: Iterable[str]) -> frozenset[str]:
    """The allowed techniques; a string is read as a comma-separated list.

    Raises:
        InvalidInputError: an unknown technique; the message suggests the nearest known one.
    """
    names = [name.strip() for name in allow.split(",") if name.strip()] if isinstance(allow, str) else list(allow)
    for name in names:
        if name not in TECHNIQUES:
            near = get_close_matches(str(name), TECHNIQUES, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise InvalidInputError(f"allow: unknown technique {name!r}, known are {', '.join(TECHNIQUES)}{hint}")
    return frozenset(names)


def mixed_precision(precision: str, capability: tuple[int, int] | None) -> tuple[str | None, str]:
    """The mixed precision to try instead of ``precision`` (None: none), and why.

    Only "32-true" is ever replaced: any other precision was chosen by the user. bfloat16 needs compute
    capability 8.0 and later; float16 has tensor cores from 7.0 on (CUDA C++ programming guide, "Compute
    Capabilities"), and runs with a GradScaler, which is what "16-mixed" means. "True" half precision changes
    what the optimizer sees, so it is never chosen.

    Args:
        precision: the step's own.
        capability: the GPU's (major, minor); None: no GPU is known.
    """
    if precision != "32-true":
        return None, f"The precision {precision} was chosen by the user and stays."
    if capability is None:
        return "bf16-mixed", (
            "No GPU is named: bf16-mixed assumes compute capability 8.0 or later. Name the GPU to be sure."
        )
    if capability >= BFLOAT16_SINCE:
        return "bf16-mixed", "The GPU computes in bfloat16, which needs no gradient scaling."
    name = ".".join(map(str, capability))
    if capability >= FLOAT16_FAST_SINCE:
        return "16-mixed", f"Compute capability {name} has no bfloat16: float16 with a GradScaler."
    return None, f"Mixed precision was not tried: compute capability {name} has no fast half precision."


def splits_of(batch_size: int) -> Iterator[int]:
    """The numbers of equal micro-batches that a batch can be split into, ascending, without 1.

    Equal, because the mean of the micro-batches' mean losses is the batch's mean loss only then.
    """
    return (n for n in range(2, batch_size + 1) if batch_size % n == 0)


def resident_batch(timeline: Timeline, traced: int, resident: int) -> Timeline:
    """A timeline whose loaded batch holds ``resident`` micro-batches, from one where it holds ``traced``.

    Splitting a loaded batch leaves the whole of it on the device while its micro-batches run. From the
    second micro-batch on, nothing else depends on how many there are, so the blocks that loading allocated
    are the only ones that change size: an exact transformation.
    """
    if resident == traced:
        return timeline
    loaded = {
        event
        for at, event in enumerate(timeline.events)
        if event >= 0 and timeline.blocks[event].category == "batch" and timeline.phase_of(at).name == "batch"
    }

    def resized(block: Block) -> Block:
        base, per_sample = block.size
        return block._replace(size=Affine(base * resident // traced, per_sample * resident // traced))

    blocks = tuple(resized(block) if i in loaded else block for i, block in enumerate(timeline.blocks))
    again = timeline.retrace
    retrace = None if again is None else lambda size: resident_batch(again(size), traced, resident)
    return replace(timeline, blocks=blocks, retrace=retrace)


def uses_batch_norm(timeline: Timeline) -> bool:
    """Whether a batch normalisation ran: splitting changes what its statistics are taken over."""
    return any("batch_norm" in block.operator for block in timeline.blocks)


def growth_multiples(most: int) -> Iterator[int]:
    """Whole multiples of the present batch to try, ascending from 2 to ``most``.

    Every one up to 16, then eight to an octave (18, 20, ... 32, 36, ...): the answer is within an eighth of
    the largest multiple, and the list does not depend on any budget, so that more budget never gives less.
    """
    multiple, step = 2, 1
    while multiple <= most:
        yield multiple
        if multiple >= 16 * step:
            step *= 2
        multiple += step
