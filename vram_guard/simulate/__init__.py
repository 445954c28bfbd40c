"""simulate: run one training step symbolically and write down what it allocates, as CUDA would."""

from __future__ import annotations

from dataclasses import replace

from vram_guard.step import TrainingStep, checked_count
from vram_guard.timeline import Estimate, Note, Timeline, merge_affine

__all__ = ["estimate", "trace"]

#: Two sizes that differ by one sample, neither of them 1: torch treats dimensions of one specially.
TRACED_SIZES = (2, 3)

#: NVIDIA A100: what a step is traced for unless the caller names another GPU.
DEFAULT_CAPABILITY = (8, 0)


def trace(step: TrainingStep, *, compute_capability: tuple[int, int] = DEFAULT_CAPABILITY) -> Timeline:
    """Two consecutive training steps as allocations and frees, for every batch size.

    The step runs twice, on symbolic tensors, at two small batch sizes; no arithmetic is done, no GPU is touched and
    the user's objects come back bit-identical. Where the sequence itself depends on the batch size, or sizes depend
    on the values in the batch, the timeline says so in its notes and traces each size that it is asked for.

    Args:
        step: what is trained.
        compute_capability: of the GPU that is meant; decides attention backends and library workspaces.

    Raises:
        UnsupportedStepError: the step cannot be run symbolically at all.
        Exception: whatever the user's own code raises, with its own traceback.
    """
    from vram_guard.simulate.run import run_step

    small, large = (run_step(step, size, compute_capability) for size in TRACED_SIZES)
    merged = merge_affine(small, large)
    from_values = any("depends on the values in the batch" in note.message for note in small.notes)
    if merged is not None and not from_values:
        return merged
    law = Note("the sequence of allocations differs between batch sizes: every size asked for is traced")

    def retrace(batch_size: int) -> Timeline:
        exact = run_step(step, batch_size, compute_capability)
        return replace(exact, notes=(*exact.notes, law), retrace=retrace)

    return replace(small, notes=(*small.notes, law), retrace=retrace)


def estimate(
    step: TrainingStep, batch_size: int, *, compute_capability: tuple[int, int] = DEFAULT_CAPABILITY
) -> Estimate:
    """Shorthand for ``trace(step).at(batch_size)``."""
    checked_count("batch_size", batch_size)
    return trace(step, compute_capability=compute_capability).at(batch_size)
