"""Timelines of one step under every option that is asked for, each traced once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vram_guard.language import _
from vram_guard.plan.descriptions import recipe_words
from vram_guard.plan.search_space import Option
from vram_guard.plan.space import Parts
from vram_guard.plan.techniques import resident_batch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch

    from vram_guard.plan.cost_model import Costing
    from vram_guard.step import TrainingStep
    from vram_guard.techniques.recipe import Recipe
    from vram_guard.timeline import Timeline

    _Key = tuple[str, int, Recipe]
    """Precision, micro-batches of a loaded batch, techniques."""


class Traces:
    """The source of timelines for a search. Built models are shared by all traces."""

    def __init__(
        self, step: TrainingStep, batch_size: int, capability: tuple[int, int], progress: Callable[[str], None]
    ) -> None:
        self._step = step
        self._batch_size = batch_size
        self._capability = capability
        self._progress = progress
        self._traced: dict[_Key, Timeline] = {}
        self._exact: dict[tuple[_Key, int], Timeline] = {}
        self._built: TrainingStep | None = None

    @property
    def step(self) -> TrainingStep:
        """The step as written, its model built (symbolically, where it is a constructor)."""
        if self._built is None:
            from vram_guard.simulate.tracing.run import with_built_model

            self._built = with_built_model(self._step, self._capability)
        return self._built

    @property
    def model(self) -> torch.nn.Module:
        """The step's model."""
        return self.step.model  # type: ignore[return-value]

    def as_written(self) -> Timeline:
        """The step without any change, its law checked at the batch size that was asked for."""
        return self(Option(self._step.precision, 1))

    def __call__(self, option: Option) -> Timeline:
        """The option's timeline, over the micro-batch size."""
        return self._resident(self._trace(self._key(option)), option)

    def _key(self, option: Option) -> _Key:
        """What of an option needs a trace of its own.

        A runner runs every number of slices, else two tell of all. In which order blocks were chosen does not matter.
        """
        slices = option.splits if self._step.runner is not None else min(option.splits, 2)
        recipe = option.recipe.with_(
            checkpoint=tuple(sorted(option.recipe.checkpoint)),
            offload_activations=tuple(sorted(option.recipe.offload_activations)),
        )
        return option.precision, slices, recipe

    def exact(self, option: Option, size: int) -> Timeline:
        """The option's timeline after a direct trace at the micro-batch size that will run.

        By the law where there is one and the direct trace confirms it; else the direct trace, which traces every other
        size that it is asked for.
        """
        key = self._key(option)
        if (key, size) not in self._exact:
            self._exact[key, size] = self._at(option, size)
        timeline = self._exact[key, size]
        return self._resident(timeline, option)

    def _at(self, option: Option, size: int) -> Timeline:
        from vram_guard.simulate import holds_at, trace_at

        known = self._traced.get(self._key(option))
        if known is not None and (size in known.traced or known.retrace is not None):
            return known
        self._progress(_("tracing {words}", words=option.words(option.splits * size)))
        direct = trace_at(self._changed(self._key(option)), size, compute_capability=self._capability)
        return known if known is not None and holds_at(direct, known, size) else direct

    def _resident(self, timeline: Timeline, option: Option) -> Timeline:
        if option.splits == 1 or self._step.runner is not None:
            return timeline
        # A step that already cuts its loaded batch into slices gets each slice cut again.
        slices = self._step.accumulate if self._step.whole_batch else 1
        return resident_batch(timeline, traced=2, resident=option.splits * slices)

    def _trace(self, key: _Key) -> Timeline:
        from vram_guard.simulate import trace

        if key not in self._traced:
            precision, slices, recipe = key
            written = precision == self._step.precision and slices == 1 and not recipe
            how = [precision, *(["in micro-batches"] if slices > 1 else []), *recipe_words(recipe)]
            self._progress(f"tracing {', '.join(how)}")
            # The law is checked where it is used: here for the step as written, for others once they are chosen.
            self._traced[key] = trace(
                self._changed(key),
                compute_capability=self._capability,
                check_at=self._batch_size,
                checked=written,
            )
        return self._traced[key]

    def _changed(self, key: _Key) -> TrainingStep:
        precision, slices, recipe = key
        changes: dict[str, Any] = {"accumulate": 2, "whole_batch": True} if slices > 1 else {}
        if self._step.runner is not None:
            changes = {"slices": slices}
        return self.step.with_(precision=precision, recipe=recipe, **changes)

    def parts(self, costing: Costing, blocks: Iterable[str] | None) -> Parts:
        """What the model offers to the techniques.

        Args:
            costing: prices of this step.
            blocks: the modules that may be treated; None: the repeated ones.

        Raises:
            InvalidInputError: ``blocks`` names modules that the model does not have.
        """
        from vram_guard.techniques.blocks import find_blocks, named_blocks
        from vram_guard.techniques.frozen import frozen_candidates

        found = find_blocks(self.model) if blocks is None else named_blocks(self.model, blocks)
        names = tuple(block.name for block in found)
        saved, recompute, offload = costing.of_blocks(names)
        frozen = sorted(frozen_candidates(self.model), key=self._bytes_of, reverse=True)
        return Parts(names, saved, recompute, offload, tuple(frozen))

    def _bytes_of(self, name: str) -> int:
        return sum(p.numel() * p.element_size() for p in self.model.get_submodule(name).parameters())
