"""One rank of FSDP2 or HSDP over N pretended GPUs, in a trace; and ``install`` in a real process."""

from __future__ import annotations

import sys
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from parallel_cases import LENGTH, WORDS, Net, step
from torch import nn

from vram_guard import Parallel, trace
from vram_guard.errors import InvalidInputError, UnsupportedStepError, UnsupportedTechniqueError
from vram_guard.parallel.install import install
from vram_guard.parallel.meshes import make_mesh
from vram_guard.simulate import holds_at
from vram_guard.simulate.tracing.run import run_step
from vram_guard.techniques import Recipe

pytestmark = pytest.mark.torch_since(2, 6)

LAYOUTS = {
    "resharded": Parallel(8, kind="fsdp2"),
    "kept": Parallel(8, kind="fsdp2", reshard=False),
    "over 2": Parallel(8, kind="fsdp2", reshard=2),
    "mixed": Parallel(8, kind="fsdp2", param_dtype="bf16", reduce_dtype="fp32"),
    "offloaded": Parallel(8, kind="fsdp2", offload=True),
    "uneven": Parallel(7, kind="fsdp2"),
    "hsdp": Parallel(16, kind="hsdp", param_dtype="bf16", reduce_dtype="fp32"),
}


def traced(parallel, rank=0, **settings):
    return run_step(step(parallel, **settings), 2, (9, 0), rank=rank)


def sizes(timeline, category, phase="setup"):
    end = next(one.start for one in timeline.phases if one.name != phase)
    made = [event for event in timeline.events[:end] if event >= 0 and ~event not in timeline.events[:end]]
    return [timeline.blocks[i].size.base for i in made if timeline.blocks[i].category == category]


