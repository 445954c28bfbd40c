"""Timelines of options that need no trace of their own, because they are composed of those of others."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from vram_guard.compose import BlockMixture, CannotComposeError, in_micro_batches, with_optimizer_of

if TYPE_CHECKING:
    from vram_guard.plan.source import Source, TraceRequest
    from vram_guard.timeline import Timeline

_log = logging.getLogger(__name__)

#: Forms of the optimizer that are composed. The others have kernels of their own, or states of another size.
_FORMS = ("as-written", "for-loop")


class Composer:
    """Composes the timeline of a request; what it is composed of is asked for as requests as well.

    Args:
        source: of the step.
        base: request -> its timeline, traced.
    """

    def __init__(self, source: Source, base: Callable[[TraceRequest], Timeline]) -> None:
        self._source = source
        self._base = base
        self.blocks: tuple[str, ...] | None = None
        """Blocks that options checkpoint; nothing is composed before they are known."""
        self._mixtures: dict[TraceRequest, BlockMixture] = {}
        self._cuts = source.accumulate == 1
        """False where a trace of one micro-batch does not show what two do."""
        self._why_not: dict[TraceRequest, str] = {}
        self._made: dict[TraceRequest, Timeline] = {}

    def __call__(self, request: TraceRequest) -> Timeline | None:
        """The timeline; None where it has to be traced."""
        if not self._composes(request):
            return None
        group = self._plain(request)
        if group in self._why_not:
            return None
        if request not in self._made:
            try:
                self._made[request] = self._compose(request)
            except CannotComposeError as error:
                self._refuse(group, str(error))
                return None
            except Exception as error:  # noqa: BLE001 - the user's code runs here; with fewer blocks it may not fail
                self._refuse(group, f"{type(error).__name__}: {error}")
                return None
        return self._made[request]

    def _composes(self, request: TraceRequest) -> bool:
        recipe = request.recipe
        return (
            self._source.marks
            and self.blocks is not None
            and recipe.optimizer in _FORMS
            and not recipe.offload_activations
            and set(recipe.checkpoint) <= set(self.blocks)
            and (request.slices == 1 or request.sliced_by == "loop")
        )

    def _refuse(self, group: TraceRequest, why: str) -> None:
        self._why_not[group] = why
        _log.info("%s is traced for each option: %s", group, why)

    @staticmethod
    def _plain(request: TraceRequest) -> TraceRequest:
        """The same without what is composed."""
        return replace(request, recipe=request.recipe.with_(checkpoint=(), optimizer="as-written"))

    def _compose(self, request: TraceRequest) -> Timeline:
        if request.slices > 1 and self._cuts:
            try:
                return in_micro_batches(self._of_blocks(replace(request, slices=1)))
            except CannotComposeError as error:
                self._cuts = False
                _log.info("micro-batches are traced: %s", error)
        return self._of_blocks(request)

    def _of_blocks(self, request: TraceRequest) -> Timeline:
        """The timeline with the blocks that are checkpointed, and the form of the optimizer."""
        plain, checkpoint = self._plain(request), frozenset(request.recipe.checkpoint)
        if not checkpoint:
            timeline = self._based_on(plain)
        elif checkpoint == set(self.blocks or ()):
            timeline = self._based_on(self._every(plain))
        else:
            if plain not in self._mixtures:
                none, every = self._based_on(plain), self._based_on(self._every(plain))
                self._mixtures[plain] = BlockMixture(none, every, self.blocks or ())
            timeline = self._mixtures[plain].of(checkpoint)
        if request.recipe.optimizer != "as-written":
            return with_optimizer_of(timeline, self._optimizer(request))
        return timeline

    def _every(self, plain: TraceRequest) -> TraceRequest:
        return replace(plain, recipe=plain.recipe.with_(checkpoint=tuple(sorted(self.blocks or ()))))

    def _based_on(self, request: TraceRequest) -> Timeline:
        timeline = self._base(request)
        if timeline.retrace is not None:
            raise CannotComposeError("the sequence differs between batch sizes")
        return timeline

    def _optimizer(self, request: TraceRequest) -> Timeline:
        """A timeline with the form of the optimizer that is asked for; of the weights alone where one GPU has them."""
        changed = replace(request, recipe=request.recipe.with_(checkpoint=()))
        if self._source.topology is None and not changed.recipe.parameters_on_host:
            changed = replace(changed, part="weights")
        return self._base(changed)
