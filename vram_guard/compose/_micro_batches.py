"""A loaded batch in two micro-batches, composed from a trace of one: two stand for any number."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple

from vram_guard.compose._alignment import aligned
from vram_guard.compose._errors import CannotComposeError
from vram_guard.limits import FIRST_ALLOCATIONS
from vram_guard.timeline import COMPARED, Affine, Block, Marks, Phase, Timeline

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
        operators = [blocks[timeline.events[at]].operator for at in made[:FIRST_ALLOCATIONS]]
        seed = next((index for index, name in enumerate(operators) if name.startswith("aten.ones_like.")), None)
        if seed is None:
            return None
        chain = seed + bool(seed)  # the scaler's own backward comes first
        if chain >= len(made):
            return None
        following = made[chain + 1] if chain + 1 < len(made) else None
        return cls(timeline.events[made[seed]], made[seed - 1] if seed else None, made[chain], following)


def in_micro_batches(timeline: Timeline, checkpointed: Collection[str] = ()) -> Timeline:
    """The timeline in which a loaded batch of twice the size runs in two micro-batches.

    The second one repeats forward and backward pass of the second step; each gradient that it makes is added to the
    first one's and dies where that happens. The loss is divided by their number before its backward pass.

    Args:
        timeline: of two steps, a micro-batch each, with marks.
        checkpointed: names of the blocks that are.

    Raises:
        CannotComposeError: a step has no marks, or not one micro-batch.
    """
    return _Doubled(timeline, checkpointed).made()


class _Doubled:
    def __init__(self, timeline: Timeline, checkpointed: Collection[str]) -> None:
        if timeline.marks is None:
            raise CannotComposeError("a trace has no marks")
        self.timeline = timeline
        self.checkpointed = checkpointed
        self.parts = [_Part(phase, end) for phase, end in timeline.spans()]
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
        self.compared = {
            self.name.get(block, block)
            for block, phase in self.home.items()
            if phase.name == "backward" and timeline.blocks[block].operator == COMPARED
        }
        """Names of what is compared of recomputations, which is kept until a forward enters a checkpointed block."""
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
        phase = part.phase
        self.phases.append(phase._replace(start=len(self.events)))
        if phase.name == "backward":
            self._emit_backward(part, again=again)
        elif phase.name == "forward":
            self.began = len(self.blocks)
            place = self._first_checkpointed(part)
            self._copy(part, phase.start, place)
            for name in self.compared:
                self._free(self.latest.get(name))
            self._copy(part, place, part.end)
        else:
            self._copy(part, phase.start, part.end, twice=phase.name == "batch")

    def _first_checkpointed(self, part: _Part) -> int:
        """Where a forward enters its first checkpointed block; its end where it enters none."""
        if not self.compared:
            return part.end
        blocks, events = self.timeline.blocks, self.timeline.events
        inside = tuple(f"{name}." for name in self.checkpointed)
        places = range(part.phase.start, part.end)
        made = (at for at in places if events[at] >= 0)
        return next((at for at in made if f"{blocks[events[at]].module}.".startswith(inside)), part.end)

    def _emit_backward(self, part: _Part, *, again: bool) -> None:
        """A backward pass, with the division of its loss; ``again``: it adds to gradients."""
        start, events = part.phase.start, self.timeline.events
        division = _Division.of(self.timeline, part)
        divided = None if division is None else self._scalar(division.seed)
        quotient = None
        added = [at for at in self.accumulated if start <= at < part.end] if again else []
        follows = [] if division is None else [at + 1 for at in division[1:] if at is not None]
        done = start
        for place in sorted({*added, *follows, part.end}):  # between these, events are copied as they are
            self._copy(part, done, place, again=again)
            done = place
            if division is not None:
                if place - 1 == division.scaled:
                    self._free(divided)
                if place - 1 == division.chain:
                    quotient = self._scalar(division.seed)
                    if division.scaled is not None:
                        chain = events[division.chain]
                        self._free(self.latest[self.name.get(chain, chain)])
                elif place - 1 == division.following:
                    self._free(quotient)
            for gradient in self.accumulated.get(place, ()) if again else ():
                if self.home[gradient].start == start:
                    self._free(self.latest.get(self.name.get(gradient, gradient)))
        self._free(divided)

    def _copy(self, part: _Part, start: int, end: int, *, twice: bool = False, again: bool = False) -> None:
        """Events of a phase. The hot path of composing: hence the local names."""
        names, latest, previous, freed, home = self.name, self.latest, self.previous, self.freed, self.home
        blocks, events, made = self.blocks, self.events, self.timeline.blocks
        gradients = self.gradients if part.phase.name == "backward" and not again else ()
        kept: dict[int, int] = {} if again else self.kept
        step, began, count = self._step[part.phase.start], self.began, len(blocks)
        for event in self.timeline.events[start:end]:
            if event >= 0:
                name = names.get(event, event)
                if name in latest:
                    previous[name] = latest[name]
                latest[name] = count
                events.append(count)
                blocks.append(_twice(made[event]) if twice else made[event])
                if name in gradients:
                    kept[name] = count
                count += 1
                continue
            name = names.get(~event, ~event)
            block = kept.get(name)
            if block is None:
                # What an earlier step made, the micro-batch before this one has made.
                before = home[~event].step < step and latest.get(name, -1) >= began
                block = (previous if before else latest).get(name)
            if block is not None and block not in freed:
                freed.add(block)
                events.append(~block)

    def _scalar(self, like: int) -> int:
        """A tensor of the size of the gradient that a backward pass begins with."""
        self.events.append(len(self.blocks))
        self.blocks.append(self.timeline.blocks[like]._replace(operator="aten.div.Tensor"))
        return len(self.blocks) - 1

    def _free(self, block: int | None) -> None:
        if block is not None and block not in self.freed:
            self.freed.add(block)
            self.events.append(~block)


def _twice(block: Block) -> Block:
    return block._replace(size=Affine(2 * block.size.base, 2 * block.size.per_sample))
