"""Timelines as text that is read again without torch, each different block of them once.

A timeline is affine in the batch. Several of one step, with inputs of different lengths, are one where every size is a
polynomial of degree two in the length: attention's scores grow with its square, everything else with the length.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from typing import Any, Final, Generic, TypeVar

from vram_guard import scratch
from vram_guard.budget.catalogue import catalogue
from vram_guard.codec import from_plain, to_plain
from vram_guard.module_names import ModuleName, kind_of
from vram_guard.releases import Releases
from vram_guard.timeline import Affine, Block, Deferred, HostBlock, Note, Phase, Scratch, Timeline

T = TypeVar("T")

#: Of the text; another one is not read.
VERSION: Final = 1

#: Lengths whose timelines determine a polynomial of degree two.
LENGTHS_OF_A_LAW: Final = 3

#: A number: itself where it does not depend on the length, else the coefficients of its polynomial.
Number = int | list[int]

_RULES: Final[Mapping[str, type]] = {
    one.__name__: one
    for one in (
        scratch.DropoutStates,
        scratch.EmbeddingGradient,
        scratch.PartialGradient,
        scratch.RadixSort,
        scratch.RecurrentWorkspace,
        scratch.Reduction,
    )
}

#: Fields of a timeline that are written as they are.
_PLAIN: Final[Mapping[str, Any]] = {
    "phases": tuple[Phase, ...],
    "notes": tuple[Note, ...],
    "deferred": tuple[Deferred, ...],
    "host_events": tuple[int, ...],
    "tier": str,
    "precision": str,
    "traced": tuple[int, ...],
    "compute_capability": tuple[int, int],
    "network": str | None,
    "optimizer": str,
    "releases": Releases,
}


@dataclass(frozen=True)
class AnsweredAlike:
    """A question about a compute capability: whether it is one of these, on all of which a trace is the same."""

    capabilities: tuple[tuple[int, int], ...]

    def __call__(self, capability: tuple[int, int]) -> bool:
        """The answer."""
        return capability in self.capabilities


def why_not(timeline: Timeline) -> str:
    """The field that cannot be written, in English; "" where all can."""
    if timeline.retrace is not None or any(note.from_values for note in timeline.notes):
        return "sizes hold for what was traced alone"
    kept = ("parallel", "cudnn", "compiled", "growth", "collectives", "changes", "steps")
    return next((name for name in kept if getattr(timeline, name)), "")


def packed(timelines: Mapping[int, Timeline], covers: tuple[int, int] | None = None) -> str | None:
    """The text of one step's timelines; None where they follow no law, or hold what cannot be written.

    Args:
        timelines: length -> timeline; either one, which then holds for its length alone, or
            :data:`LENGTHS_OF_A_LAW`.
        covers: the smallest and the largest length that they hold for; None: those that are given.
    """
    if any(map(why_not, timelines.values())):
        return None
    lengths, found = sorted(timelines), [timelines[length] for length in sorted(timelines)]
    first = found[0]
    plain, ages, line = _plain(first), _ages(first.events), _polynomials(lengths)
    alike = all((_plain(one), one.events, _served(one)) == (plain, first.events, _served(first)) for one in found)
    if not alike or _events(ages) != first.events:
        return None
    words = _Numbered[tuple[str, str]]()
    kinds, blocks, modules = _Numbered[str](), list[int](), list[int]()
    for several in zip(*(one.blocks for one in found), strict=True):
        kind = _kind(several, line, words)
        if kind is None:
            return None
        blocks.append(kinds.number(json.dumps(kind)))
        modules.append(words.number((str(several[0].module), kind_of(several[0].module))))
    host = [_host(several, line) for several in zip(*(one.host_blocks for one in found), strict=True)]
    if None in host:
        return None
    return json.dumps(
        {
            "version": VERSION,
            "lengths": list(covers or (lengths[0], lengths[-1])),
            "words": words.values,
            "kinds": [json.loads(kind) for kind in kinds.values],
            "blocks": blocks,
            "modules": [after - before for before, after in pairwise((0, *modules))],
            "events": ages,
            "host_blocks": host,
            "capabilities": _served(first),
            **plain,
        },
        separators=(",", ":"),
    )


def unpacked(text: str, length: int) -> Timeline | None:
    """The timeline for inputs of this length; None where the text says nothing of it.

    Raises:
        ValueError: the text is damaged, or of another version.
    """
    try:
        document = json.loads(text)
        if document["version"] != VERSION:
            raise ValueError("another version")
        low, high = document["lengths"]
        return _timeline(document, length) if low <= length <= high else None
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"damaged: {type(error).__name__}: {error}") from error


def _timeline(document: Mapping[str, Any], length: int) -> Timeline:
    def at(number: Number) -> int:
        return number if isinstance(number, int) else number[0] + length * (number[1] + length * number[2])

    def affine(pair: Sequence[Number]) -> Affine:
        return Affine(at(pair[0]), at(pair[1]))

    words = [ModuleName(*word) if word[1] else word[0] for word in document["words"]]
    kinds = [
        (affine(size), category, words[source], words[operator], optional, _read_scratch(rule, affine), unknown, stream)
        for size, category, source, operator, optional, rule, unknown, stream in document["kinds"]
    ]

    @cache
    def block(kind: int, module: int) -> Block:
        size, category, *others = kinds[kind]
        return Block(size, category, words[module], *others)

    modules = accumulate(document["modules"])
    plain = {name: from_plain(kind, document[name]) for name, kind in _PLAIN.items()}
    return Timeline(
        blocks=tuple(map(block, document["blocks"], modules)),
        events=_events(document["events"]),
        host_blocks=tuple(HostBlock(affine(size), pinned) for size, pinned in document["host_blocks"]),
        asked=((AnsweredAlike(tuple((major, minor) for major, minor in document["capabilities"])), True),),
        **plain,
    )


def _plain(timeline: Timeline) -> dict[str, Any]:
    return {name: to_plain(getattr(timeline, name)) for name in _PLAIN}


def _served(timeline: Timeline) -> list[tuple[int, int]]:
    """The compute capabilities of the catalogue on which the trace is the same."""
    known = dict.fromkeys(gpu.compute_capability for gpu in catalogue())
    return [one for one in known if timeline.of_capability(one) is not None]


# --- sizes ------------------------------------------------------------------------------------------------------------


def _polynomials(lengths: Sequence[int]) -> Callable[[Sequence[int]], Number | None]:
    """Values at these lengths -> the number; None where its coefficients are no whole numbers."""
    if len(lengths) == 1:
        return lambda values: values[0]
    low, middle, high = lengths

    def through(values: Sequence[int]) -> Number | None:
        first, second, third = values
        if first == second == third:
            return first
        # Newton's divided differences.
        slope, rest = divmod(second - first, middle - low)
        later, other_rest = divmod(third - second, high - middle)
        square, last_rest = divmod(later - slope, high - low)
        if rest or other_rest or last_rest:
            return None
        linear = slope - square * (low + middle)
        return [first - low * (linear + low * square), linear, square]

    return through


def _affine(several: Iterable[Affine], line: Callable[[Sequence[int]], Number | None]) -> list[Number] | None:
    base, per_sample = (line(values) for values in zip(*several, strict=True))
    return None if base is None or per_sample is None else [base, per_sample]


def _kind(
    several: Sequence[Block], line: Callable[[Sequence[int]], Number | None], words: _Numbered[tuple[str, str]]
) -> list[Any] | None:
    """All of a block but its module, at every length; None where a length has another block."""
    first = several[0]
    unsized = [one._replace(size=first.size, scratch=None) for one in several]
    size = _affine((one.size for one in several), line)
    rule = _scratch(several, line)
    if size is None or rule is None or any(one != unsized[0] for one in unsized):
        return None
    return [
        size,
        first.category,
        words.number((first.source, "")),
        words.number((first.operator, "")),
        first.optional,
        rule,
        first.unknown,
        first.stream,
    ]


def _scratch(several: Sequence[Block], line: Callable[[Sequence[int]], Number | None]) -> list[Any] | None:
    """The rule of a temporary and its quantities, empty where there is none; None where lengths differ in it."""
    found = [one.scratch for one in several]
    if all(one is None for one in found):
        return []
    known = [one for one in found if one is not None]
    if len(known) < len(found) or any(one.rule != known[0].rule for one in known):
        return None
    if len({len(one.quantities) for one in known}) > 1:
        return None
    quantities = [_affine(each, line) for each in zip(*(one.quantities for one in known), strict=True)]
    return None if None in quantities else [*_rule(known[0].rule), quantities]


def _rule(rule: Any) -> list[Any]:
    return [type(rule).__name__, to_plain(rule)]


def _read_scratch(written: Sequence[Any], affine: Callable[[Sequence[Number]], Affine]) -> Scratch | None:
    if not written:
        return None
    name, values, quantities = written
    return Scratch(from_plain(_RULES[name], values), tuple(map(affine, quantities)))


def _host(several: Sequence[HostBlock], line: Callable[[Sequence[int]], Number | None]) -> list[Any] | None:
    size = _affine((one.size for one in several), line)
    return None if size is None or len({one.pinned for one in several}) > 1 else [size, several[0].pinned]


# --- sequences, written so that equal layers read alike ---------------------------------------------------------------


def _ages(events: Iterable[int]) -> list[int]:
    """0 for a block that is allocated; for one that is freed, how many blocks ago it was allocated."""
    allocated, ages = 0, []
    for event in events:
        ages.append(0 if event >= 0 else allocated - ~event)
        allocated += event >= 0
    return ages


def _events(ages: Iterable[int]) -> tuple[int, ...]:
    allocated, events = 0, []
    for age in ages:
        events.append(~(allocated - age) if age else allocated)
        allocated += not age
    return tuple(events)


class _Numbered(Generic[T]):
    """Values by number, each once."""

    def __init__(self) -> None:
        self._numbers: dict[T, int] = {}

    @property
    def values(self) -> list[T]:
        """All of them, in the order of their numbers."""
        return list(self._numbers)

    def number(self, value: T) -> int:
        """The number of a value, a new one if it is not there yet."""
        return self._numbers.setdefault(value, len(self._numbers))
