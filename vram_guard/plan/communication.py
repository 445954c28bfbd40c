"""Communication: how long the GPUs of a training wait for each other, beside what they compute. A model.

A rank has several queues: the default stream, on which it computes, and those on which collectives run. The trace says
what each collective moves and where in the work it was asked for; :mod:`vram_guard.parallel.collectives` says how long
it takes. Here the queues are played through in the order in which the host fills them:

- a collective begins when what it moves has been computed, and the collectives before it on its stream and on the same
  wires (within the node, or between nodes) have ended;
- work that needs its result waits for it; what remains of the collective then is time that is lost.

Which work a collective waits for, and which waits for it, is read from the streams and events of the trace. What that
does not say is taken from what the collective is. On the default stream the work waits for it
(tensor parallel). Elsewhere, parameters are gathered one module ahead, as FSDP2 does it: in the forward pass while the
module before computes, in the backward pass until the next gathering is asked for (``_fsdp_param_group.py``,
``unshard``, ``_backward_prefetch``). Gradients are reduced beside the rest of the backward pass; FSDP2 lets one such
reduction wait at a time, DistributedDataParallel all of them until the backward pass ends.

Left out: that collectives slow down computing, by taking multiprocessors and memory bandwidth; ranks that are slower
than others; other jobs on the network.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vram_guard.parallel.collectives import collective_seconds, group_of
from vram_guard.plan.roofline import Communication, total_time
from vram_guard.plan.step_time import is_own

if TYPE_CHECKING:
    from vram_guard.budget import GPU
    from vram_guard.parallel.links import Topology
    from vram_guard.parallel.spec import Parallel
    from vram_guard.timeline import Collective, Timeline

#: Collectives that a torch program calls for bookkeeping, without data of the GPU.
_NOT_COUNTED = ("barrier", "object", "monitored")

#: Kinds whose gradients torch's Reducer reduces, bucket by bucket, beside the backward pass.
_REDUCED_BESIDE = ("ddp", "zero1")
#: The stream of those reductions.
_NCCLS = -1


@dataclass(frozen=True)
class _Queued:
    """A collective in its place: positions are entries of the work."""

    seconds: float
    stream: int
    wires: str
    at: int
    after: int
    needed: int
    reduces: str
    """"scatter" or "all" for what reduces gradients beside the backward pass; "": nothing."""


def communication(
    timeline: Timeline, batch_size: int, gpu: GPU, topology: Topology, *, micro_batches: int | None = None
) -> Communication:
    """The communication of one optimizer step.

    Args:
        timeline: of a rank; ``timeline.parallel`` says of which layout.
        batch_size: samples of one micro-batch on this rank.
        gpu: the card.
        topology: what connects the GPUs.
        micro_batches: of one optimizer step; None: as many as were traced. All but the last one take as long as the
            first one that was traced.
    """
    layout = timeline.parallel
    if layout is None or layout.gpus == 1:
        return Communication()
    timeline = timeline.exact(batch_size)
    seconds = [total_time((item,), batch_size, gpu).device if is_own(item) else 0.0 for item in timeline.work]
    last = max((item.micro_batch for item in timeline.work), default=0)
    parts = [_part(timeline, number) for number in range(last + 1)]
    once = _part(timeline, None)
    played = [
        _play(_placed(part, batch_size, layout, topology, span), seconds[span[0] : span[1]], span[0])
        for part, span in ((part, _span(timeline, number)) for number, part in enumerate(parts))
    ]
    count = last + 1 if micro_batches is None else micro_batches
    total = played[0].times(count - 1) + played[-1]
    span = _span(timeline, None)
    return total + _play(_placed(once, batch_size, layout, topology, span), seconds[span[0] : span[1]], span[0])


def _part(timeline: Timeline, micro_batch: int | None) -> list[Collective]:
    """The collectives of the second step that belong to a micro-batch; None: to the optimizer."""
    step = max((one.step for one in timeline.collectives), default=0)
    made = []
    for one in timeline.collectives:
        if one.step != step or any(word in one.name.lower() for word in _NOT_COUNTED):
            continue
        once = one.phase in ("optimizer", "setup")
        if once == (micro_batch is None) and (once or one.micro_batch == micro_batch):
            made.append(one)
    return made


def _span(timeline: Timeline, micro_batch: int | None) -> tuple[int, int]:
    """The stretch of the work that belongs to a micro-batch; None: to the optimizer."""
    inside = [
        index
        for index, item in enumerate(timeline.work)
        if (item.phase in ("optimizer", "setup")) == (micro_batch is None)
        and (micro_batch is None or item.micro_batch == micro_batch)
    ]
    return (inside[0], inside[-1] + 1) if inside else (0, 0)


def _placed(
    collectives: Sequence[Collective], batch_size: int, layout: Parallel, topology: Topology, span: tuple[int, int]
) -> list[_Queued]:
    """The collectives with their times, and the places in the work that they depend on and are needed at."""
    start, end = span
    collectives = [_own_stream(one, layout) for one in collectives]
    at = [min(max(one.position, start), end) for one in collectives]
    gathers: dict[int, list[int]] = {}
    scatters: dict[int, list[int]] = {}
    for index, one in enumerate(collectives):
        if one.stream and _gathers(one):
            gathers.setdefault(one.stream, []).append(index)
        elif one.stream and "reduce_scatter" in one.name:
            scatters.setdefault(one.stream, []).append(index)
    made = []
    for index, one in enumerate(collectives):
        group = group_of(layout, one.dimension, one.ranks if one.ranks > 1 else None)
        wait, use = at[index], at[index]
        if one.stream and _gathers(one):
            order = gathers[one.stream]
            place = bisect_left(order, index)
            if one.phase == "forward":
                wait = at[order[place - 1]] if place else start
            elif place + 1 < len(order):
                use = at[order[place + 1]]
        elif one.stream:
            order = scatters.get(one.stream, [])
            place = bisect_left(order, index)
            use = at[order[place + 1]] if index in order and place + 1 < len(order) else end
        made.append(
            _Queued(
                seconds=collective_seconds(one.name, one.bytes.at(batch_size), group, topology),
                stream=one.stream,
                wires="between" if group.nodes > 1 else "inside",
                at=at[index],
                after=min(one.after, at[index]) if one.after >= start else wait,
                needed=min(max(one.needed, at[index]), end) if one.needed >= 0 else use,
                reduces=_reduces(one),
            )
        )
    return made


def _own_stream(one: Collective, layout: Parallel) -> Collective:
    """DistributedDataParallel calls its reductions on the default stream, which goes on: NCCL's own carries them."""
    beside = layout.kind in _REDUCED_BESIDE and one.phase == "backward" and "all_reduce" in one.name
    return one._replace(stream=_NCCLS) if beside and one.by_layout and not one.stream else one


