"""A timeline for every batch size, from a trace of the whole step at one and of a part of it at two."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from itertools import chain

from vram_guard.compose._alignment import aligned
from vram_guard.compose._errors import CannotComposeError
from vram_guard.compose._names import NumberedNames
from vram_guard.timeline import COMPARED, Affine, Block, HostBlock, Scratch, Timeline, Work


def of_every_size(whole: Timeline, part: Timeline, stacks: Iterable[str] = ()) -> Timeline:
    """The whole step at every batch size.

    The part holds an entry of each kind that the whole has: it is the first of two steps, the same step of a model with
    fewer of its equal blocks, or the same step without checkpointed blocks. An entry of the whole grows with the batch
    as that one of its kind does that is as large as it at the size of the whole.

    Args:
        whole: traced at one size, exact sizes.
        part: affine in the batch size.
        stacks: names of the modules that hold equal blocks, which have the numbers 0, 1, ... as names.

    Returns:
        The whole, with the one size that has been traced wholly as ``traced``.

    Raises:
        CannotComposeError: an entry has no equal in the part, or several that grow differently; or more than sizes may
            depend on the batch.
    """
    if whole.deferred or whole.collectives or whole.retrace is not None or part.retrace is not None:
        raise CannotComposeError("collectives and other streams are followed at two sizes")
    if (whole.marks is None) != (part.marks is None) or bool(whole.work) != bool(part.work):
        raise CannotComposeError("the part differs between sizes")
    (size,) = whole.traced
    names = NumberedNames(stacks)
    blocks, work, on_host = _BlockLines(whole, part, names), _NearLines(size, fewer=names.numbered), _Lines(size)
    for one in part.work:
        work.add(*_described_work(one, names))
    for block in part.blocks:
        on_host.add((_ON_DEVICE,), (block.size,))
    for held in part.host_blocks:
        on_host.add(_kinds_on_host(held), (held.size,))
    return replace(
        whole,
        blocks=tuple(_sized(block, blocks.of(number)) for number, block in enumerate(whole.blocks)),
        work=tuple(_sized_work(one, work.through(*_described_work(one, names))) for one in whole.work),
        host_blocks=tuple(
            HostBlock(on_host.through(_kinds_on_host(held), (held.size,))[0], held.pinned) for held in whole.host_blocks
        ),
        notes=tuple(dict.fromkeys((*whole.notes, *part.notes))),
    )


def first_steps(whole: Timeline, first: Timeline) -> tuple[Timeline, Timeline]:
    """The first step out of two, and the same one traced alone at another size.

    Their work is what the second step does and the first one does as well. What an optimizer does in its second step
    alone is the same at every size.

    Raises:
        CannotComposeError: the first step alone does other things than the first of the two.
    """
    if len(first.events) > len(whole.events) or len(first.host_events) > len(whole.host_events):
        raise CannotComposeError("the first step alone does more than both")
    same = dict(aligned([_kind_of_work(one) for one in whole.work], [_kind_of_work(one) for one in first.work]))
    if any(place not in same and one.phase != "optimizer" for place, one in enumerate(whole.work)):
        raise CannotComposeError("the second step does what the first one does not")
    work = [first.work[same[place]] if place in same else one for place, one in enumerate(whole.work)]
    beginning = replace(
        whole,
        blocks=whole.blocks[: len(first.blocks)],
        events=whole.events[: len(first.events)],
        host_blocks=whole.host_blocks[: len(first.host_blocks)],
        host_events=whole.host_events[: len(first.host_events)],
        marks=first.marks,
    )
    return beginning, replace(first, work=tuple(work))


_Kinds = tuple[Hashable, ...]
"""What an entry is: the narrowest first."""

_Line = tuple[Affine, ...]
"""The numbers of an entry, each affine in the batch size."""


class _Lines:
    """How the numbers of entries of each kind grow with the batch.

    Args:
        size: samples at which the numbers of an entry are known whose growth is asked for.
        fewer: of a model with fewer blocks, on whose number sizes may depend as well: a list of all norms.
    """

    def __init__(self, size: int, *, fewer: bool = False) -> None:
        self.size = size
        self._fewer = fewer
        self._by_number: dict[Hashable, dict[_Line, set[_Line]]] = {}
        """Kind -> numbers at :attr:`size` -> how they may grow."""
        self._growing: set[Hashable] = set()
        """Kinds of which something grows with the batch."""
        self._added: set[tuple[Hashable, _Line]] = set()
        self._found: dict[tuple[Hashable, _Line], _Line] = {}

    def add(self, kinds: _Kinds, line: _Line) -> None:
        """An entry of these kinds has these numbers."""
        if (kinds[0], line) in self._added:
            return
        self._added.add((kinds[0], line))
        numbers = self.at_size(line)
        for kind in kinds:
            self._by_number.setdefault(kind, {}).setdefault(numbers, set()).add(line)
        if numbers != line:
            self._growing.update(kinds)

    def through(self, kinds: _Kinds, exact: _Line) -> _Line:
        """How an entry grows that has these exact numbers (``per_sample`` 0) at :attr:`size`."""
        asked = kinds[0], exact
        if asked not in self._found:
            self._found[asked] = self._through(kinds, exact)
        return self._found[asked]

    def _through(self, kinds: _Kinds, exact: _Line) -> _Line:
        known = [kind for kind in kinds if kind in self._by_number]
        for kind in known:
            same = self._by_number[kind].get(exact, ())
            if len(same) > 1:
                raise _SeveralLinesError(f"{kinds[0]} may grow with the batch as any of {sorted(same)}")
            for line in same:
                return line
            if self._fewer and kind not in self._growing:
                return exact
        if known and known[0] not in self._growing:
            return exact
        return self._otherwise(kinds, exact, self._by_number[known[0]].values() if known else ())

    def at_size(self, line: _Line) -> _Line:
        """The numbers at :attr:`size`."""
        return tuple(Affine(one.at(self.size), 0) for one in line)

    def _otherwise(self, kinds: _Kinds, exact: _Line, _known: Iterable[set[_Line]]) -> _Line:
        raise CannotComposeError(f"{kinds[0]}: nothing else is as large as {exact}")


class _SeveralLinesError(CannotComposeError):
    """Entries of a kind are as large at one size, and grow differently."""


class _BlockLines:
    """How the blocks of a step grow, as those of a part of it do.

    Where several of a kind are as large, such as a layer's weight and its input in half precision, their order tells
    them apart.
    """

    def __init__(self, whole: Timeline, part: Timeline, names: NumberedNames) -> None:
        (size,) = whole.traced
        self._whole, self._part, self._names = whole, part, names
        self._lines = _Lines(size, fewer=names.numbered)
        for block in part.blocks:
            self._lines.add(*_described(block, names))

    def of(self, number: int) -> _Line:
        """How one of the blocks of the whole grows."""
        block = self._whole.blocks[number]
        kinds, exact = _described(block, self._names)
        if block.operator == COMPARED:
            return exact
        try:
            return self._lines.through(kinds, exact)
        except _SeveralLinesError:
            found = set(self._by_order(number))
            if len(found) != 1:
                raise
            return found.pop()

    def _by_order(self, number: int) -> Iterator[_Line]:
        """The growth of what stands in the same place of a row that is as this block's, number by number."""
        rows, places = self._rows_of_whole
        row, place = places[number]
        exact = self._numbers(self._whole, rows[row])
        for blocks in self._rows_of_part.get(row[:2], ()):
            lines = self._numbers(self._part, blocks)
            if [self._lines.at_size(line) for line in lines] == exact:
                yield lines[place]

    def _numbers(self, timeline: Timeline, blocks: Iterable[int]) -> list[_Line]:
        return [_described(timeline.blocks[block], self._names)[1] for block in blocks]

    @cached_property
    def _rows_of_whole(self) -> _Rows:
        return _rows(self._whole, self._names)

    @cached_property
    def _rows_of_part(self) -> dict[tuple[Hashable, str], list[list[int]]]:
        """By kind and phase."""
        found: dict[tuple[Hashable, str], list[list[int]]] = {}
        for row, blocks in _rows(self._part, self._names)[0].items():
            found.setdefault(row[:2], []).append(blocks)
        return found


