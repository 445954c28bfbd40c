"""Order: which option is preferred (pure; it depends on neither a budget nor what else is allowed)."""

from __future__ import annotations

from vram_guard.plan._option import Option

#: What one more kind of change has to save of the step's time to be worth it: smaller differences the cost model cannot
#: tell from nothing. Of the published step times of one training with and without one change that it was held against,
#: three of four are missed by more than this, the worst by 23% (docs/lab/cost-model.md, "Compared with published
#: measurements": recomputation, micro-batches, half precision); two measurements of one and the same run in one
#: publication are 1.7% apart themselves (github.com/huggingface/transformers/issues/15026: t5-base in float32 on an
#: A100, 93.68 and 92.15 samples a second).
TOLERANCE = 0.05

#: Places that differ by less are equal.
STEP = 0.001

Key = tuple[float, int, int, int, str]


def kinds(option: Option, precision: str) -> int:
    """The number of kinds of change against the step as written, in this precision."""
    recipe = option.recipe
    changes = (
        option.precision != precision,
        option.splits > 1,
        recipe.optimizer != "as-written",
        recipe.checkpoint,
        recipe.slices is not None,
        recipe.checkpoint_keeps,
        recipe.offload_activations,
        recipe.frozen_on_host,
        recipe.optimizer_on_host,
        recipe.parameters_on_host,
        recipe.sharding is not None,
        recipe.optimizer_in_backward,
        recipe.chunked_head,
        recipe.expandable_segments,
    )
    return sum(map(bool, changes))


def treated(option: Option) -> int:
    """The number of blocks that are checkpointed or offloaded."""
    return len(option.recipe.checkpoint) + len(option.recipe.offload_activations)


def key(option: Option, cost: float, precision: str, blocks: int) -> Key:
    """The option's place: first its cost, dearer by the tolerance for each kind of change and for all blocks together.

    Among equals what changes the numbers of the training least, then fewest micro-batches, then fewest treated blocks.
    Treating one more block never leads to an earlier place, as long as it does not cost less.

    Args:
        option: one way to run the step.
        cost: its step time over the step time as written.
        precision: of the step as written.
        blocks: that the model has.
    """
    count = treated(option)
    share = count / max(blocks, count, 1)
    place = cost * (1 + TOLERANCE) ** (kinds(option, precision) + share)
    return round(place / STEP) * STEP, option.changes_numbers, option.splits, count, repr(option)
