"""GPUs that wait for each other: queues played through, on made-up steps and on traced ones."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from vram_guard import Parallel
from vram_guard.budget import find_gpu
from vram_guard.parallel.collectives import Group, collective_seconds
from vram_guard.parallel.links import topology
from vram_guard.plan.communication import communication
from vram_guard.plan.step_time import step_seconds
from vram_guard.timeline import Affine, Collective, Phase, Timeline, Work

CARD = find_gpu("H100 SXM")
WIRES = topology("nvlink,ib400", gpus=8, node=8, gpu=CARD)
LAYOUT = Parallel(gpus=8, kind="fsdp2")
SIZE = 2**28
LINK = collective_seconds("all_gather_into_tensor", SIZE, Group(8), WIRES)


def work(seconds: float, phase: str = "forward", micro_batch: int = 0, operator: str = "aten.add.Tensor") -> Work:
    """An operator that the card's memory takes so many seconds for."""
    moved = Affine(round(seconds * CARD.memory_bandwidth), 0)
    return Work(operator, "", phase, False, Affine(0, 0), moved, "vector", micro_batch=micro_batch)  # type: ignore[arg-type]


def gather(position: int, stream: int = 1, **fields: object) -> Collective:
    values = {"phase": "forward", "name": "all_gather_into_tensor", **fields}
    name, phase = values.pop("name"), values.pop("phase")
    return Collective(
        name,
        "",
        phase,
        2,
        Affine(SIZE, 0),
        8,
        "shard",
        stream,
        position=position,
        **values,  # type: ignore[arg-type]
    )


def step(works: list[Work], collectives: list[Collective], layout: Parallel | None = LAYOUT) -> Timeline:
    return Timeline(
        blocks=(),
        events=(),
        phases=(Phase("setup", 0, 0),),
        traced=(2,),
        work=tuple(works),
        collectives=tuple(collectives),
        parallel=layout,
        compute_capability=(9, 0),
    )


def waiting(works: list[Work], collectives: list[Collective], **count: int) -> float:
    return communication(step(works, collectives), 2, CARD, WIRES, **count).exposed


def test_a_collective_beside_enough_work_costs_nothing() -> None:
    assert waiting([work(2 * LINK), work(LINK)], [gather(0, after=0, needed=1)]) == pytest.approx(0, abs=1e-9)


def test_what_the_work_does_not_cover_is_waited_for() -> None:
    assert waiting([work(LINK / 4), work(LINK)], [gather(0, after=0, needed=1)]) == pytest.approx(0.75 * LINK, rel=1e-6)


def test_work_that_must_come_first_is_not_beside_it() -> None:
    assert waiting([work(2 * LINK), work(LINK)], [gather(1, after=1, needed=1)]) == pytest.approx(LINK, rel=1e-6)


def test_collectives_of_one_stream_and_of_the_same_wires_follow_each_other() -> None:
    for streams in ((1, 1), (1, 3)):
        queue = [gather(0, stream, after=0, needed=1) for stream in streams]
        assert waiting([work(LINK / 2), work(LINK)], queue) == pytest.approx(1.5 * LINK, rel=1e-6)


def test_a_reduction_over_groups_begins_after_that_within_them() -> None:
    layout = Parallel(gpus=16, kind="hsdp")
    wires = topology("nvlink,ib400", gpus=16, node=8, gpu=CARD)
    within = gather(1, 3, name="reduce_scatter_tensor", phase="backward", after=1, needed=2)
    over = gather(1, 4, name="all_reduce", phase="backward", after=1, needed=2)._replace(ranks=2, dimension="replicate")
    works = [work(1e-9, "backward"), work(1e-9, "backward")]
    made = communication(step(works, [within, over], layout), 2, CARD, wires)

    assert made.exposed == pytest.approx(made.seconds, abs=1e-5)  # a kernel takes 2 microseconds


def test_gradients_of_ddp_are_reduced_beside_the_backward_pass() -> None:
    backward = [work(LINK / 2, "backward") for _ in range(8)]
    queue = [gather(place, 0, name="all_reduce", phase="backward", by_layout=True) for place in (2, 8)]
    layout = Parallel(gpus=8, kind="ddp")
    made = communication(step(backward, queue, layout), 2, CARD, WIRES)

    # The last bucket is ready when the pass ends.
    assert made.exposed == pytest.approx(made.seconds / 2, rel=1e-6)
    called = [one._replace(by_layout=False) for one in queue]
    assert communication(step(backward, called, layout), 2, CARD, WIRES).exposed == pytest.approx(made.seconds)


def test_micro_batches_gather_anew_each_time() -> None:
    both = [work(LINK, micro_batch=0), work(LINK, micro_batch=1)]
    queue = [gather(0, 0), gather(1, 0, micro_batch=1)]

    assert waiting(both, queue) == pytest.approx(2 * LINK, rel=1e-6)
    assert waiting(both, queue, micro_batches=8) == pytest.approx(8 * LINK, rel=1e-6)
    # Gradients that are reduced after the last micro-batch alone count once.
    assert waiting(both, queue[1:], micro_batches=8) == pytest.approx(LINK, rel=1e-6)


def test_one_gpu_waits_for_nobody() -> None:
    for layout in (None, Parallel(gpus=1)):
        made = communication(step([work(LINK)], [gather(0, 0)], layout), 2, CARD, WIRES)
        assert (made.seconds, made.exposed, made.calls) == (0, 0, 0)


def test_the_time_of_a_step_has_its_waiting() -> None:
    made = communication(step([work(LINK)], [gather(0, 0)]), 2, CARD, WIRES)
    time = step_seconds(step([work(LINK)], [gather(0, 0)]), 2, CARD)

    assert (time + made.step_time).seconds == pytest.approx(2 * LINK, rel=1e-3)
    assert (time + made.step_time).communication == made.exposed