_Row = tuple[Hashable, str, str, int]
"""A kind of block, the name of a phase, a module, and the number of the phase."""

_Rows = tuple[dict[_Row, list[int]], dict[int, tuple[_Row, int]]]
"""The blocks of each row, in order; each block's row and place in it."""


def _rows(timeline: Timeline, names: NumberedNames) -> _Rows:
    """Blocks of one kind that a module allocates in one phase."""
    rows: dict[_Row, list[int]] = {}
    places: dict[int, tuple[_Row, int]] = {}
    for number, (phase, end) in enumerate(timeline.spans()):
        for block in timeline.events[phase.start : end]:
            if block >= 0:
                made = timeline.blocks[block]
                row = _described(made, names)[0][0], phase.name, made.module, number
                found = rows.setdefault(row, [])
                places[block] = row, len(found)
                found.append(block)
    return rows, places


class _NearLines(_Lines):
    """Lines of work, which is a model: what has no equal grows as the nearest of its kind."""

    def _otherwise(self, kinds: _Kinds, exact: _Line, known: Iterable[set[_Line]]) -> _Line:
        def distance(line: _Line) -> int:
            return sum(abs(one.at(self.size) - there.base) for one, there in zip(line, exact, strict=True))

        nearest = min(sorted(chain.from_iterable(known)), key=distance, default=None)
        if nearest is None:
            raise CannotComposeError(f"{kinds[0]} is done in the whole step alone")
        return tuple(self._moved(one, there.base) for one, there in zip(nearest, exact, strict=True))

    def _moved(self, line: Affine, exact: int) -> Affine:
        """The line moved to a number; from 0 through it where it would begin below."""
        base = exact - line.per_sample * self.size
        return Affine(base, line.per_sample) if base >= 0 else Affine(0, -(-exact // self.size))


def _described(block: Block, names: NumberedNames) -> tuple[_Kinds, _Line]:
    """What tells a block from those of other kinds, and its numbers.

    Not its category: what lives until the backward pass is a temporary where its block is checkpointed.
    """
    scratch = block.scratch
    rule, quantities = (None, ()) if scratch is None else scratch
    anything = block.unknown, rule
    operator = block.operator, block.optional, *anything
    kind = block.source, names.parted(block.module)[0], block.stream, *operator
    return (kind, operator, anything), (block.size, *quantities)


#: The kind of what a block on the host may be a copy of.
_ON_DEVICE = "on the device"


def _kinds_on_host(held: HostBlock) -> _Kinds:
    return held.pinned, _ON_DEVICE


def _sized(block: Block, line: _Line) -> Block:
    size, *quantities = line
    scratch = None if block.scratch is None else Scratch(block.scratch.rule, tuple(quantities))
    return block._replace(size=size, scratch=scratch)


def _described_work(one: Work, names: NumberedNames) -> tuple[_Kinds, _Line]:
    return (_kind_of_work(one, names.parted(one.module)[0]), one.operator), (one.flops, one.moved, one.transfer)


def _kind_of_work(one: Work, module: str | None = None) -> Hashable:
    name = one.module if module is None else module
    return one.operator, name, one.phase, one.recomputed, one.unit, one.random, one.stream


def _sized_work(one: Work, line: _Line) -> Work:
    flops, moved, transfer = line
    return one._replace(flops=flops, moved=moved, transfer=transfer)
