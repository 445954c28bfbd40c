"""The law of a step: one timeline for every batch size, from traces at two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vram_guard.timeline._timeline import Timeline
from vram_guard.timeline._values import Affine, Block, Collective, HostBlock, Note, Scratch, Work


def merge_affine(low: Timeline, high: Timeline) -> Timeline | None:
    """One affine timeline from traces at two batch sizes, or None where they are not the same sequence.

    The two hold exact sizes (``per_sample`` 0). A size must grow by the same whole number of bytes for each
    sample, and may not shrink.
    """
    (small,), (large,) = low.traced, high.traced
    if low.events != high.events or len(low.blocks) != len(high.blocks) or low.deferred != high.deferred:
        return None
    span = large - small
    blocks = []
    for one, other in zip(low.blocks, high.blocks, strict=True):
        size = _line_through(one.size.base, other.size.base, small, span)
        scratch = _merged_scratch(one.scratch, other.scratch, small, span)
        if (scratch is None) != (one.scratch is None and other.scratch is None):
            return None
        if size is None or _kept(one) != _kept(other):
            return None
        blocks.append(one._replace(size=size, scratch=scratch))
    host_blocks = _merged_host(low, high)
    collectives = _merged_collectives(low, high)
    if host_blocks is None or collectives is None:
        return None
    return replace(
        low,
        blocks=tuple(blocks),
        traced=(small, large),
        notes=_union(low.notes, high.notes),
        work=_merged_work(low.work, high.work, small, large),
        host_blocks=host_blocks,
        collectives=collectives,
        network=high.network,
        marks=low.marks if low.marks == high.marks else None,
    )


def _kept(block: Block) -> tuple[object, ...]:
    """What a block has at every batch size."""
    return block.operator, block.category, block.unknown, block.stream


def _merged_scratch(one: Scratch | None, other: Scratch | None, small: int, span: int) -> Scratch | None:
    """The temporary at every batch size; None where the two are not of one rule, or there is none."""
    if one is None or other is None or one.rule != other.rule or len(one.quantities) != len(other.quantities):
        return None
    merged = []
    for low, high in zip(one.quantities, other.quantities, strict=True):
        line = _line_through(low.base, high.base, small, span)
        if line is None:
            return None
        merged.append(line)
    return Scratch(one.rule, tuple(merged))


def _merged_host(low: Timeline, high: Timeline) -> tuple[HostBlock, ...] | None:
    """The host's blocks at every batch size; None where they are not the same sequence."""
    if low.host_events != high.host_events or len(low.host_blocks) != len(high.host_blocks):
        return None
    (small,), (large,) = low.traced, high.traced
    blocks = []
    for one, other in zip(low.host_blocks, high.host_blocks, strict=True):
        size = _line_through(one.size.base, other.size.base, small, large - small)
        if size is None or one.pinned != other.pinned:
            return None
        blocks.append(HostBlock(size, one.pinned))
    return tuple(blocks)


def _merged_collectives(low: Timeline, high: Timeline) -> tuple[Collective, ...] | None:
    """The collectives at every batch size; None where a layout's are not the same sequence."""
    (small,), (large,) = low.traced, high.traced
    nothing = Affine(0, 0)
    one, other = ([each._replace(bytes=nothing) for each in timeline.collectives] for timeline in (low, high))
    if one != other:
        return low.collectives if low.parallel is None else None
    return tuple(
        each._replace(bytes=_near_line(each.bytes.base, twin.bytes.base, small, large))
        for each, twin in zip(low.collectives, high.collectives, strict=True)
    )


def _merged_work(low: Sequence[Work], high: Sequence[Work], small: int, large: int) -> tuple[Work, ...]:
    """Work at every batch size from two of them; none where the operators are not the same."""
    if len(low) != len(high) or any(one.operator != other.operator for one, other in zip(low, high, strict=True)):
        return ()
    return tuple(
        one._replace(
            flops=_near_line(one.flops.base, other.flops.base, small, large),
            moved=_near_line(one.moved.base, other.moved.base, small, large),
            launches=max(one.launches, other.launches),
            transfer=_near_line(one.transfer.base, other.transfer.base, small, large),
        )
        for one, other in zip(low, high, strict=True)
    )


def _near_line(low: int, high: int, small: int, large: int) -> Affine:
    """The line through two sizes, which never falls and is never below 0: work is a model, not a promise of bytes.

    What grows faster than the batch gets the line from 0 through the larger size.
    """
    if high <= low:
        return Affine(max(low, high), 0)
    per_sample = (high - low) // (large - small)
    base = high - per_sample * large
    return Affine(base, per_sample) if base >= 0 else Affine(0, -(-high // large))


def _line_through(low: int, high: int, small: int, span: int) -> Affine | None:
    per_sample, rest = divmod(high - low, span)
    base = low - per_sample * small
    if rest or per_sample < 0 or base < 0:
        return None
    return Affine(base, per_sample)


def _union(one: Sequence[Note], other: Sequence[Note]) -> tuple[Note, ...]:
    return tuple(dict.fromkeys((*one, *other)))
