"""Timelines of one source under every option that is asked for: composed where that can be, else each traced once."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from vram_guard.compose import CannotComposeError, first_steps, of_every_size
from vram_guard.language import _
from vram_guard.plan._ahead import Ahead
from vram_guard.plan._composed import Composer, Treatable
from vram_guard.plan.descriptions import recipe_words
from vram_guard.plan.techniques import resident_batch, splits_of
from vram_guard.techniques.recipe import AS_WRITTEN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from vram_guard.budget import Budget
    from vram_guard.plan._option import Option
    from vram_guard.plan.source import Part, Source, TraceRequest
    from vram_guard.timeline import Timeline

_log = logging.getLogger(__name__)

#: Samples of a batch whose tensors are rarely as large as a weight: few dimensions are multiples of it.
_UNLIKE_WEIGHTS = 11

#: Sizes that a law with its check is traced at.
_LAW_SIZES = 3


class Traces:
    """Timelines for a search, see :class:`vram_guard.plan.search_space.Timelines`.

    Args:
        source: what is traced.
        batch_size: samples that the loader delivers at once; the law of the step as written is checked there.
        progress: called with a line of text before each trace.
        budget: of the GPU that is meant; None: unknown.
    """

    def __init__(
        self,
        source: Source,
        batch_size: int,
        progress: Callable[[str], None],
        budget: Budget | None = None,
    ) -> None:
        self.source = source
        self._batch_size = batch_size
        self._progress = progress
        self._card = (None, None) if budget is None else (budget.multiprocessors, budget.placement)
        # Of a step over several GPUs a rank has few sizes: no more traces than the law takes.
        sizes = 1 + sum(1 for _splits in splits_of(batch_size))
        self._directly = source.one_size or (source.topology is not None and sizes <= _LAW_SIZES)
        self._ahead = Ahead(may_copy=source.forks)
        self.forget()

    def forget(self) -> None:
        """Let go of all timelines: those of a plan may be asked for other sizes, and so lead here.

        What they are asked for afterwards is traced anew.
        """
        from vram_guard.simulate import each_once

        self._traced: dict[TraceRequest, Timeline] = {}
        self._exact: dict[TraceRequest, Timeline] = {}
        self._least: dict[TraceRequest, int] = {}
        self._few_are_alike = False
        """True if the step as written does with few of its equal blocks what it does with all."""
        self._follows: dict[TraceRequest, bool] = {}
        """Steps of fewer samples than laws are traced at, without changes -> whether these hold there."""
        self._compose = Composer(self.source, self._base)
        self._followed = each_once(self._follow)

    def compose_with(self, checkpoint: Iterable[str], offload: Iterable[str]) -> None:
        """From now on timelines may be composed; options checkpoint some of these blocks, and offload some of those."""
        self._compose.blocks = Treatable(frozenset(checkpoint), frozenset(offload))

    def __call__(self, option: Option) -> Timeline:
        """The option's timeline, over the micro-batch size."""
        if self._directly or option.recipe.slices is not None:  # a law would need batches of as many slices
            return self.exact(option, self._batch_size // option.splits)
        request = self._request(option)
        return self._resident(self._compose(request) or self._law(request), option)

    def exact(self, option: Option, size: int) -> Timeline:
        """The option's timeline for the micro-batch size that will run: composed, or traced there."""
        if option.recipe.slices is not None:
            return self.direct(option, size)
        composed = self._composed(option, size)
        return self._resident(self._confirmed(self._request(option, size)) if composed is None else composed, option)

    def least(self, option: Option, size: int) -> int:
        """The peak of the first step with few of the blocks, where all others lie in host memory until they run.

        Of such steps a few blocks take nearly as much as all of them, and all of them no less: what few allocate, all
        do. Not known of what has been traced, or needs no trace; nor where the step as written does with few blocks
        other things than with all.
        """
        shallow = self.source.shallow if self._few_are_alike and option.recipe.parameters_on_host else None
        if shallow is None or self.known(option, size):
            return 0
        request = replace(self._request(option, size), slices=1, part="first")
        if request not in self._least:
            timeline = self._tried(shallow, request)
            followed = timeline is not None and timeline.tier != "formula"
            self._least[request] = timeline.on(*self._card).at(size).peak_allocated if timeline and followed else 0
        return self._least[request]

    def composed(self, option: Option, size: int) -> bool:
        """True if the option has been composed, and not traced at this size."""
        request = self._request(option, size)
        return request not in self._exact and self._compose.made(self._composable(request))

    def known(self, option: Option, size: int) -> bool:
        """True if the option has been traced at this size, or all that it is composed of has been traced."""
        request = self._request(option, size)
        if request in self._exact:
            return True
        single = self._single(request)
        return (single is None or single in self._follows) and self._compose.known(self._composable(request), self._has)

    def treats_equal_blocks(self, option: Option) -> bool:
        """True if the blocks that the option treats are equal to others of their list."""
        treated = (*option.recipe.checkpoint, *option.recipe.offload_activations)
        return {name.rpartition(".")[0] for name in treated}.issubset(self.source.stacks)

    def distrust(self, option: Option) -> None:
        """What the option was composed of is not what it is made of: from now on it is traced, and others like it."""
        request = self._request(option, self._batch_size // option.splits)
        self._compose.refuse(self._composable(request), "a direct trace says otherwise")

    def direct(self, option: Option, size: int) -> Timeline:
        """The option's timeline after a direct trace at the micro-batch size that will run.

        By the law where there is one and the direct trace confirms it; else the direct trace, which traces every other
        size that it is asked for.
        """
        return self._resident(self._confirmed(self._request(option, size)), option)

    def begin(self, option: Option, size: int) -> None:
        """The option's direct trace will be asked for: begin it beside others, where that helps."""
        self._begin(self._request(option, size))

    def end(self) -> None:
        """End what has been begun and is not needed."""
        self._ahead.end()

    def _request(self, option: Option, size: int = 0) -> TraceRequest:
        """The request that has to be traced for an option."""
        recipe = option.unordered.recipe.with_(expandable_segments=False)  # no matter of what is allocated
        return self.source.request(option.precision, option.splits, recipe, size)

    def _composed(self, option: Option, size: int) -> Timeline | None:
        request = self._request(option, size)
        single = self._single(request)
        if single is not None and single not in self._follows:
            self._follows[single] = self._follows_law(single)
        return self._compose(self._composable(request))

    def _composable(self, request: TraceRequest) -> TraceRequest:
        """The request as it is composed: for every size, unless each is traced by itself, or no other is composed."""
        single = self._single(request)
        one_size = self._at_one_size(request) or (single is not None and not self._follows.get(single, True))
        return request if one_size else replace(request, batch_size=0)

    def _at_one_size(self, request: TraceRequest) -> bool:
        """True if each size is traced by itself, or no other is composed."""
        return self._directly or (request.slices == 1 and not self._compose.cuts(request.recipe))

    def _follows_law(self, single: TraceRequest) -> bool:
        """True if the law holds for a step of fewer samples than it was traced at: a trace of it shows that.

        Of a single sample more tensors are contiguous than of several: copies of them are left out.
        """
        law = self._law(replace(single, batch_size=0))
        try:
            return law.retrace is not None or self._confirmed(single) is law
        except Exception:  # noqa: BLE001 - the user's code may refuse so few samples; options of them are traced then
            return False

    def _single(self, request: TraceRequest) -> TraceRequest | None:
        """The step without changes at the request's size; None where that is no smaller than what laws are traced at.

        Also where the request is composed of no laws.
        """
        from vram_guard.simulate import TRACED_SIZES

        if self._at_one_size(request) or not 0 < request.batch_size < TRACED_SIZES[0]:
            return None
        return self.source.request(request.precision, 1, AS_WRITTEN, request.batch_size)

    def _has(self, request: TraceRequest) -> bool:
        """True if :meth:`_base` has traced this already."""
        return request in (self._exact if request.batch_size else self._traced)

    def _base(self, request: TraceRequest) -> Timeline:
        """What others are composed of: a law, or where no law is needed a trace."""
        if request.batch_size:
            return replace(self._confirmed(request), retrace=None)
        return self._law(request)

    def _law(self, request: TraceRequest) -> Timeline:
        if request not in self._traced:
            self._progress(_("tracing {words}", words=_words(request)))
            try:
                self._traced[request] = self._law_of_part(request) or self._law_of_whole(request)
            finally:
                self._ahead.end()
        return self._traced[request]

    def _is_written(self, request: TraceRequest) -> bool:
        return request.precision == self.source.precision and request.slices == 1 and not request.recipe

    def _law_of_whole(self, request: TraceRequest) -> Timeline:
        """The law of a step that is followed to its end at two sizes."""
        from vram_guard.simulate import TRACED_SIZES, law

        source, written = self.source, self._is_written(request)
        # The law is checked where it is used: here for the step as written, for others once they are chosen.
        first = self._at(replace(request, part="first")) if source.marks and source.trains else None
        follow, (small, large) = self._at(request), TRACED_SIZES

        def run(size: int) -> Timeline:
            if size == small:
                self._begin(replace(request, batch_size=large))
            elif size == large and written and first is not None:
                self._begin(replace(request, part="first", batch_size=self._batch_size))
            return follow(size)

        return law(run, check_at=self._batch_size, checked=written, first=first)

    def _law_of_part(self, request: TraceRequest) -> Timeline | None:
        """The law of a step that is followed to its end at one size, and of which a part is followed at others.

        None where no part says how the whole grows with the batch.
        """
        source = self.source
        if not (source.marks and source.trains) or source.topology is not None or source.ranks > 1:
            return None
        of_part = self._law_of_few_blocks if source.shallow else self._law_of_first_step
        return self._tried(self._law_like_untreated, request) or self._tried(of_part, request)

    def _tried(self, way: Callable[[TraceRequest], Timeline | None], request: TraceRequest) -> Timeline | None:
        try:
            return way(request)
        except Exception as error:  # noqa: BLE001 - the user's code runs here; where it fails as a whole, it says so
            _log.info("%s: %s: %s", request, type(error).__name__, error)
            return None

    def _law_like_untreated(self, request: TraceRequest) -> Timeline | None:
        """What a step allocates under techniques grows with the batch as without them, as far as sizes tell.

        FSDP2 gathers weights of its own: such a step grows as one without other techniques that gathers them too. Its
        work is left out: nothing asks for that before the option is traced directly.
        """
        untreated = AS_WRITTEN.with_(parameters_on_host=request.recipe.parameters_on_host)
        slices = 1 if self._compose.cuts(request.recipe) else request.slices
        part: Part = "first" if untreated.parameters_on_host else "whole"
        known = self._traced.get(replace(request, recipe=untreated, slices=slices, part=part))
        if known is None or known.retrace is not None or request.recipe == untreated:
            return None
        whole = self._at(request)(_UNLIKE_WEIGHTS)
        return of_every_size(replace(whole, work=()), replace(known, work=()))

    def _law_of_few_blocks(self, request: TraceRequest) -> Timeline | None:
        """Three blocks of each kind show how the others grow with the batch; a trace of all shows their order."""
        from vram_guard.simulate import TRACED_SIZES, holds_at, size_of_check

        shallow, size = self.source.shallow, self._size_of_whole(request)
        assert shallow is not None
        if request.part == "first":  # of which others are composed; what is taken is traced at its own size
            size = _UNLIKE_WEIGHTS
        low, high = (shallow(replace(request, batch_size=each)) for each in TRACED_SIZES)
        part = _merged(low, high)
        # The law is checked where it is used: here for the step as written, for others once they are chosen.
        check = size_of_check(self._batch_size)
        if self._is_written(request) and not holds_at(shallow(replace(request, batch_size=check)), part, check):
            return None
        found = of_every_size(self._at(request)(size), part, self.source.stacks)
        self._few_are_alike = self._few_are_alike or self._is_written(request)
        return found

    def _law_of_first_step(self, request: TraceRequest) -> Timeline | None:
        """The second step grows with the batch as the first one does."""
        from vram_guard.simulate import TRACED_SIZES, begins_at, size_of_check

        if request.part != "whole":
            return None
        (small, large), first, size = TRACED_SIZES, replace(request, part="first"), self._size_of_whole(request)
        written = self._is_written(request)
        if written or size <= large:
            size = small
        self._begin(replace(first, batch_size=large))
        whole = self._at(request)(size)
        found = of_every_size(whole, _merged(*first_steps(whole, self._at(first)(large))))
        # As above.
        check = size_of_check(self._batch_size)
        return None if written and not begins_at(self._at(first)(check), found, check) else found

    def _size_of_whole(self, request: TraceRequest) -> int:
        """Samples of the largest micro-batch; two at least, as of a single one more tensors are contiguous."""
        from vram_guard.simulate import TRACED_SIZES

        return max(self._batch_size // request.slices, TRACED_SIZES[0])

    def _at(self, request: TraceRequest) -> Callable[[int], Timeline]:
        return lambda size: self._followed(replace(request, batch_size=size))

    def _begin(self, request: TraceRequest) -> None:
        self._ahead.begin(request, self._trace(request))

    def _follow(self, request: TraceRequest) -> Timeline:
        return self._ahead.made(request, self._trace(request))

    def _trace(self, request: TraceRequest) -> Callable[[], Timeline]:
        return lambda: self.source.trace(request).on(*self._card)

    def _confirmed(self, request: TraceRequest) -> Timeline:
        from vram_guard.simulate import holds_at, traced_at

        if request in self._exact:
            return self._exact[request]
        size = request.batch_size
        known = self._traced.get(replace(request, batch_size=0))
        suffices = known is not None and (known.retrace is not None or (size in known.traced and known.work))
        if known is None or not suffices:
            self._progress(_("tracing {words}", words=_words(request)))
            direct = traced_at(self._at(request), size)
            known = _with_work(known, direct) if known is not None and holds_at(direct, known, size) else direct
        self._exact[request] = known
        return known

    def _resident(self, timeline: Timeline, option: Option) -> Timeline:
        """The timeline with the whole of a loaded batch on the device, where the loop cuts it."""
        if option.splits == 1:
            return timeline
        return resident_batch(timeline, traced=2, resident=option.splits * self.source.batch_slices)


def _with_work(law: Timeline, direct: Timeline) -> Timeline:
    """The law, whose work is that of a direct trace where it has none of its own."""
    return law if law.work else replace(law, work=direct.work, traced=direct.traced)


def _merged(low: Timeline, high: Timeline) -> Timeline:
    """The law of a part from traces of it at two sizes."""
    from vram_guard.simulate import law_of_two

    merged = law_of_two(*sorted((low, high), key=lambda timeline: timeline.traced))
    if merged is None:
        raise CannotComposeError("the sequence differs between batch sizes, or sizes depend on values")
    return merged


def _words(request: TraceRequest) -> str:
    size = [_("batch {count}", count=request.batch_size)] if request.batch_size else []
    micro_batches = [_("in micro-batches")] if request.slices > 1 else []
    return _(", ").join([request.precision, *size, *micro_batches, *recipe_words(request.recipe)])