def _gathers(one: Collective) -> bool:
    return "gather" in one.name or "broadcast" in one.name


def _reduces(one: Collective) -> str:
    if not one.stream:
        return ""
    return "scatter" if "reduce_scatter" in one.name else "all" if "reduce" in one.name else ""


def _play(queue: Iterable[_Queued], work: Sequence[float], start: int) -> Communication:
    """Play the queues through; the work waits where a result is needed that is not there yet."""
    collectives = list(queue)
    waits: dict[int, list[float]] = {}
    streams: dict[int, float] = {}
    wires: dict[str, float] = {}
    reached = [0.0]
    """When each entry of the work begins; the last one is where the present one does."""
    now, index, total, scattered = 0.0, 0, 0.0, 0.0
    for place in range(len(work) + 1):
        while index < len(collectives) and collectives[index].at - start <= place:
            one = collectives[index]
            index += 1
            ready = now if one.after >= one.at else reached[max(0, min(one.after - start, place))]
            # What is reduced over the groups has been reduced within them.
            within = scattered if one.reduces == "all" else 0.0
            begin = max(ready, within, streams.get(one.stream, 0.0), wires.get(one.wires, 0.0))
            finish = begin + one.seconds
            scattered = finish if one.reduces == "scatter" else scattered
            total += one.seconds
            wires[one.wires] = finish
            streams[one.stream] = finish
            if one.needed - start <= place:
                now = max(now, finish)
            else:
                waits.setdefault(one.needed - start, []).append(finish)
        now = max([now, *waits.pop(place, ())])
        reached[-1] = now
        if place < len(work):
            now += work[place]
            reached.append(now)
    now = max([now, *streams.values()]) if collectives else now
    return Communication(total, max(0.0, now - sum(work)), len(collectives))
