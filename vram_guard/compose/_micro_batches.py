"""A loaded batch in two micro-batches, composed from a trace of one: two stand for any number."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from vram_guard.compose._alignment import aligned
from vram_guard.compose._errors import CannotComposeError
from vram_guard.timeline import Affine, Block, Marks, Phase, Timeline

_REPEATED = ("forward", "backward")


class _Part(NamedTuple):
    """A phase with its events."""

    phase: Phase
    end: int


class _Division(NamedTuple):
    """Events of a backward pass around which the division of its loss has its own."""

    seed: int
    """The block of the gradient that the pass begins with."""
    scaled: int | None
    """Where a GradScaler has scaled the loss; None: there is none."""
    chain: int
    """Where the gradient of the divided loss is there."""
    following: int | None
    """Where the first gradient made of it is there."""

    @classmethod
    def of(cls, timeline: Timeline, part: _Part) -> _Division | None:
        """None where the pass does not begin with a gradient of ones."""
        blocks = timeline.blocks
        made = [at for at in range(part.phase.start, part.end) if timeline.events[at] >= 0]
        operators = [blocks[timeline.events[at]].operator for at in made[:_FIRST]]
        seed = next((index for index, name in enumerate(operators) if name.startswith("aten.ones_like.")), None)
        if seed is None:
            return None
        chain = seed + bool(seed)  # the scaler's own backward comes first
        if chain >= len(made):
            return None
        following = made[chain + 1] if chain + 1 < len(made) else None
        return cls(timeline.events[made[seed]], made[seed - 1] if seed else None, made[chain], following)


#: Allocations among which the gradient of ones is looked for: a GradScaler makes its own two numbers first.
_FIRST = 4


def in_micro_batches(timeline: Timeline) -> Timeline:
    """The timeline in which a loaded batch of twice the size runs in two micro-batches.

    The second one repeats forward and backward pass of the second step; each gradient that it makes is added to the
    first one's and dies where that happens. The loss is divided by their number before its backward pass.

    Args:
        timeline: of two steps, a micro-batch each, with marks.

    Raises:
        CannotComposeError: a step has no marks, or not one micro-batch.
    """
    return _Doubled(timeline).made()


class _Doubled:
    def __init__(self, timeline: Timeline) -> None:
        if timeline.marks is None:
            raise CannotComposeError("a trace has no marks")
        self.timeline = timeline
        ends = [*(phase.start for phase in timeline.phases[1:]), len(timeline.events)]
        self.parts = [_Part(phase, end) for phase, end in zip(timeline.phases, ends, strict=True)]
        self._step = {phase.start: phase.step for phase in timeline.phases}
        self.home: dict[int, Phase] = {}
        """The phase that allocates a block."""
        for part in self.parts:
            for event in timeline.events[part.phase.start : part.end]:
                if event >= 0:
                    self.home[event] = part.phase
        self.name = self._same_name()
        self.accumulated: dict[int, list[int]] = {}
        for at, block in timeline.marks.accumulated:
            self.accumulated.setdefault(at, []).append(block)
        self.gradients = {self.name.get(block, block) for _at, block in timeline.marks.accumulated}
        self.blocks: list[Block] = []
        self.events: list[int] = []
        self.phases: list[Phase] = []
        self.latest: dict[int, int] = {}
        """Name -> the youngest block of it."""
        self.kept: dict[int, int] = {}
        """Name of a gradient -> the block that the others are added to."""
        self.freed: set[int] = set()
        self.previous: dict[int, int] = {}
        """Name -> the block of it before the youngest one."""
        self.began = 0
        """Blocks that were there when the youngest micro-batch began."""

    def _same_name(self) -> dict[int, int]:
        """Block of the first step -> the same tensor's in the second one, where that makes it too."""
        names: dict[int, int] = {}
        for kind in _REPEATED:
            first, second = (
                [block for block, phase in self.home.items() if (phase.name, phase.step) == (kind, step)]
                for step in (1, 2)
            )
            pairs = aligned([self._kind(block) for block in first], [self._kind(block) for block in second])
            names.update((first[at], second[there]) for at, there in pairs)
        return names

    def _kind(self, block: int) -> tuple[object, ...]:
        made = self.timeline.blocks[block]
        return made.size, made.operator, made.stream

    def made(self) -> Timeline:
        """The timeline of two micro-batches."""
        again = [part for part in self.parts if part.phase.step == 2 and part.phase.name in _REPEATED]
        if len(again) != 2:
            raise CannotComposeError("a step has more than one micro-batch, or none")
        for part in self.parts:
            if part.phase.step == 0:
                self._emit(part)
        for step in (1, 2):
            own = [part for part in self.parts if part.phase.step == step]
            last = max(index for index, part in enumerate(own) if part.phase.name == "backward")
            for part in own[: last + 1]:
                self._emit(part)
            for part in again:
                self._emit(part._replace(phase=part.phase._replace(step=step)), again=part.phase.name == "backward")
            for part in own[last + 1 :]:
                self._emit(part)
        return replace(
            self.timeline,
            blocks=tuple(self.blocks),
            events=tuple(self.events),
            phases=tuple(self.phases),
            marks=Marks((), ()),
        )

    def _emit(self, part: _Part, *, again: bool = False) -> None:
        """The events of a phase; ``again``: of a backward pass that adds to gradients."""
        phase, events = part.phase, self.timeline.events
        start = phase.start
        self.phases.append(phase._replace(start=len(self.events)))
        first = phase.name == "backward" and not again
        if phase.name == "forward":
            self.began = len(self.blocks)
        division = _Division.of(self.timeline, part) if phase.name == "backward" else None
        divided = None if division is None else self._scalar(division.seed)
        quotient = None
        for at in range(start, part.end + 1):
            if again:
                for gradient in self.accumulated.get(at, ()):
                    if self.home[gradient].start == start:
                        self._free(self.latest.get(self.name.get(gradient, gradient)))
            if at == part.end:
                break
            event = events[at]
            name = self._named(event)
            if event >= 0:
                self._allocate(event, name, twice=phase.name == "batch")
                if first and name in self.gradients:
                    self.kept[name] = self.latest[name]
            else:
                kept = None if again else self.kept.get(name)
                self._free(self._meant(~event, name, start) if kept is None else kept)
            if division is None:
                continue
            if at == division.scaled:
                self._free(divided)
            if at == division.chain:
                quotient = self._scalar(division.seed)
                if division.scaled is not None:
                    self._free(self.latest[name])
            elif at == division.following:
                self._free(quotient)
        self._free(divided)

    def _named(self, event: int) -> int:
        """The name of the block that an event is about."""
        block = event if event >= 0 else ~event
        return self.name.get(block, block)

    def _meant(self, block: int, name: int, start: int) -> int | None:
        """The block that is freed: what an earlier step made, the micro-batch before this one has made."""
        made_before = self.home[block].step < self._step[start]
        if made_before and self.latest.get(name, -1) >= self.began:
            return self.previous.get(name)
        return self.latest.get(name)

    def _scalar(self, like: int) -> int:
        """A tensor of the size of the gradient that a backward pass begins with."""
        self.events.append(len(self.blocks))
        self.blocks.append(self.timeline.blocks[like]._replace(operator="aten.div.Tensor"))
        return len(self.blocks) - 1

    def _allocate(self, block: int, name: int, *, twice: bool) -> None:
        made = self.timeline.blocks[block]
        if twice:
            made = made._replace(size=Affine(2 * made.size.base, 2 * made.size.per_sample))
        if name in self.latest:
            self.previous[name] = self.latest[name]
        self.latest[name] = len(self.blocks)
        self.events.append(len(self.blocks))
        self.blocks.append(made)

    def _free(self, block: int | None) -> None:
        if block is not None and block not in self.freed:
            self.freed.add(block)
            self.events.append(~block)
