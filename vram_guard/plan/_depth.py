"""Timelines of a deep model from traces of it with a few of its equal blocks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import TYPE_CHECKING

from vram_guard.compose import CannotComposeError, DepthLaw
from vram_guard.techniques.equal_blocks import equal_blocks, with_depth

if TYPE_CHECKING:
    from torch import nn

    from vram_guard.plan.source import TraceRequest
    from vram_guard.timeline import Timeline

_log = logging.getLogger(__name__)

#: Blocks of the traces that give the law; the first and the last few of them differ from those between.
_DEPTH = 5

#: Blocks of the trace that shows that the law holds.
_CHECKED_DEPTH = 8

#: A recipe without blocks that are treated.
_NONE: dict[str, tuple[str, ...]] = {"checkpoint": (), "offload_activations": ()}

#: Three traces with 19 blocks together, and what each takes besides its blocks: models of fewer are traced as they are.
LEAST_BLOCKS = 48


def by_depth(
    model: nn.Module, trace: Callable[[TraceRequest], Timeline], checked: set[Hashable], layout: Hashable = None
) -> Callable[[TraceRequest], Timeline] | None:
    """A trace's replacement for a model of many equal blocks; None where the model is no such.

    Args:
        model: that ``trace`` follows.
        trace: a request -> its timeline.
        checked: kinds of requests for which a third depth has shown that the law holds; those of this one are added.
            Batch sizes are of one kind: they change amounts, not the order in which things happen.
        layout: the kind of layout that ``trace`` follows.
    """
    blocks = equal_blocks(model)
    if blocks is None or len(blocks.names) < LEAST_BLOCKS:
        return None
    every = frozenset(blocks.names)

    def shallow(request: TraceRequest, depth: int) -> Timeline:
        left_out = every - blocks.within(depth)
        recipe = request.recipe
        kept = {name: tuple(block for block in getattr(recipe, name) if block not in left_out) for name in _NONE}
        with with_depth(model, blocks, depth):
            return trace(replace(request, recipe=recipe.with_(**kept)))

    def traced(request: TraceRequest) -> Timeline:
        treated = [
            every.intersection(names) for names in (request.recipe.checkpoint, request.recipe.offload_activations)
        ]
        if request.compiled or any(names and names != every for names in treated):
            return trace(request)
        try:
            law = DepthLaw(shallow(request, _DEPTH), shallow(request, _DEPTH + 1), _DEPTH, blocks.stack)
            kind = (
                layout,
                (*map(bool, treated), request.recipe.checkpoint_keeps),
                replace(request, batch_size=0, recipe=request.recipe.with_(**_NONE)),
            )
            if kind in checked or law.holds(shallow(request, _CHECKED_DEPTH), _CHECKED_DEPTH):
                checked.add(kind)
                return law.at(len(blocks.names))
            _log.info("%s: another depth does not follow the law: traced as it is", request)
        except CannotComposeError as error:
            _log.info("%s: traced as it is: %s", request, error)
        except Exception as error:  # noqa: BLE001 - the user's code runs here; with all blocks it may not fail
            _log.info("%s: traced as it is: %s: %s", request, type(error).__name__, error)
        return trace(request)

    return traced
