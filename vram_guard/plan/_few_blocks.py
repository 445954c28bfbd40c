"""How a deep model grows with the batch, from traces of it with a few of its equal blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from vram_guard.compose import CannotComposeError, NumberedNames
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
    """Follows a model with few of its equal blocks: its first ones and its last one, each treated as in the whole.

    Args:
        source: that follows all of them.
        blocks: of the model.
    """

    def __init__(self, source: Source, blocks: EqualBlocks) -> None:
        self._source = source
        self._blocks = blocks
        self._names = NumberedNames(blocks.stacks)

    def __call__(self, request: TraceRequest) -> Timeline:
        """The request of the model with few blocks.

        Raises:
            CannotComposeError: blocks are compiled.
        """
        if request.compiled:
            raise CannotComposeError("blocks are compiled")
        with with_depth(self._source.model, self._blocks, _DEPTH):
            return self._source.trace(replace(request, watched=False, recipe=self._within(request.recipe)))

    def _within(self, recipe: Recipe) -> Recipe:
        """The recipe for the blocks that are left, by their new numbers."""
        numbers = {-1: -1, **{number: number for number in range(_DEPTH - 1)}, self._blocks.depth - 1: _DEPTH - 1}
        known = {name: [(one, self._names.parted(one)[1]) for one in getattr(recipe, name)] for name in _NAMING}
        return recipe.with_(
            **{
                name: tuple(self._names.joined(one, numbers[number]) for one, number in modules if number in numbers)
                for name, modules in known.items()
            }
        )
