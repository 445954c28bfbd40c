"""How a deep model grows with the batch, from traces of it with a few of its equal blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from vram_guard.compose import CannotComposeError
from vram_guard.techniques.equal_blocks import EqualBlocks, equal_blocks, with_depth

if TYPE_CHECKING:
    from vram_guard.plan.source import Source, TraceRequest
    from vram_guard.techniques.recipe import Recipe
    from vram_guard.timeline import Timeline

#: Fields of a recipe that name modules.
_NAMING = ("checkpoint", "offload_activations", "frozen_on_host", "parameters_on_host")

#: Blocks of the traces that say how a model grows with the batch: a first one, a last one, and one between them.
_DEPTH = 3

#: Blocks of each list where those traces take half of what one of all blocks takes, or less.
LEAST_DEPTH = 2 * 2 * _DEPTH


def with_few_blocks(source: Source) -> Source:
    """The source, which says how its model grows with the batch by three of its equal blocks, where it has many.

    Args:
        source: that follows all blocks of its model.
    """
    blocks = equal_blocks(source.model, LEAST_DEPTH)
    if blocks is None:
        return source
    return replace(source, shallow=_FewBlocks(source, blocks), stacks=blocks.stacks)


class _FewBlocks:
    """Follows a model with few of its equal blocks.

    Args:
        source: that follows all of them.
        blocks: of the model.
    """

    def __init__(self, source: Source, blocks: EqualBlocks) -> None:
        self._source = source
        self._left_out = blocks.names - blocks.within(_DEPTH)
        self._blocks = blocks

    def __call__(self, request: TraceRequest) -> Timeline:
        """The request with the blocks that show how others grow with the batch.

        Raises:
            CannotComposeError: blocks are not treated alike, or they are compiled.
        """
        stacks = [self._blocks.of(stack) for stack in self._blocks.stacks]
        named = [stack.intersection(getattr(request.recipe, name)) for name in _NAMING for stack in stacks]
        if request.compiled or any(names and names not in stacks for names in named):
            raise CannotComposeError("blocks are not treated alike, or they are compiled")
        with with_depth(self._source.model, self._blocks, _DEPTH):
            return self._source.trace(replace(request, watched=False, recipe=self._within(request.recipe)))

    def _within(self, recipe: Recipe) -> Recipe:
        """The recipe without the blocks that the model has not."""
        kept = {name: tuple(each for each in getattr(recipe, name) if each not in self._left_out) for name in _NAMING}
        return recipe.with_(**kept)
