"""Timelines of a deep model from traces of it with a few of its equal blocks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import TYPE_CHECKING

from vram_guard.compose import CannotComposeError, DepthLaw
from vram_guard.techniques.equal_blocks import EqualBlocks, equal_blocks, with_depth

if TYPE_CHECKING:
    from vram_guard.plan.source import Source, TraceRequest
    from vram_guard.techniques.recipe import Recipe
    from vram_guard.timeline import Timeline

    Follow = Callable[[TraceRequest], Timeline]

_log = logging.getLogger(__name__)

#: Blocks of the traces that give the law; the first and the last few of them differ from those between.
_DEPTH = 5

#: Blocks of the trace that shows that the law holds.
_CHECKED_DEPTH = 8

#: Fields of a recipe that name modules.
_NAMING = ("checkpoint", "offload_activations", "frozen_on_host", "parameters_on_host")

#: Three traces with 19 blocks together, and what each takes besides its blocks: models of fewer are traced as they are.
LEAST_BLOCKS = 48

#: Blocks of each list of equal ones: twice as many as those three traces have of it. GPT-2 medium and ViT-L, with 24,
#: were planned no faster by the law.
LEAST_DEPTH = 2 * 19

#: Blocks of the traces that say how a model grows with the batch: a first one, a last one, and one between them.
_DEPTH_OF_SIZES = 3

#: Blocks of each list where those traces take half of what one of all blocks takes, or less.
LEAST_DEPTH_OF_SIZES = 2 * 2 * _DEPTH_OF_SIZES


def by_depth(source: Source, checked: set[Hashable] | None = None, layout: Hashable = None) -> Source:
    """The source with a law for what a model of many equal blocks does, in place of traces of all of them.

    Where there are too few for that, it still says how the model with three of them grows with the batch.

    Args:
        source: that follows all blocks of its model.
        checked: kinds of requests for which a third depth has shown that the law holds; those of this one are added.
            Batch sizes are of one kind: they change amounts, not the order in which things happen.
        layout: the kind of layout that the source follows.
    """
    from vram_guard.simulate import each_once

    blocks = equal_blocks(source.model, LEAST_DEPTH)
    deep = blocks is not None and len(blocks.names) >= LEAST_BLOCKS
    blocks = blocks if deep else equal_blocks(source.model, LEAST_DEPTH_OF_SIZES)
    if blocks is None:
        return source
    model = _FewerBlocks(source, blocks)
    source = replace(source, shallow=model, stacks=blocks.stacks)
    if not deep:
        return source
    direct = each_once(source.trace)
    return replace(source, trace=_Lawful(model, direct, checked, layout), direct=direct)


class _FewerBlocks:
    """Follows a model with fewer of its equal blocks.

    Args:
        source: that follows all of them.
        blocks: of the model.
    """

    def __init__(self, source: Source, blocks: EqualBlocks) -> None:
        self._source = source
        self._every = blocks.names
        self.blocks = blocks

    def __call__(self, request: TraceRequest) -> Timeline:
        """The request with the blocks that show how others grow with the batch."""
        if self.treated(request) is None:
            raise CannotComposeError("blocks are not treated alike, or they are compiled")
        return self.at(replace(request, watched=False), _DEPTH_OF_SIZES)

    def treated(self, request: TraceRequest) -> tuple[bool, ...] | None:
        """For each way to treat a block and each list, whether its blocks are; None: not all of a list alike."""
        stacks = [self.blocks.of(stack) for stack in self.blocks.stacks]
        named = [stack.intersection(getattr(request.recipe, name)) for name in _NAMING for stack in stacks]
        if request.compiled or any(names and names not in stacks for names in named):
            return None
        return tuple(map(bool, named))

    def at(self, request: TraceRequest, depth: int) -> Timeline:
        """The request with so many blocks of each list."""
        with with_depth(self._source.model, self.blocks, depth):
            return self._source.trace(replace(request, recipe=self.within(request.recipe, depth)))

    def within(self, recipe: Recipe, depth: int) -> Recipe:
        """The recipe without the blocks that a model of this depth has not."""
        left_out = self._every - self.blocks.within(depth)
        kept = {name: tuple(each for each in getattr(recipe, name) if each not in left_out) for name in _NAMING}
        return recipe.with_(**kept)


class _Lawful:
    """What a model of equal blocks does, from traces of it with a few of them.

    Args:
        model: with fewer blocks.
        direct: follows all of them.
        checked: as :func:`by_depth`.
        layout: as :func:`by_depth`.
    """

    def __init__(self, model: _FewerBlocks, direct: Follow, checked: set[Hashable] | None, layout: Hashable) -> None:
        self._model = model
        self._direct = direct
        self._checked = set() if checked is None else checked
        self._layout = layout

    def __call__(self, request: TraceRequest) -> Timeline:
        model = self._model
        treated = model.treated(request)
        if treated is None:
            return self._direct(request)
        try:
            small, large = (model.at(request, depth) for depth in (_DEPTH, _DEPTH + 1))
            law = DepthLaw(small, large, _DEPTH, model.blocks.stacks)
            part = "whole" if request.part == "first" else request.part
            outside = replace(request, batch_size=0, part=part, recipe=model.within(request.recipe, 0))
            kind = self._layout, (*treated, request.recipe.checkpoint_keeps), outside
            if kind in self._checked or law.holds(model.at(request, _CHECKED_DEPTH), _CHECKED_DEPTH):
                self._checked.add(kind)
                return law.at(model.blocks.depth)
            _log.info("%s: another depth does not follow the law: traced as it is", request)
        except CannotComposeError as error:
            _log.info("%s: traced as it is: %s", request, error)
        except Exception as error:  # noqa: BLE001 - the user's code runs here; with all blocks it may not fail
            _log.info("%s: traced as it is: %s: %s", request, type(error).__name__, error)
        return self._direct(request)