def shard(parameter, ranks, rank=0):
    """Bytes of a rank's part, cut along the first dimension as ``torch.chunk`` cuts."""
    rows = parameter.shape[0]
    most = -(-rows // ranks)
    return max(0, min(most, rows - rank * most)) * (parameter[0].numel()) * 4


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_batches_of_two_and_three_say_what_seven_takes_event_by_event(layout):
    timeline = trace(step(layout), check_at=7)
    assert timeline.traced == (2, 3, 7)
    assert not timeline.notes
    direct = run_step(step(layout), 7, (8, 0))
    assert holds_at(direct, timeline, 7)
    assert timeline.parallel == direct.parallel == layout


@pytest.mark.parametrize("ranks", [2, 7, 8, 64])
def test_a_rank_has_its_part_of_every_parameter(ranks):
    timeline = traced(Parallel(ranks, kind="fsdp2"))
    assert Counter(sizes(timeline, "parameters")) == Counter(shard(p, ranks) for p in Net().parameters())
    states = [b.size.base for b in timeline.blocks if b.category == "optimizer_states"]
    assert sum(states) == 2 * sum(shard(p, ranks) for p in Net().parameters())


def test_unsharded_parameters_are_there_one_block_at_a_time_or_all():
    def most(layout):
        timeline = traced(layout)
        parts = sum(shard(p, layout.shards) for p in Net().parameters())
        live = peak = 0
        for event in timeline.events:
            block = timeline.blocks[max(event, ~event)]
            if block.category == "parameters" and block.size.base:
                live += block.size.base if event >= 0 else -block.size.base
                peak = max(peak, live)
        return peak - parts

    block = sum(p.numel() for p in Net().blocks[0].parameters()) * 4
    rest = sum(p.numel() for name, p in Net().named_parameters() if "blocks" not in name) * 4
    padding = 0.05
    assert most(LAYOUTS["kept"]) == pytest.approx(3 * block + rest, rel=padding)
    assert most(LAYOUTS["resharded"]) == pytest.approx(block + rest, rel=padding)


def test_collectives_are_written_down_with_bytes_ranks_and_dimension():
    timeline = traced(LAYOUTS["hsdp"])
    second = [c for c in timeline.collectives if c.step == 2]
    block = sum(-(-p.shape[0] // 8) * 8 * p[0].numel() for p in Net().blocks[0].parameters())
    rest = sum(-(-p.shape[0] // 8) * 8 * p[0].numel() for n, p in Net().named_parameters() if "blocks" not in n)
    told = Counter((c.name, c.ranks, c.dimension, c.bytes.base) for c in second if c.phase != "optimizer")
    assert told == {
        ("all_gather_into_tensor", 8, "shard", 2 * rest): 1,  # stays from the forward to the backward
        ("all_gather_into_tensor", 8, "shard", 2 * block): 6,
        ("reduce_scatter_tensor", 8, "shard", 4 * block): 3,
        ("reduce_scatter_tensor", 8, "shard", 4 * rest): 1,
        ("all_reduce", 2, "replicate", 4 * block // 8): 3,
        ("all_reduce", 2, "replicate", 4 * rest // 8): 1,
    }
    gathers = [c for c in second if c.phase == "forward"]
    assert [c.position for c in gathers] == sorted({c.position for c in gathers})
    assert second[-1].position <= len(timeline.work)
    assert {c.micro_batch for c in traced(LAYOUTS["hsdp"], accumulate=2).collectives if c.step == 2} == {0, 1}


def test_offloaded_parts_lie_in_host_memory():
    layout = LAYOUTS["offloaded"]
    parts = sum(shard(p, 8) for p in Net().parameters())
    for model in (Net, Net()):
        timeline = traced(layout, model=model)
        assert not any(b.category == "optimizer_states" for b in timeline.blocks)
        assert timeline.at(2).host_peak >= 4 * parts
        assert timeline.at(2).breakdown["buffers"] == 512


def test_the_blocks_that_are_named_are_the_groups():
    def gathers(blocks):
        found = traced(Parallel(8, kind="fsdp2", blocks=blocks)).collectives
        return sum(c.name == "all_gather_into_tensor" and c.step == 2 for c in found)

    assert gathers(None) == gathers(("blocks.0", "blocks.1", "blocks.2")) == 7
    assert gathers(("blocks.1",)) == 3
    # One inside the other, in whatever order they are named.
    assert gathers(("blocks.1", "blocks.1.norm")) == gathers(("blocks.1.norm", "blocks.1")) == 5


def test_bad_input_is_refused_before_any_work():
    with pytest.raises(InvalidInputError, match="returned a NoneType"):
        traced(Parallel(2, apply=lambda model, mesh: None))
    with pytest.raises(InvalidInputError, match=r"blocks\.9"):
        traced(Parallel(2, kind="fsdp2", blocks=("blocks.9",)))
    with pytest.raises(UnsupportedTechniqueError, match=r"Parallel\(offload=True\)"):
        traced(Parallel(2, kind="fsdp2"), recipe=Recipe(parameters_on_host=("blocks.0",)))

    class Tied(Net):
        def __init__(self):
            super().__init__()
            self.blocks[2].up.weight = self.blocks[1].up.weight

    with pytest.raises(UnsupportedTechniqueError, match=r"blocks\.2\.up\.weight"):
        traced(Parallel(2, kind="fsdp2", blocks=("blocks.1",)), model=Tied)
    found = [c for c in traced(Parallel(2, kind="fsdp2"), model=Tied).collectives if c.step == 2]
    assert sum(c.name == "all_gather_into_tensor" for c in found) == 3, "the two that share are gathered with the rest"
    assert not dist.is_initialized()


@pytest.fixture
def gloo():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("gloo")
def test_a_training_that_is_sharded_already_is_refused():
    model = install(Net(), Parallel(1, kind="fsdp2"), make_mesh(Parallel(1, kind="fsdp2"), "cpu"))
    with pytest.raises(UnsupportedStepError, match="DTensor"):
        traced(Parallel(8, kind="fsdp2"), model=model)


@pytest.mark.usefixtures("gloo")
def test_a_process_with_a_group_of_its_own_keeps_it_and_a_real_model_is_sharded_after_a_trace():
    layout = Parallel(1, kind="fsdp2")
    before, world = traced(layout), dist.group.WORLD
    mesh = make_mesh(layout, "cpu")
    many = traced(Parallel(64, kind="fsdp2"))
    assert dist.group.WORLD is world
    assert dist.get_world_size() == 1
    assert many.events != before.events
    model = install(Net(), layout, mesh)
    loss = model(torch.zeros(2, LENGTH, dtype=torch.long)).sum()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.optim.AdamW(model.parameters()).step()
    total = torch.ones(1)
    dist.all_reduce(total)
    assert traced(layout).events == before.events


def test_a_trace_leaves_nothing_behind_even_after_an_error():
    class FailedError(Exception):
        pass

    def fails(model, words):
        model(words).sum().backward()
        raise FailedError

    model = Net()
    kinds, hook = [type(module) for module in model.modules()], sys.excepthook
    before = {name: (id(p), p.clone()) for name, p in model.named_parameters()}
    with pytest.raises(FailedError):
        traced(Parallel(8, kind="fsdp2"), model=model, loss=fails)
    assert not dist.is_initialized()
    assert sys.excepthook is hook
    assert [type(module) for module in model.modules()] == kinds
    assert all(id(p) == before[n][0] and torch.equal(p, before[n][1]) for n, p in model.named_parameters())
    first, again = traced(Parallel(8, kind="fsdp2"), model=model), traced(Parallel(8, kind="fsdp2"), model=model)
    assert first.events == again.events
    assert first.collectives == again.collectives


def test_the_last_rank_pads_its_smaller_parts_and_gathers_as_much():
    layout = LAYOUTS["uneven"]
    first, last = traced(layout), traced(layout, rank=6)
    assert Counter(sizes(first, "parameters")) == Counter(sizes(last, "parameters"))
    states = [sum(b.size.base for b in one.blocks if b.category == "optimizer_states") for one in (first, last)]
    assert states == [2 * sum(shard(p, 7, rank) for p in Net().parameters()) for rank in (0, 6)]
    assert states[0] > states[1]
    assert [c.bytes for c in first.collectives] == [c.bytes for c in last.collectives]
    assert last.at(2).peak_allocated < first.at(2).peak_allocated < 1.05 * last.at(2).peak_allocated


def test_the_loss_is_called_with_what_apply_returns():
    class Wrapper(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, words):
            return self.module(words) * 2

    seen = []

    def loss(model, words):
        seen.append(type(model).__name__)
        return model(words).sum()

    def apply(model, mesh):
        return Wrapper(model.to_empty(device="cuda"))

    timeline = traced(Parallel(2, apply=apply), loss=loss)
    assert seen == ["Wrapper", "Wrapper"]
    assert any(b.operator == "aten.mul.Tensor" and b.size.base == 2 * LENGTH * WORDS * 4 for b in timeline.blocks)


def test_more_ranks_than_rows_take_a_row_each():
    timeline = traced(Parallel(2**10, kind="fsdp2"))
    gathered = max(c.bytes.base for c in timeline.collectives)
    assert gathered == 2**10 * sum(p[0].numel() for p in Net().blocks[0].parameters()) * 4


def test_collectives_run_on_streams_of_their_own_and_gathered_memory_with_them():
    timeline = traced(LAYOUTS["hsdp"])
    streams = {(c.name, c.dimension): c.stream for c in timeline.collectives if c.phase != "optimizer"}
    assert len(set(streams.values()) | {0}) == 4
    sharded = streams["reduce_scatter_tensor", "shard"]  # where it is reduced, the gradient stays
    assert {b.stream for b in timeline.blocks if b.category == "gradients"} == {0, sharded}
    assert timeline.at(2).by_stream[sharded] > 0


def test_more_ranks_than_rows_are_traced_as_quickly():
    """torch's own list of parts has one for every rank and parameter; a trace makes those that are asked for."""
    few, many = traced(Parallel(64, kind="fsdp2")), traced(Parallel(2**17, kind="fsdp2"))
    assert many.events == few.events
    rows = {name: parameter.shape[0] for name, parameter in Net().named_parameters()}
    assert sum(sizes(many, "parameters")) == sum(shard(p, 2**17) for p in Net().parameters())
    assert max(rows.values()) < 2**17


def test_equal_meshes_of_two_traces_are_told_apart():
    """DTensor remembers meshes, and these name groups, which are others in the next trace."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    def applied(*, after_another):
        def apply(model, mesh):
            if after_another:
                init_device_mesh("cuda", (4, 2))
            pairs = init_device_mesh("cuda", (2, 4), mesh_dim_names=("pairs", "fours"))
            part = DTensor.from_local(torch.zeros(4, 4, device="cuda"), pairs, [Shard(0), Replicate()], run_check=False)
            (part * 2).full_tensor()
            return model.to_empty(device="cuda")

        return traced(Parallel(8, apply=apply)).collectives

    first, second = applied(after_another=False), applied(after_another=True)
    assert {(c.name, c.ranks, c.dimension) for c in first} == {("all_gather_into_tensor", 2, "pairs")}
    assert first == second
