"""Laws in the batch size from a trace of the whole step and others of a part of it, held against laws of the whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from parallel_cases import Net, loss, step  # noqa: E402
from torch import nn  # noqa: E402, TC002

from vram_guard import Timeline, plan  # noqa: E402
from vram_guard.compose import CannotComposeError, of_every_size  # noqa: E402
from vram_guard.plan.source import Source, TraceRequest, source_of  # noqa: E402
from vram_guard.plan.tracing import Traces  # noqa: E402
from vram_guard.timeline import Affine, Block, HostBlock, Phase, Work  # noqa: E402

AMPERE = (8, 0)
BATCH = 12
DEPTH = 12


def source(model: Any = None, **settings: Any) -> Source:
    return source_of(step(model=model or (lambda: Net(blocks=DEPTH)), **settings), AMPERE)


class Gathering(Net):
    """Each block's result is kept in one tensor, which grows with the number of blocks."""

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x, every = self.embedding(words), []
        for block in self.blocks:
            x = block(x)
            every.append(x)
        return self.head(torch.stack(every).mean(0)) * self.scale


@pytest.mark.parametrize("model", [Net, Gathering])
def test_plans_are_those_of_traces_at_two_sizes(model: type[Net], monkeypatch: pytest.MonkeyPatch) -> None:
    written = step(model=lambda: model(blocks=DEPTH))
    peak = source_of(written, AMPERE).trace(TraceRequest(BATCH, "32-true")).at(BATCH).peak_reserved

    def made(share: float) -> tuple[Any, ...]:
        found = plan(written, BATCH, int(peak * share), margin=0, allow=["checkpoint", "accumulate"])
        return found.fits, found.changes(), found.peak, found.slowdown

    shares = (0.8, 0.6)
    few = [made(share) for share in shares]
    monkeypatch.setattr(Traces, "_law_of_part", lambda _self, _request: None)
    assert few == [made(share) for share in shares]


@pytest.mark.parametrize("batch", [11, BATCH])
def test_the_plan_that_is_taken_knows_its_work(batch: int) -> None:
    made = plan(step(model=lambda: Net(blocks=DEPTH)), batch, "1GiB", pin={"offload_activations": "all"})
    assert made.timeline is not None
    assert made.timeline.work
    assert batch in made.timeline.traced


@pytest.mark.parametrize("batch", [1, 2, BATCH])
def test_a_batch_grows_to_what_a_trace_of_it_takes(batch: int) -> None:
    """The loss allocates more from a hundred samples on, which no smaller batch shows."""

    def late(model: nn.Module, words: torch.Tensor) -> torch.Tensor:
        out = model(words)
        if len(words) >= 100:
            out = torch.cat([out] * 8)
        return out.flatten(0, 1).logsumexp(-1).mean()

    written = step(loss=late, model=lambda: Net(blocks=DEPTH))
    made = plan(written, batch, "200MiB", grow=True, margin=0)
    assert made.batch_size >= 100
    direct = source_of(written, AMPERE).trace(TraceRequest(made.batch_size, "32-true")).at(made.batch_size)
    assert made.peak == direct.peak_reserved
    assert direct.peak_reserved <= 200 * 2**20


def test_a_batch_that_the_code_refuses_is_not_grown_to() -> None:
    def few(model: nn.Module, words: torch.Tensor) -> torch.Tensor:
        assert len(words) <= 64, "more than 64 samples"
        return loss(model, words)

    made = plan(step(loss=few), BATCH, "1GiB", grow=True, margin=0)
    assert made.batch_size == BATCH


# --- the function itself ------------------------------------------------------------------------------------------


def timeline(sizes: list[tuple[str, Affine]], traced: tuple[int, ...] = (2, 3), **changes: Any) -> Timeline:
    blocks = tuple(Block(size, "activations", name, "", "aten.op") for name, size in sizes)
    return Timeline(blocks, tuple(range(len(blocks))), (Phase("forward", 1, 0),), traced, **changes)


def exact(law: Timeline, size: int) -> Timeline:
    blocks = tuple(block._replace(size=Affine(block.size.at(size), 0)) for block in law.blocks)
    return Timeline(blocks, law.events, law.phases, (size,))


