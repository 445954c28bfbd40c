"""What several compositions do with the events of a timeline."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from vram_guard.timeline import Timeline


def shifted(events: Iterable[int], count: int) -> Iterator[int]:
    """Events of blocks that have ``count`` others before them."""
    return (event + count if event >= 0 else event - count for event in events)


def blocks_of_set_up(timeline: Timeline) -> Iterator[int]:
    """The blocks that are there before the first step, in the order of their allocation."""
    end = next((phase.start for phase in timeline.phases if phase.step), len(timeline.events))
    return (event for event in timeline.events[:end] if event >= 0)
