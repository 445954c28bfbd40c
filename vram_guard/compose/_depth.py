"""A deep model's timeline from those of shallow ones: what N equal blocks do, one after the other, repeats."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from vram_guard.compose._errors import CannotComposeError
from vram_guard.compose._loops import Item, SequencePart, parts_of
from vram_guard.compose._names import NumberedNames
from vram_guard.state.collector import collector_paused
from vram_guard.timeline import Affine, Block, Border, HostBlock, Marks, Scratch, Timeline, Work


class DepthLaw:
    """Timelines of a step whose model has any number of equal blocks, from traces with ``depth`` and ``depth + 1``.

    The blocks may be those of several stacks, each of which has so many.

    Every sequence of a timeline (events, work, collectives, ...) consists of pieces that are there once and of loops
    that run one round more for each block more. Every number in it (a block's index, a size, a place, the number of a
    layer) is a whole number of times the round, plus a whole number of times the depth, plus a constant. Nothing is
    known of what the pieces are: that the law holds is shown by a trace at another depth, see :meth:`holds`.

    Args:
        small: of the model with ``depth`` blocks, exact sizes.
        large: with one block more.
        depth: blocks of the first.
        stacks: names of the modules that hold the blocks, which have the numbers 0, 1, ... as names.

    Raises:
        CannotComposeError: the two differ in other ways.
    """

    def __init__(self, small: Timeline, large: Timeline, depth: int, stacks: Iterable[str]) -> None:
        if _constants(small) != _constants(large):
            raise CannotComposeError("models of different depth differ in more than their sequences")
        self._template = small
        self._depth = depth
        self._names = NumberedNames(stacks)
        fixed = _sizes(small.host_blocks) & _sizes(large.host_blocks)
        on_host = _by_place(*([_on_host(block, fixed) for block in each.host_blocks] for each in (small, large)))
        fixed = _sizes(_states(small)) & _sizes(_states(large))
        one, other = (
            _sequences(timeline, self._names, fixed, host)
            for timeline, host in zip((small, large), on_host, strict=True)
        )
        self._parts = {name: list(parts_of(one[name], other[name])) for name in one}

    def at(self, depth: int) -> Timeline:
        """The timeline with so many blocks."""
        with collector_paused():  # a hundred thousand values, none of them in a cycle
            made = {name: list(self._values(parts, depth, _KINDS[name])) for name, parts in self._parts.items()}
        template = self._template
        marks = None
        if template.marks is not None:
            marks = Marks(tuple(made["borders"]), tuple(made["accumulated"]), tuple(made["used"]))
        return replace(
            template,
            blocks=tuple(block for _event, block in made["events"] if block is not None),
            events=tuple(event for event, _block in made["events"]),
            host_blocks=tuple(block for _event, block in made["host_events"] if block is not None),
            host_events=tuple(event for event, _block in made["host_events"]),
            phases=tuple(made["phases"]),
            work=tuple(made["work"]),
            collectives=tuple(made["collectives"]),
            deferred=tuple(made["deferred"]),
            marks=marks,
        )

    def holds(self, direct: Timeline, depth: int) -> bool:
        """True if a direct trace with so many blocks is what the law says of it, entry by entry."""
        said = self.at(depth)
        return (
            said == replace(direct, work=_as_launched(said.work, direct.work))
            and said.marks == direct.marks
            and all(getattr(said, name) == getattr(direct, name) for name in _COMPARED)
        )

    def _values(self, parts: Sequence[SequencePart], depth: int, kind: _SequenceKind) -> Iterator[Any]:
        more, names = depth - self._depth, self._names
        for part in parts:
            numbers = [
                tuple(c + more * each for c, each in zip(item.numbers, by_depth, strict=True))
                for item, by_depth in zip(part.items, part.by_depth, strict=True)
            ]
            first = [kind.decoded(item.value, own, names) for item, own in zip(part.items, numbers, strict=True)]
            if not part.rounds:
                yield from first
                continue
            few = kind.few
            ready = [
                (value, own, by_round, any(by_round[few:]), by_round[:few])
                for value, own, by_round in zip(first, numbers, part.by_round, strict=True)
            ]
            for turn in range(part.rounds + more):
                for value, own, by_round, many, by_few in ready:
                    if many:
                        grown = tuple(c + turn * each for c, each in zip(own, by_round, strict=True))
                        yield kind.decoded(value, grown, names)
                    elif any(by_few):
                        yield kind.moved(value, [c + turn * each for c, each in zip(own, by_few, strict=False)], names)
                    else:
                        yield value


def _as_launched(one: Sequence[Work], other: Sequence[Work]) -> tuple[Work, ...]:
    """Work with the launches of another's: an optimizer's lists go to the GPU in parts of so many tensors each.

    A step function, of which nothing but microseconds depends.
    """
    known = (work.launches for work in one)
    return tuple(work._replace(launches=next(known, work.launches)) for work in other)


# --- sequences ---------------------------------------------------------------------------------------------------

_Decoder = Callable[[Any, Sequence[int], NumberedNames], Any]


class _SequenceKind(NamedTuple):
    """A kind of sequence.

    Attributes:
        decoded: an entry with other numbers.
        few: the first so many numbers are places or names, which differ from round to round; the others are sizes.
        moved: an entry with those first numbers, and else as it is.
    """

    decoded: _Decoder
    few: int = 0
    moved: _Decoder = lambda value, _numbers, _names: value


#: Categories of blocks that are there one by one for every parameter. Gradients may lie in buckets.
_STATES = ("parameters", "optimizer_states")

#: What a timeline has once; the tuples of its comparison, and what that leaves out, are compared too.
_ONCE = (
    "traced",
    "tier",
    "notes",
    "compute_capability",
    "multiprocessors",
    "placement",
    "precision",
    "network",
    "cudnn",
    "parallel",
)
_COMPARED = (*_ONCE, "releases")


def _constants(timeline: Timeline) -> list[object]:
    if timeline.growth or timeline.changes or timeline.retrace is not None or timeline.tier == "formula":
        raise CannotComposeError("a step that cannot be followed to its end, or whose forwards change something")
    return [getattr(timeline, name) for name in _COMPARED] + [timeline.marks is None]


def _sizes(blocks: Iterable[Block | HostBlock]) -> set[Affine]:
    return {block.size for block in blocks}


def _states(timeline: Timeline) -> Iterator[Block]:
    return (block for block in timeline.blocks if block.category in _STATES)


_Described = tuple[Hashable, tuple[int, ...]]


def _on_host(block: HostBlock, fixed: Container[Affine]) -> _Described:
    return (block.pinned, block.size if block.size in fixed else None), tuple(block.size)


def _by_place(small: Sequence[_Described], large: Sequence[_Described]) -> tuple[list[_Described], list[_Described]]:
    """Blocks of two depths, each with the piece or loop in which it was allocated.

    Two stacks of equal blocks follow one another later where their blocks are given back. What was allocated between
    them tells these apart. Where their order alone follows no law, they are as they were.
    """
    one, other = ([Item(*block, None) for block in blocks] for blocks in (small, large))
    try:
        parts = list(parts_of(one, other))
    except CannotComposeError:
        return list(small), list(large)
    places: tuple[list[int], list[int]] = [], []
    for number, part in enumerate(parts):
        for more, each in enumerate(places):
            each.extend([number] * len(part.items) * (part.rounds + more if part.rounds else 1))

    def placed(at: Sequence[int], blocks: Sequence[_Described]) -> list[_Described]:
        return [((place, key), numbers) for place, (key, numbers) in zip(at, blocks, strict=True)]

    return placed(places[0], small), placed(places[1], large)


def _sequences(
    timeline: Timeline, names: NumberedNames, fixed: Container[Affine], on_host: Sequence[_Described]
) -> dict[str, list[Item]]:
    """Every sequence of a timeline, as entries with their numbers.

    Nothing but its size tells a weight from others: without that, rounds would be found in other places, where two
    stacks of equal blocks follow one another.

    Args:
        timeline: of a model of one depth.
        names: of its modules.
        fixed: sizes that weights and their states have at any depth.
        on_host: its blocks on the host, each with its key and its numbers.
    """
    marks = timeline.marks or Marks((), ())
    starts = [phase.start for phase in timeline.phases]
    blocks, events = [_described(block, names, fixed) for block in timeline.blocks], timeline.events
    borders = []
    for border in marks.borders:
        name, number = names.parted(border.module)
        key = name, border.entered, bisect_right(starts, border.at)
        borders.append(Item(key, (border.at, border.on_host, number), border))
    work = []
    for one in timeline.work:
        name, number = names.parted(one.module)
        sizes = *one.flops, *one.moved, *one.transfer, one.micro_batch
        done = one.operator, name, one.phase, one.recomputed, one.unit
        work.append(Item(done, (number, *sizes), one))
    collectives = []
    for call in timeline.collectives:
        places = call.position, call.after, call.needed
        asked = *call[:4], call.ranks, *call[6:9], call.by_layout, call.after < 0, call.needed < 0
        collectives.append(Item(asked, (*places, *call.bytes), call))
    return {
        "events": list(_allocations(events, timeline.blocks, blocks)),
        "host_events": list(_allocations(timeline.host_events, timeline.host_blocks, on_host)),
        "phases": [Item((*phase[:2], phase.label), (phase.start,), phase) for phase in timeline.phases],
        "work": work,
        "collectives": collectives,
        "deferred": [
            Item((bisect_right(starts, one.free), blocks[~events[one.free]][0]), tuple(one), one)
            for one in timeline.deferred
        ],
        "borders": borders,
        **{
            name: [Item((bisect_right(starts, at), blocks[block][0]), (at, block), (at, block)) for at, block in places]
            for name, places in (("accumulated", marks.accumulated), ("used", marks.used))
        },
    }


def _allocations(events: Sequence[int], blocks: Sequence[Any], known: Sequence[_Described]) -> Iterator[Item]:
    """Events, each allocation with its block, of which the key and the numbers are ``known``."""
    following = 0
    for event in events:
        if event < 0:
            yield Item(("free", known[~event][0]), (event,), (event, None))
            continue
        if event != following:
            raise CannotComposeError("blocks are not numbered in the order of their allocation")
        following += 1
        key, numbers = known[event]
        yield Item(("take", key), (event, *numbers), (event, blocks[event]))
    if following != len(blocks):
        raise CannotComposeError("a block is never allocated")


def _described(block: Block, names: NumberedNames, fixed: Container[Affine]) -> _Described:
    name, number = names.parted(block.module)
    quantities = () if block.scratch is None else block.scratch.quantities
    rule = None if block.scratch is None else block.scratch.rule
    told = block.size if not name and block.category in _STATES and block.size in fixed else None
    key = block.category, name, told, block.source, block.operator, block.optional, block.unknown, block.stream
    sizes = (one for quantity in (block.size, *quantities) for one in quantity)
    return (*key, rule, len(quantities)), (number, *sizes)


def _moved_event(
    value: tuple[int, Block | None], numbers: Sequence[int], names: NumberedNames
) -> tuple[int, Block | None]:
    block = value[1]
    if block is None or len(numbers) < 2:
        return numbers[0], block
    return numbers[0], block._replace(module=names.joined(block.module, numbers[1]))


def _event(value: tuple[int, Block | None], numbers: Sequence[int], names: NumberedNames) -> tuple[int, Block | None]:
    _old, block = value
    if block is None:
        return numbers[0], None
    size, *quantities = _pairs(numbers[2:])
    module = names.joined(block.module, numbers[1])
    scratch = None if block.scratch is None else Scratch(block.scratch.rule, tuple(quantities))
    return numbers[0], block._replace(size=size, module=module, scratch=scratch)


def _host_event(
    value: tuple[int, HostBlock | None], numbers: Sequence[int], _names: NumberedNames
) -> tuple[int, HostBlock | None]:
    block = value[1]
    return numbers[0], None if block is None else HostBlock(Affine(*numbers[1:]), block.pinned)


def _pairs(numbers: Sequence[int]) -> list[Affine]:
    return [Affine(base, each) for base, each in zip(numbers[::2], numbers[1::2], strict=True)]


def _moved_work(value: Any, numbers: Sequence[int], names: NumberedNames) -> Any:
    return value._replace(module=names.joined(value.module, numbers[0]))


def _work(value: Any, numbers: Sequence[int], names: NumberedNames) -> Any:
    flops, moved, transfer = _pairs(numbers[1:7])
    return value._replace(
        module=names.joined(value.module, numbers[0]),
        flops=flops,
        moved=moved,
        transfer=transfer,
        micro_batch=numbers[7],
    )


def _collective(value: Any, numbers: Sequence[int], _names: NumberedNames) -> Any:
    position, after, needed, *size = numbers
    return value._replace(position=position, after=after, needed=needed, bytes=Affine(*size))


_KINDS: dict[str, _SequenceKind] = {
    "events": _SequenceKind(_event, 2, _moved_event),
    "host_events": _SequenceKind(_host_event),
    "phases": _SequenceKind(lambda value, numbers, _names: value._replace(start=numbers[0])),
    "work": _SequenceKind(_work, 1, _moved_work),
    "collectives": _SequenceKind(_collective),
    "deferred": _SequenceKind(lambda value, numbers, _names: type(value)(*numbers)),
    "borders": _SequenceKind(
        lambda value, numbers, names: Border(
            numbers[0], names.joined(value.module, numbers[2]), value.entered, numbers[1]
        )
    ),
    "accumulated": _SequenceKind(lambda _value, numbers, _names: tuple(numbers)),
    "used": _SequenceKind(lambda _value, numbers, _names: tuple(numbers)),
}
