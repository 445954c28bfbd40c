"""Some blocks run another way (checkpointed), the others as written: composed from a trace of all and one of none."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from vram_guard.compose._alignment import aligned
from vram_guard.compose._errors import CannotComposeError
from vram_guard.compose._segments import Cut, Place
from vram_guard.compose._steps import repeated
from vram_guard.timeline import Block, Marks, Phase, Timeline

#: Added to a block's number where its gradient is stored or added up, and where a backward pass reads it: events have
#: smaller numbers.
_ACCUMULATED = 1 << 40
_READ = 1 << 41


class BlockMixture:
    """Timelines in which any of a model's blocks are treated.

    Each segment of a treated block comes from the one trace, all others from the other. Tensors that pass from one
    segment to another are in both: they are paired by their order, size, operator and stream. Where both traces free
    one, it lives until the last of these frees, and until the last backward pass that reads it.

    Args:
        plain: no block is treated so.
        treated: every block is; the first of its two steps suffices.
        units: the blocks.
        moved: in the plain trace blocks keep what they save on the host: of treated ones that is left out.

    Raises:
        CannotComposeError: the two traces have not the same segments, or other tensors between them.
    """

    def __init__(self, plain: Timeline, treated: Timeline, units: Collection[str], *, moved: bool = False) -> None:
        first = len(treated.phases) < len(plain.phases)
        if first:
            treated = repeated(treated)
        one, other = _cut(plain, units), _cut(treated, units)
        if [segment.key for segment in one.segments] != [segment.key for segment in other.segments]:
            raise CannotComposeError("the traces have other segments")
        if plain.tier != treated.tier:
            raise CannotComposeError("one trace is less certain than the other")
        self._timeline = plain
        self._segments = one.segments
        self._blocks = (*plain.blocks, *treated.blocks)
        pairs, offset = _pairs(one, other), len(plain.blocks)
        numbers = [list(range(offset)), [pairs.get(at, at + offset) for at in range(len(treated.blocks))]]
        self._runs = [list(_renumbered(cut, known)) for cut, known in zip((one, other), numbers, strict=True)]
        self._freed = [
            {known[block]: place for block, place in cut.freed.items()}
            for cut, known in zip((one, other), numbers, strict=True)
        ]
        # One step alone says nothing of what the other puts there: then all that the plain trace has counts.
        source = plain if moved or first else treated
        owners = (one if moved else other).on_host() if moved or not first else {}
        self._host = source.host_blocks, source.host_events, owners
        self._moved = moved

    def of(self, treated: Collection[str]) -> Timeline:
        """The timeline in which these blocks are treated. It has no work and no collectives."""
        chosen = [segment.unit in treated for segment in self._segments]
        runs = [self._runs[which][index] for index, which in enumerate(chosen)]
        made = self._matched(runs, chosen)
        events: list[int] = []
        phases: list[Phase] = []
        accumulated: list[tuple[int, int]] = []
        for segment, run in zip(self._segments, made, strict=True):
            if len(phases) == segment.phase:
                phases.append(self._timeline.phases[segment.phase]._replace(start=len(events)))
            for event in run:
                if event is None:
                    continue
                if event < _ACCUMULATED:
                    events.append(event)
                else:
                    accumulated.append((len(events), event - _ACCUMULATED))
        on_host, moves, owners = self._host
        return replace(
            self._timeline,
            host_blocks=on_host,
            host_events=tuple(
                event
                for event in moves
                if (unit := owners.get(event if event >= 0 else ~event)) is None or (unit in treated) != self._moved
            ),
            blocks=self._blocks,
            events=tuple(events),
            phases=tuple(phases),
            work=(),
            collectives=(),
            marks=Marks((), tuple(accumulated)),
        )

    def _matched(self, runs: Sequence[list[int]], chosen: Sequence[bool]) -> list[list[int | None]]:
        """The runs with one free for each block."""
        made: list[list[int | None]] = [list(run) for run in runs]
        allocated: dict[int, int] = {}
        freed: dict[int, tuple[list[int | None], int]] = {}
        read: dict[int, tuple[int, int]] = {}
        for index, run in enumerate(made):
            for at, event in enumerate(run):
                if event is None or _ACCUMULATED <= event < _READ:
                    continue
                if event >= _READ:
                    run[at] = None
                    read[event - _READ] = index, at
                    if event - _READ in freed:
                        earlier, since = freed.pop(event - _READ)
                        earlier[since] = None
                elif event >= 0:
                    allocated[event] = index
                elif ~event not in allocated:
                    run[at] = None  # a tensor that only the other way makes
                else:
                    if ~event in freed:
                        earlier, since = freed[~event]
                        earlier[since] = None
                    freed[~event] = run, at
        for block, index in allocated.items():
            if block in freed:
                continue
            place = self._place(block, chosen[index])
            if place is None:
                continue
            reader, at = read.get(block, (-1, 0))
            if place.segment <= reader:
                made[reader][at] = ~block
            else:
                self._free(block, place, made[place.segment])
        return made

    def _place(self, block: int, own: bool) -> Place | None:
        """Where the trace that a tensor comes from frees it; None where it never does.

        Where a block does that in its backward pass, which in the other way does not need the tensor: where the program
        lets it go there.
        """
        place, other = self._freed[own].get(block), self._freed[not own].get(block)
        if place is None or other is None:
            return place
        return other if self._segments[place.segment].unit and not self._segments[other.segment].unit else place

    def _free(self, block: int, place: Place, run: list[int | None]) -> None:
        """Free a tensor at a place of one trace, though that segment comes from the other one."""
        if self._segments[place.segment].unit:
            run.append(~block)
            return
        left = place.allocations
        for at, event in enumerate(run):
            if event is not None and 0 <= event < _ACCUMULATED:
                if not left:
                    run.insert(at, ~block)
                    return
                left -= 1
        run.append(~block)


def _cut(timeline: Timeline, units: Collection[str]) -> Cut:
    if timeline.marks is None or timeline.retrace is not None:
        raise CannotComposeError("a trace has no marks, or holds at one size alone")
    if timeline.deferred:
        raise CannotComposeError("frees wait for other streams")
    cut = Cut(timeline, timeline.marks, units)
    if not cut.called_once:
        raise CannotComposeError("a block is called more than once")
    return cut


def _pairs(plain: Cut, treated: Cut) -> Mapping[int, int]:
    """Block of the treated trace -> the same tensor in the plain one.

    A tensor that passes from a block to others in one trace alone (a cast that autocast keeps is saved for the block's
    own backward pass in the other) has none, nor has what a loop or an optimizer makes in its first step alone.
    """
    pairs: dict[int, int] = {}
    for index in range(len(plain.segments)):
        one, other = plain.crossing(index), treated.crossing(index)
        kinds = [_kind(plain, block) for block in one], [_kind(treated, block) for block in other]
        pairs.update((other[there], one[at]) for at, there in aligned(*kinds))
    return pairs


def _kind(cut: Cut, block: int) -> tuple[object, ...]:
    """What the same tensor has in both traces."""
    made: Block = cut.timeline.blocks[block]
    return made.size, made.operator, made.stream


def _renumbered(cut: Cut, numbers: Sequence[int]) -> Iterator[list[int]]:
    """The events of each segment, with the places where gradients are accumulated and where blocks are read."""
    marked = [(at, _ACCUMULATED + numbers[block]) for at, block in cut.accumulated]
    marked += ((at, _READ + numbers[block]) for at, block in cut.used)
    marks = iter(sorted(marked))
    following = next(marks, None)
    for segment in cut.segments:
        run: list[int] = []
        for at in range(segment.start, segment.end):
            event = cut.timeline.events[at]
            run.append(numbers[event] if event >= 0 else ~numbers[~event])
            while following is not None and following[0] <= at + 1:
                run.append(following[1])
                following = next(marks, None)
        yield run
