"""Timelines of one source under every option that is asked for, each traced once."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from vram_guard.language import _
from vram_guard.plan.descriptions import recipe_words
from vram_guard.plan.techniques import resident_batch, splits_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from vram_guard.plan._option import Option
    from vram_guard.plan.source import Source, TraceRequest
    from vram_guard.timeline import Timeline


#: Sizes that a law with its check is traced at.
_LAW_SIZES = 3


class Traces:
    """Timelines for a search, see :class:`vram_guard.plan.search_space.Timelines`.

    Args:
        source: what is traced.
        batch_size: samples that the loader delivers at once; the law of the step as written is checked there.
        progress: called with a line of text before each trace.
        multiprocessors: of the GPU that is meant; None: unknown.
    """

    def __init__(
        self,
        source: Source,
        batch_size: int,
        progress: Callable[[str], None],
        multiprocessors: int | None = None,
    ) -> None:
        self.source = source
        self._batch_size = batch_size
        self._progress = progress
        self._multiprocessors = multiprocessors
        # Of a step over several GPUs a rank has few sizes: no more traces than the law takes.
        sizes = 1 + sum(1 for _splits in splits_of(batch_size))
        self._directly = source.topology is not None and sizes <= _LAW_SIZES
        self._traced: dict[TraceRequest, Timeline] = {}
        self._exact: dict[TraceRequest, Timeline] = {}

    def __call__(self, option: Option) -> Timeline:
        """The option's timeline, over the micro-batch size."""
        from vram_guard.simulate import law

        if self._directly:
            return self.exact(option, self._batch_size // option.splits)
        request = self._request(option)
        if request not in self._traced:
            source = self.source
            written = request.precision == source.precision and request.slices == 1 and not request.recipe
            micro_batches = [_("in micro-batches")] if request.slices > 1 else []
            words = ", ".join([request.precision, *micro_batches, *recipe_words(request.recipe)])
            self._progress(_("tracing {words}", words=words))
            # The law is checked where it is used: here for the step as written, for others once they are chosen.
            self._traced[request] = law(self._at(request), check_at=self._batch_size, checked=written)
        return self._resident(self._traced[request], option)

    def exact(self, option: Option, size: int) -> Timeline:
        """The option's timeline after a direct trace at the micro-batch size that will run.

        By the law where there is one and the direct trace confirms it; else the direct trace, which traces every other
        size that it is asked for.
        """
        request = self._request(option, size)
        if request not in self._exact:
            self._exact[request] = self._confirmed(request, option)
        return self._resident(self._exact[request], option)

    def _request(self, option: Option, size: int = 0) -> TraceRequest:
        """The request that has to be traced for an option."""
        return self.source.request(option.precision, option.splits, option.unordered.recipe, size)

    def _at(self, request: TraceRequest) -> Callable[[int], Timeline]:
        return lambda size: self.source.trace(replace(request, batch_size=size)).on(self._multiprocessors)

    def _confirmed(self, request: TraceRequest, option: Option) -> Timeline:
        from vram_guard.simulate import holds_at, traced_at

        size = request.batch_size
        known = self._traced.get(replace(request, batch_size=0))
        if known is not None and (size in known.traced or known.retrace is not None):
            return known
        self._progress(_("tracing {words}", words=option.words(option.splits * size)))
        direct = traced_at(self._at(request), size)
        return known if known is not None and holds_at(direct, known, size) else direct

    def _resident(self, timeline: Timeline, option: Option) -> Timeline:
        """The timeline with the whole of a loaded batch on the device, where the loop cuts it."""
        if option.splits == 1 or self.source.sliced_by != "loop":
            return timeline
        return resident_batch(timeline, traced=2, resident=option.splits * self.source.batch_slices)
