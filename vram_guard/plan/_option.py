"""Option: one way to run a loaded batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from vram_guard.language import _
from vram_guard.plan.descriptions import recipe_words
from vram_guard.techniques.recipe import AS_WRITTEN, Recipe


class Option(NamedTuple):
    """One way to run a loaded batch."""

    precision: str
    splits: int
    """Micro-batches that a loaded batch is split into."""
    recipe: Recipe = AS_WRITTEN

    def words(self, batch_size: int, precision_before: str = "") -> str:
        """The option as people read it; with the precision before, only what differs from the step as written."""
        precision = [] if self.precision == precision_before else [self.precision]
        others = recipe_words(self.recipe)
        batch = [] if precision_before and (precision or others) else [_("batch {count}", count=batch_size)]
        if self.splits > 1:
            batch = [_("{count} micro-batches of {size}", count=self.splits, size=batch_size // self.splits)]
        return _(", ").join([*precision, *batch, *others])

    def of(self, batch_size: int) -> OptionText:
        """The option, put into words where it is shown."""
        return OptionText(self, batch_size)

    @property
    def unordered(self) -> Option:
        """The option whatever order its blocks were chosen in."""
        recipe = self.recipe
        blocks, offloaded = tuple(sorted(recipe.checkpoint)), tuple(sorted(recipe.offload_activations))
        return self._replace(recipe=recipe.with_(checkpoint=blocks, offload_activations=offloaded))

    @property
    def changes_numbers(self) -> int:
        """A rank for how much the option changes the numbers of the training: 0 nothing, more is more.

        Checkpointing and offload compute what was computed before; micro-batches, slices, a loss in chunks and FSDP2 in
        place of DDP add up the same gradients in another order (and micro-batches take batch normalisation's statistics
        over fewer samples); a fused optimizer rounds otherwise; mixed precision rounds activations; 8-bit states round
        the optimizer; half precision the weights.
        """
        divided = self.recipe.sharding
        return (
            bool(
                self.splits > 1
                or self.recipe.chunked_head
                or self.recipe.slices is not None
                or (divided is not None and divided.fsdp2)
            )
            + 2 * (self.recipe.optimizer == "fused")
            + 4 * self.precision.endswith("-mixed")
            + 8 * (self.recipe.optimizer == "8bit")
            + 16 * (self.precision in ("16-true", "bf16-true"))
        )


@dataclass(frozen=True)
class OptionText:
    """An option on loaded batches of so many samples; ``str()`` puts it into words."""

    option: Option
    batch_size: int

    def __str__(self) -> str:
        return self.option.words(self.batch_size)
