"""The changes that a plan may make, and the effect of each on a timeline (pure functions)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from vram_guard.checks import known_names
from vram_guard.errors import DeviceQueryError, NoDeviceError
from vram_guard.plan.descriptions import Reason, Why
from vram_guard.timeline import Affine, Timeline

if TYPE_CHECKING:
    from vram_guard.budget import Budget

#: What ``allow`` may name, and what it means. "offload" is all four kinds of it.
TECHNIQUES: dict[str, str] = {
    "precision": "mixed precision in place of 32-true",
    "evaluation": "smaller batches of the evaluations within a training, where what they compute stays",
    "half": "bf16-true in place of 32-true: weights and optimizer states in bfloat16 too",
    "accumulate": "smaller micro-batches of the same loaded batch",
    "checkpoint": "activation checkpointing of repeated blocks, as many as needed",
    "slices": "the forward of the model's body over slices of the batch, some of them again in the backward pass",
    "selective_checkpoint": "checkpointed blocks keep results that are small and take long to compute",
    "offload_activations": "activations of blocks wait in host memory for the backward pass",
    "offload_frozen": "frozen modules wait in host memory for their forward",
    "offload_optimizer": "optimizer states and step in host memory",
    "offload_parameters": "parameters, gradients and optimizer states in host memory (FSDP2)",
    "foreach": "the optimizer without foreach lists: equal results, fewer temporaries",
    "reshard": "gathered weights freed after the forward, or kept until the backward pass, where FSDP divides them",
    "shard": "FSDP2 in place of DistributedDataParallel: weights, gradients and optimizer states divided",
    "fused": "the fused optimizer: no temporaries, results differ in the last bits",
    "8bit": "8-bit optimizer states",
    "optimizer_in_backward": "each weight steps when its gradient is there, which is freed then",
    "chunked_loss": "logits and their cross-entropy in chunks of tokens, through the model's own last layer",
    "expandable_segments": "the allocator's segments grow, in place of new ones of a fixed size",
}
#: Form of the optimizer -> the technique that it is.
FORMS = {"for-loop": "foreach", "fused": "fused", "8bit": "8bit"}
OFFLOADS = ("offload_activations", "offload_frozen", "offload_optimizer", "offload_parameters")

#: What is allowed unless the user says otherwise: results stay equal, or as close as mixed precision is.
DEFAULT_ALLOW = ("precision", "accumulate", "checkpoint", "slices", "offload", "foreach", "reshard", "evaluation")

BFLOAT16_SINCE = (8, 0)
FLOAT16_FAST_SINCE = (7, 0)

#: What is assumed of an unnamed GPU: Ampere, the oldest generation with bfloat16.
ASSUMED_COMPUTE_CAPABILITY = (8, 0)


def checked_techniques(allow: Iterable[str]) -> frozenset[str]:
    """The allowed techniques, "offload" spelt out; a string is read as a comma-separated list.

    Raises:
        InvalidInputError: an unknown technique; the message suggests the nearest known one.
    """
    names = [name.strip() for name in allow.split(",")] if isinstance(allow, str) else list(allow)
    names = [name for name in names if name != ""]
    known_names("allow", names, (*TECHNIQUES, "offload"))
    return frozenset(single for name in names for single in (OFFLOADS if name == "offload" else (name,)))


def mixed_precision(precision: str, capability: tuple[int, int] | None) -> tuple[str | None, Reason]:
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
        return None, Reason(Why.PRECISION_CHOSEN, precision=precision)
    if capability is None:
        return "bf16-mixed", Reason(Why.BFLOAT16_ASSUMED)
    if capability >= BFLOAT16_SINCE:
        return "bf16-mixed", Reason(Why.BFLOAT16)
    version = ".".join(map(str, capability))
    if capability >= FLOAT16_FAST_SINCE:
        return "16-mixed", Reason(Why.FLOAT16, version=version)
    return None, Reason(Why.NO_HALF_PRECISION, version=version)


def half_precision(precision: str, capability: tuple[int, int] | None) -> str | None:
    """The "true" half precision that may replace ``precision`` on request; None where there is none.

    Only bfloat16: float16 weights need a gradient scaler, which torch's does not do for them.
    """
    fits = precision == "32-true" and (capability is None or capability >= BFLOAT16_SINCE)
    return "bf16-true" if fits else None


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
    blocks = list(timeline.blocks)
    for phase, end in timeline.spans():
        for event in timeline.events[phase.start : end] if phase.name == "batch" else ():
            if event >= 0 and blocks[event].category == "batch":
                base, per_sample = blocks[event].size
                size = Affine(base * resident // traced, per_sample * resident // traced)
                blocks[event] = blocks[event]._replace(size=size)
    again = timeline.retrace
    retrace = None if again is None else lambda size: resident_batch(again(size), traced, resident)
    return replace(timeline, blocks=tuple(blocks), retrace=retrace)


def uses_batch_norm(timeline: Timeline) -> bool:
    """True if a batch normalisation ran: splitting changes the batch of its statistics."""
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


def compute_capability(budget: Budget) -> tuple[int, int] | None:
    """The budget's GPU's; for a bare amount, that of this machine's device; None: no GPU is known."""
    from vram_guard.budget import Budget

    if budget.compute_capability is not None:
        return budget.compute_capability
    try:
        return Budget.resolve().compute_capability
    except (NoDeviceError, DeviceQueryError):
        return None
