"""Timelines of options that need no trace of their own, because they are composed of those of others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from vram_guard.compose import (
    BlockMixture,
    CannotComposeError,
    in_micro_batches,
    repeated,
    with_frozen_on_host,
    with_optimizer_of,
)
from vram_guard.plan._parameters import blocks_of_parameters
from vram_guard.plan.source import Source, TraceRequest
from vram_guard.plan.step_time import ancestors
from vram_guard.techniques.recipe import AS_WRITTEN, Recipe
from vram_guard.timeline import Timeline

_log = logging.getLogger(__name__)

#: Forms of the optimizer that are composed. The others have kernels of their own, or states of another size.
_FORMS = ("as-written", "for-loop")

#: Fields of a recipe that treat no block, as they are where nothing is changed.
_UNCHANGED: dict[str, Any] = {"optimizer": "as-written", "optimizer_on_host": False, "frozen_on_host": ()}

#: Samples where any number would do, because none of the batch matters to the optimizer.
_ANY_SIZE = 2


#: True where the blocks that are not checkpointed are offloaded; and a request with every block treated.
_Group = tuple[bool, TraceRequest]


class Treatable(NamedTuple):
    """The blocks that options treat."""

    checkpoint: frozenset[str] = frozenset()
    offload: frozenset[str] = frozenset()


class Composer:
    """Composes the timeline of a request; what it is composed of is asked for as requests as well.

    Args:
        source: of the step.
        base: request -> its timeline, traced.
    """

    def __init__(self, source: Source, base: Callable[[TraceRequest], Timeline]) -> None:
        self._source = source
        self._base = base
        self.blocks: Treatable | None = None
        """Nothing is composed before they are known."""
        self._mixtures: dict[tuple[TraceRequest, TraceRequest], BlockMixture] = {}
        self._divided = source.topology is not None or source.ranks > 1
        self._cuts = source.accumulate == 1 and not self._divided
        """False where a trace of one micro-batch does not show what two do: layouts add up gradients by themselves."""
        self._refused: set[_Group] = set()
        self._traces_frozen = False
        """True: steps with frozen modules on the host are traced, because what was composed of others was wrong."""
        self._made: dict[TraceRequest, Timeline] = {}

    def __call__(self, request: TraceRequest) -> Timeline | None:
        """The timeline; None where it has to be traced."""
        if self.blocks is None or not self._composes(request, self.blocks):
            return None
        if self._is_refused(request, self.blocks):
            return None
        if request not in self._made:
            try:
                self._made[request] = self._compose(request, self.blocks)
            except CannotComposeError as error:
                self.refuse(request, str(error))
                return None
            except Exception as error:  # noqa: BLE001 - the user's code runs here; with fewer blocks it may not fail
                self.refuse(request, f"{type(error).__name__}: {error}")
                return None
        return self._made[request]

    def made(self, request: TraceRequest) -> bool:
        """True if the timeline has been composed already, and is believed."""
        return request in self._made and self.blocks is not None and not self._is_refused(request, self.blocks)

    def known(self, request: TraceRequest, has: Callable[[TraceRequest], bool]) -> bool:
        """True if the timeline can be composed of what has been traced."""
        if self.blocks is None or not self._composes(request, self.blocks):
            return False
        whole = replace(request, slices=1) if self._cut(request) else request
        none, every = bases = self._bases(whole, self.blocks)
        alone = none == every or (self._alone(every) and _treated(request.recipe) == _treated(every.recipe))
        if self._is_refused(request, self.blocks) or not has(self._on_gpu(_part(every if alone else none))):
            return False
        blocks = alone or bases in self._mixtures
        return blocks and (not _other_optimizer(request.recipe) or has(self._optimizer(whole)))

    def refuse(self, request: TraceRequest, why: str) -> None:
        """From now on the request is traced, and so are those that were composed of the same timelines.

        Where nothing but blocks is treated, that includes those with another optimizer or frozen modules on the host.
        Of those with frozen modules on the host at first only what is composed is traced.
        """
        if self._on_gpu(request) != request:
            self._traces_frozen = True
            self._forget_frozen()
            _log.info("frozen modules on the host are traced: %s", why)
        elif self.blocks is not None:
            group = self._group(request, self.blocks)
            self._refused.add(group)
            _log.info("%s: each option is traced: %s", group, why)

    def _forget_frozen(self) -> None:
        self._made = {request: made for request, made in self._made.items() if not request.recipe.frozen_on_host}
        self._mixtures = {
            bases: mixture for bases, mixture in self._mixtures.items() if not bases[0].recipe.frozen_on_host
        }

    @staticmethod
    def cuts(recipe: Recipe) -> bool:
        """True if micro-batches may be composed of a whole batch: FSDP2 adds up gradients on the host by itself."""
        return not recipe.parameters_on_host

    def _composes(self, request: TraceRequest, blocks: Treatable) -> bool:
        recipe = request.recipe
        if not self._source.marks or recipe.optimizer not in _FORMS:
            return False
        if recipe.slices is not None:
            return False
        if recipe.optimizer_in_backward or recipe.chunked_head:
            return False  # gradients die within the backward pass, and the loss is no part of a block
        checkpointed, offloaded = frozenset(recipe.checkpoint), frozenset(recipe.offload_activations)
        if checkpointed and offloaded:
            return checkpointed | offloaded == blocks.checkpoint
        return checkpointed <= blocks.checkpoint and offloaded <= blocks.offload

    def _is_refused(self, request: TraceRequest, blocks: Treatable) -> bool:
        of_blocks = self._group(replace(request, recipe=request.recipe.with_(**_UNCHANGED)), blocks)
        return not self._refused.isdisjoint((of_blocks, self._group(request, blocks)))

    def _group(self, request: TraceRequest, blocks: Treatable) -> _Group:
        """What the requests that are composed of the same timelines have in common."""
        none, every = self._bases(request, blocks)
        own = {name: getattr(request.recipe, name) for name in _UNCHANGED}
        return bool(none.recipe.offload_activations), replace(every, recipe=every.recipe.with_(**own))

    def _bases(self, request: TraceRequest, blocks: Treatable) -> tuple[TraceRequest, TraceRequest]:
        """The two ends of a mixture of blocks, with the optimizer as written: no block treated, and every one.

        Where some are checkpointed and all others offloaded: every one offloaded, and every one checkpointed.
        """

        def every(*, checkpoint: frozenset[str] = frozenset(), offload: frozenset[str] = frozenset()) -> TraceRequest:
            treated = {
                "checkpoint": tuple(sorted(checkpoint)),
                "offload_activations": tuple(sorted(offload)),
                "checkpoint_keeps": request.recipe.checkpoint_keeps,  # none without a checkpointed block
            }
            recipe = request.recipe.with_(optimizer="as-written", optimizer_on_host=False, **treated)
            return replace(request, recipe=recipe)

        recipe = request.recipe
        none, treated = every(), every(checkpoint=blocks.checkpoint)
        if not recipe.checkpoint:
            return none, every(offload=blocks.offload) if recipe.offload_activations else none
        if recipe.offload_activations:
            none = every(offload=blocks.checkpoint)
        if self._first_suffices(request) and not _overlap(recipe.frozen_on_host, blocks.checkpoint):
            # Nothing but checkpointed blocks is taken of it.
            treated = replace(treated, recipe=treated.recipe.with_(frozen_on_host=()))
        return none, treated

    def _compose(self, request: TraceRequest, blocks: Treatable) -> Timeline:
        if self._cut(request):
            whole = self._whole(replace(request, slices=1), blocks)
            return in_micro_batches(whole, request.recipe.checkpoint)
        return self._whole(request, blocks)

    def _cut(self, request: TraceRequest) -> bool:
        return request.slices > 1 and self._cuts and self.cuts(request.recipe)

    def _whole(self, request: TraceRequest, blocks: Treatable) -> Timeline:
        """The timeline with its blocks and the form of its optimizer."""
        timeline = self._of_blocks(request, blocks)
        if _other_optimizer(request.recipe):
            other = self._base(self._optimizer(request))
            return with_optimizer_of(timeline, other, on_host=request.recipe.optimizer_on_host)
        return timeline

    def _of_blocks(self, request: TraceRequest, blocks: Treatable) -> Timeline:
        bases = none, every = self._bases(request, blocks)
        treated = _treated(request.recipe)
        if none == every:
            return self._steps(none)
        if bases not in self._mixtures:
            first = bool(every.recipe.checkpoint) and self._first_suffices(none)
            if treated == _treated(every.recipe) and (not first or self._alone(every)):
                return self._steps(every)
            untreated = self._steps(none)  # first: others grow with the batch as it does
            other = self._law(replace(every, part="first")) if first else self._steps(every)
            units, moved = blocks.checkpoint | blocks.offload, bool(none.recipe.offload_activations)
            self._mixtures[bases] = BlockMixture(untreated, other, units, moved=moved)
        return self._mixtures[bases].of(treated)

    def _first_suffices(self, request: TraceRequest) -> bool:
        """True if one step with every block checkpointed is enough, beside two with none.

        That is where both steps with none are traced anyhow, or where blocks come to the GPU one by one: few of such
        models need no block checkpointed. By a law in the depth of the model both steps cost little, and a mixture of
        other blocks needs them.
        """
        treated: dict[str, Any] = {"checkpoint": (), "checkpoint_keeps": (), "offload_activations": ()}
        return request.recipe.with_(**_UNCHANGED, **treated, parameters_on_host=()) == AS_WRITTEN

    def _alone(self, every: TraceRequest) -> bool:
        """True if a step with every block treated needs no other trace: few blocks say how it grows with the batch."""
        return self._source.shallow is not None and _part(every) != every

    def _steps(self, request: TraceRequest) -> Timeline:
        """Both optimizer steps, of which one may be traced."""
        part = _part(request)
        return self._law(request) if part == request else repeated(self._law(part))

    def _law(self, request: TraceRequest) -> Timeline:
        traced = self._on_gpu(request)
        timeline = self._base(traced)
        if timeline.retrace is not None:
            raise CannotComposeError("the sequence differs between batch sizes")
        if traced == request:
            return timeline
        waiting = blocks_of_parameters(self._source.model, request.recipe.frozen_on_host, timeline)
        return with_frozen_on_host(timeline, waiting)

    def _on_gpu(self, request: TraceRequest) -> TraceRequest:
        """The request that is traced: without frozen modules on the host, where those are composed."""
        if self._traces_frozen or request.recipe.parameters_on_host:
            return request
        return replace(request, recipe=request.recipe.with_(frozen_on_host=()))

    def _optimizer(self, request: TraceRequest) -> TraceRequest:
        """A step with the same form of the optimizer; of the weights alone where one GPU has all of them.

        Of a layout one step stands for those of every size, in micro-batches or not: its optimizer sees the rank's part
        of weights and gradients alone.
        """
        untreated = request.recipe.with_(checkpoint=(), checkpoint_keeps=(), offload_activations=())
        plain = replace(request, recipe=untreated)
        if plain.recipe.parameters_on_host or plain.recipe.sharding is not None:
            return plain
        one = replace(plain, recipe=untreated.with_(frozen_on_host=()), batch_size=_ANY_SIZE, slices=1)
        return one if self._divided else replace(one, part="weights")


def _part(request: TraceRequest) -> TraceRequest:
    """What is traced for both steps: the first where the optimizer steps on the host, as the GPU sees two alike."""
    return replace(request, part="first") if request.recipe.parameters_on_host else request


def _treated(recipe: Recipe) -> frozenset[str]:
    """The blocks that are taken of the trace with every block treated."""
    return frozenset(recipe.checkpoint or recipe.offload_activations)


def _other_optimizer(recipe: Recipe) -> bool:
    """True if the optimizer's step is that of another trace."""
    return recipe.optimizer != "as-written" or recipe.optimizer_on_host


def _overlap(some: Iterable[str], others: Iterable[str]) -> bool:
    """True if a module of the one lies within one of the other, or is the same."""
    named, within = {*some}, {*others}
    return not (
        named.isdisjoint(outer for name in within for outer in ancestors(name))
        and within.isdisjoint(outer for name in named for outer in ancestors(name))
    )