AFFINE = st.builds(Affine, st.integers(0, 4), st.integers(0, 4))


@given(st.lists(st.tuples(st.sampled_from("ab"), AFFINE)), st.integers(2, 9))
def test_what_follows_a_law_is_found_to_follow_it(sizes: list[tuple[str, Affine]], size: int) -> None:
    law = timeline(sizes)
    said = of_every_size(exact(law, size), law)
    assert said.blocks == law.blocks
    assert said.traced == (size,)


def test_two_of_a_kind_that_are_as_large_are_told_apart_by_their_order_or_not_at_all() -> None:
    weight, activation = Affine(32, 0), Affine(0, 8)
    part = timeline([("a", activation), ("a", weight)])
    assert [one.size for one in of_every_size(exact(part, 4), part).blocks] == [activation, weight]
    phases = Phase("forward", 1, 0), Phase("forward", 2, 2)
    turned = timeline([("a", activation), ("a", weight), ("a", weight), ("a", activation)])
    turned = replace(turned, phases=phases)
    with pytest.raises(CannotComposeError):
        of_every_size(exact(turned, 4), turned)
    assert of_every_size(exact(turned, 5), turned).blocks == turned.blocks


def test_order_says_nothing_where_a_row_is_another() -> None:
    weight, activation = Affine(32, 0), Affine(0, 8)
    part = timeline([("a", activation), ("a", weight)])
    longer = timeline([("a", Affine(32, 0))] * 3, traced=(4,))
    with pytest.raises(CannotComposeError):
        of_every_size(longer, part)


def test_what_no_part_has_is_refused_unless_nothing_of_its_kind_grows() -> None:
    part = timeline([("a", Affine(0, 8)), ("b", Affine(64, 0))])
    whole = timeline([("b", Affine(512, 0))], traced=(4,))
    assert of_every_size(whole, part).blocks == whole.blocks
    with pytest.raises(CannotComposeError):
        of_every_size(timeline([("a", Affine(512, 0))], traced=(4,)), part)


def test_of_fewer_blocks_what_does_not_grow_is_as_large_as_it_is_whatever_else_is() -> None:
    part = timeline([("net.blocks.0", Affine(64, 0)), ("elsewhere", Affine(0, 128))])
    whole = timeline([("net.blocks.5", Affine(512, 0))], traced=(4,))
    assert of_every_size(whole, part, ["net.blocks"]).blocks == whole.blocks


def test_blocks_of_a_stack_are_of_one_kind_whatever_their_number() -> None:
    part = timeline([("net.blocks.0.up", Affine(0, 8)), ("net.tail.0.up", Affine(32, 0))])
    whole = timeline([("net.blocks.7.up", Affine(32, 0))], traced=(4,))
    with pytest.raises(CannotComposeError):
        of_every_size(whole, part)
    assert of_every_size(whole, part, ["net.blocks"]).blocks[0].size == Affine(0, 8)


def test_a_copy_on_the_host_grows_as_what_is_copied() -> None:
    part = timeline([("a", Affine(0, 8))])
    whole = timeline([("a", Affine(32, 0))], traced=(4,), host_blocks=(HostBlock(Affine(32, 0)),), host_events=(0,))
    assert of_every_size(whole, part).host_blocks == (HostBlock(Affine(0, 8)),)


def test_work_without_an_equal_grows_as_the_nearest_of_its_kind() -> None:
    def work(flops: Affine) -> Work:
        return Work("aten.mm.default", "a", "forward", False, flops, Affine(0, 0), "fp32")

    part = timeline([], work=(work(Affine(0, 10)), work(Affine(0, 1000))))
    whole = timeline([], traced=(4,), work=(work(Affine(44, 0)), work(Affine(4000, 0)), work(Affine(2, 0))))
    said = [one.flops for one in of_every_size(whole, part).work]
    assert said == [Affine(4, 10), Affine(0, 1000), Affine(0, 1)]
    other = work(Affine(44, 0))._replace(module="b", operator="aten.bmm.default")
    with pytest.raises(CannotComposeError):
        of_every_size(timeline([], traced=(4,), work=(other,)), part)
