"""Buffers of reductions and sorts: against sizes recorded on GPUs, and against the sources by hand."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from each import each
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from vram_guard import Budget, TrainingStep, plan, trace
from vram_guard.budget.catalogue import catalogue
from vram_guard.plan.every_gpu import on_every_gpu
from vram_guard.scratch import (
    Card,
    EmbeddingGradient,
    PartialGradient,
    RadixSort,
    Reduction,
    reduced_iterator,
)
from vram_guard.simulate import estimate, trace_at
from vram_guard.timeline import Block, Timeline

A100, RTX4090, H100 = Card((8, 0), 108), Card((8, 9), 128), Card((9, 0), 132)


def reduction(
    shape: tuple[int, ...],
    dims: set[int],
    card: Card = A100,
    *,
    element: int = 4,
    gathered: int = 4,
    strides: tuple[int, ...] | None = None,
    offset: int = 0,
) -> list[int]:
    """Bytes of the buffer, the semaphores and the accumulator."""
    strides = strides or torch.empty(shape, device="meta").stride()
    iterated = reduced_iterator(shape, strides, dims)
    reduced = sum(dim.out_stride == 0 for dim in iterated)
    numbers = (offset, *(dim.size for dim in iterated), *(dim.stride for dim in iterated))
    return [
        Reduction(part, reduced, element, gathered).bytes(numbers, card)
        for part in ("buffer", "semaphores", "accumulator")
    ]


# --- reductions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("card", [A100, RTX4090])
def test_recorded_sums_over_rows(card: Card) -> None:
    """Recorded on an A100 and an RTX 40: 1,024 x 1,024; nothing was taken at 512 and at 1,000 rows."""
    assert reduction((1024, 1024), {0}, card) == [8_388_608, 32, 0]
    assert reduction((512, 1024), {0}, card) == [0, 0, 0]
    assert reduction((1000, 1024), {0}, card) == [0, 0, 0]


def test_recorded_maxima_and_sums_over_a_vocabulary() -> None:
    """Recorded on an H100: 10,000 words, 2,048 positions innermost; values with their indices take 16 bytes."""
    assert reduction((10_000, 2048), {0}, H100, gathered=16)[:2] == [553_648_128, 64]
    assert reduction((10_000, 2048), {0}, H100)[:2] == [138_412_032, 64]


def test_the_buffer_grows_with_the_card() -> None:
    assert reduction((4096, 4096), {0}, A100)[0] == 113_246_208
    assert reduction((4096, 4096), {0}, H100)[0] == 134_217_728


def test_a_scalar_is_gathered_by_as_many_blocks_as_the_card_holds() -> None:
    # 512 threads to a block, 4 blocks to a multiprocessor of 2,048 threads; a float32 from each.
    assert reduction((8192, 1024), {0, 1}, A100)[:2] == [4 * 108 * 4, 4]
    assert reduction((8192, 1024), {0, 1}, Card((8, 6), 82))[0] == 4 * 82 * 3
    assert reduction((512, 255), {0, 1}, A100)[0] == 0, "255 values for each thread are not spread"
    assert reduction((512, 256), {0, 1}, A100)[0] == 4 * 16


def test_few_long_rows_are_spread_and_many_are_not() -> None:
    long = reduction((4, 2**20), {1}, A100)
    # 4 rows high, 128 threads wide: 2**20 / 128 values; rows are one output each.
    assert long[:2] == [4 * 4 * math.ceil(108 * 4 / 4), 16]
    assert reduction((8192, 50257), {1}, A100) == [0, 0, 0]


def test_what_does_not_divide_by_four_is_written_in_smaller_vectors() -> None:
    four, two, one = (reduction((4096, columns), {0})[0] // columns for columns in (1024, 1026, 1027))
    assert four == 2 * two == 4 * one or four > two > one
    assert reduction((4096, 1024), {0}, offset=2) == reduction((4096, 1024), {0}, offset=6)
    assert reduction((4096, 1024), {0}, offset=2) != reduction((4096, 1024), {0}, offset=4)


def test_half_precision_gathers_beside_its_result_where_it_is_halved() -> None:
    """32-bit offsets: a tensor over 2 GiB is reduced in halves, each with the buffer of a half."""
    rows, columns = 2**17, 2**14
    buffer, semaphores, beside = reduction((rows, columns), {0}, element=2)
    assert beside == columns * 4
    assert [buffer, semaphores, 0] == reduction((rows // 2, columns), {0}, element=2)
    assert reduction((rows // 2, columns), {0}, element=2)[2] == 0


# --- sorts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "size"), [(512, 1), (2048, 1), (4096, 72_191), (8192, 138_751)])
def test_recorded_storage_of_sorts(count: int, size: int) -> None:
    """Recorded: indices into a vocabulary of 10,000, torch 2.11."""
    assert RadixSort().bytes((count, 10_000), A100) == size


def test_sorts_of_all_bits_take_all_passes() -> None:
    some, every = (RadixSort(whole=whole).bytes((4096, 10_000), A100) for whole in (False, True))
    assert every - some == 6 * 256 * 8  # eight passes instead of two; their counters share a line of 256 bytes
    one_pass = RadixSort().bytes((4096, 256), A100)
    assert one_pass == 256 * 8 + 2 * 256 * 4 + 256 + 255  # nothing to sort back and forth between


@each(
    ("capability", "width", "blocks"),
    [
        ((6, 0), 8, 7),  # 256 threads, 29 * 4 // 8 elements
        ((6, 1), 8, 6),  # 256, 30 * 4 // 8
        ((7, 0), 8, 9),  # 256, 23 * 4 // 8
        ((7, 5), 8, 9),
        ((8, 0), 8, 6),  # 384, 21 * 4 // 8
        ((8, 9), 8, 6),
        ((9, 0), 8, 5),  # 384, 24 * 4 // 8
        ((12, 0), 8, 5),
        ((7, 5), 4, 2),  # 256, 46
        ((8, 6), 4, 4),  # 384, 17
    ],
)
def test_tiles_are_those_of_the_card(capability: tuple[int, int], width: int, blocks: int) -> None:
    count = 23_000
    found = RadixSort(width).bytes((count, 10_000), Card(capability, 80))
    bins, counters, alignment = 2 * 256 * 8, 256, 255
    assert found == bins + blocks * 256 * 4 + 2 * math.ceil(count * width / 256) * 256 + counters + alignment


def test_one_tile_needs_no_storage_up_to_its_last_element() -> None:
    for width, tile in ((8, 256 * 9), (4, 256 * 19)):
        assert RadixSort(width).bytes((tile, 10_000), A100) == 1
        assert RadixSort(width).bytes((tile + 1, 10_000), A100) > 1


def test_nothing_is_sorted_where_a_threshold_says_so() -> None:
    assert RadixSort(above=3072).bytes((3072, 0), A100) == 0
    assert EmbeddingGradient("pieces", 50_000, 4).bytes((3072,), A100) == 0
    assert EmbeddingGradient("pieces", 50_000, 4).bytes((3073,), A100) == (307 + 3073) * 4


# --- cards ----------------------------------------------------------------------------------------------------------


def test_a_plan_is_for_the_card_that_is_named() -> None:
    step = TrainingStep(nn.Linear(8, 8), torch.ones(4, 8), lambda m, x: m(x).sum(), torch.optim.SGD)
    for gpu, multiprocessors in (("A30", 56), ("RTX 3060", 28)):
        made = plan(step, 4, gpu=gpu)
        assert made.timeline_before is not None
        assert made.timeline_before.card.multiprocessors == multiprocessors
        assert Budget.of(gpu).multiprocessors == multiprocessors
    unnamed = plan(step, 4, "1GiB").timeline_before
    assert unnamed is not None
    assert unnamed.card == A100 or torch.cuda.is_available()


# --- in a trace -----------------------------------------------------------------------------------------------------


def traced(model: Any, batch: Any, loss: Any = lambda model, x: model(x).sum(), **settings: Any) -> Timeline:
    return trace(TrainingStep(model, batch, loss, lambda p: torch.optim.SGD(p, lr=0.1), **settings))


def scratches(timeline: Timeline, operator: str) -> list[Block]:
    start = next(phase.start for phase in timeline.phases if phase.step == 2)
    blocks = [timeline.blocks[event] for event in timeline.events[start:] if event >= 0]
    return [block for block in blocks if block.scratch is not None and block.operator.startswith(operator)]


def test_gradients_of_biases_follow_the_law_at_every_size_and_on_every_card() -> None:
    step = TrainingStep(
        nn.Linear(512, 1024), torch.ones(4, 512), lambda m, x: m(x).square().mean(), lambda p: torch.optim.SGD(p, lr=1)
    )
    timeline = trace(step)
    assert timeline.retrace is None
    for size in (1000, 1024, 5000):
        buffer, semaphores = (block.bytes_at(size) for block in scratches(timeline, "aten.sum.dim_IntList"))
        assert [buffer, semaphores, 0] == reduction((size, 1024), {0})
        assert timeline.at(size).peak_reserved == estimate(step, size).peak_reserved
        for multiprocessors in (56, 108):
            direct = trace_at(step, size).on(multiprocessors)
            assert direct.sizes(size) == timeline.on(multiprocessors).sizes(size)
    assert timeline.on(20).at(8192).peak_reserved < timeline.at(8192).peak_reserved


class Shift(nn.Module):
    """A bias whose gradient is summed over rows that are otherwise not kept."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(4096))
        self.register_buffer("weight", torch.zeros(4096, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.bias) @ self.weight


def test_cards_of_one_capability_are_told_apart() -> None:
    large, small = (next(gpu for gpu in catalogue() if gpu.name == name) for name in ("A100 PCIe 40GB", "A30"))
    timeline = trace(
        TrainingStep(Shift(), lambda size: torch.zeros(size, 4096), lambda m, x: m(x).sum(), torch.optim.SGD)
    )
    found = on_every_gpu(lambda _capability: timeline, [large, small], limit=8192)
    assert [each.largest_batch for each in found] == [8192, 8192]
    assert found[0].peak > found[1].peak


class Reduced(nn.Module):
    """Some reduction of an input that wants a gradient."""

    def __init__(self, reduce: Any) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.reduce = reduce

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.reduce(x).float() * self.scale).sum()


@each(
    ("reduce", "operator", "gathered"),
    [
        (lambda x: x.max(0).values, "aten.max.dim", 16),
        (lambda x: x.argmax(0), "aten.argmax", 16),
        (lambda x: x.amax(0), "aten.amax", 4),
        (lambda x: x.var(0), "aten.var.correction", 16),
        (lambda x: x.norm(dim=0), "aten.linalg_vector_norm", 4),
        (lambda x: x.half().sum(0), "aten.sum.dim_IntList", 4),
        (lambda x: x.bfloat16().amin(0), "aten.amin", 2),
        (lambda x: x.double().mean(0), "aten.mean.dim", 8),
        (lambda x: (x > 0).any(0), "aten.any.dim", 1),
    ],
)
def test_each_reduction_gathers_in_its_own_type(reduce: Any, operator: str, gathered: int) -> None:
    timeline = traced(Reduced(reduce), lambda size: torch.zeros(512 * size, 1024), lambda m, x: m(x))
    rules = [block.scratch.rule for block in scratches(timeline, operator) if block.scratch is not None]
    first = next(rule for rule in rules if isinstance(rule, Reduction) and rule.part == "buffer")
    assert first.accumulated == gathered
    sizes = [block.bytes_at(4) for block in scratches(timeline, operator)]
    expected = reduction((2048, 1024), {0}, element=first.element, gathered=gathered)
    assert expected[0] in sizes


def test_the_gradient_of_a_convolution_s_bias_is_such_a_sum() -> None:
    model = nn.Conv2d(3, 8, 3)
    timeline = traced(model, lambda size: torch.zeros(size, 3, 66, 66), lambda m, x: m(x).square().sum())
    # 64 x 64 positions of 32 samples to each of 8 channels.
    found = [block.bytes_at(32) for block in scratches(timeline, "aten.convolution_backward")]
    assert found == reduction((32, 8, 64, 64), {0, 2, 3})[:2]
    assert found[0] > 0


class Looked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(10_000, 16))

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.table[index]


def test_the_backward_of_indexing_sorts_its_indices() -> None:
    """The order of one recorded run of 4,096 indices: wrapped, multiplied, sorted, order, range, CUB's."""
    timeline = traced(
        Looked(), lambda size: torch.zeros(size, 1024, dtype=torch.long), lambda m, x: m(x).square().sum()
    )
    start = next(p.start for p in timeline.phases if p.name == "backward" and p.step == 2)
    events = [event for event in timeline.events[start:] if "index_put" in timeline.blocks[max(event, ~event)].operator]
    sizes = [timeline.blocks[max(event, ~event)].bytes_at(4) * (1 if event >= 0 else -1) for event in events]
    indices = 4 * 1024 * 8
    assert sizes == [
        *(indices, indices, -indices),
        *(indices, indices, indices, 72_191),
        *(-72_191, -indices, -indices, -indices, -indices),
    ]


def test_an_embedding_copies_indices_that_are_not_in_order() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(50, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.embedding(x[:, :-1])

    def copies(model: nn.Module) -> list[int]:
        timeline = traced(model, lambda size: torch.zeros(size, 101, dtype=torch.long))
        found = [b for b in timeline.blocks if b.operator == "aten.embedding.default" and b.category == "temporaries"]
        return [block.bytes_at(4) for block in found]

    assert [size for size in copies(Shifted()) if size != 4 * 100 * 8 * 4] == [4 * 100 * 8] * 2
    assert set(copies(nn.Embedding(50, 8))) == {4 * 101 * 8 * 4}


def test_the_first_workspace_comes_after_the_product() -> None:
    timeline = traced(nn.Linear(64, 64, bias=False), torch.zeros(4, 64))
    made = [timeline.blocks[event] for event in timeline.events if event >= 0]
    first = next(at for at, block in enumerate(made) if block.category == "workspace")
    assert made[first - 1].operator == made[first].operator == "aten.mm.default"
    assert made[first - 1].bytes_at(4) == 4 * 64 * 4


# --- gradients of norms ---------------------------------------------------------------------------------------------


def test_gradients_of_norms_over_many_rows_are_summed_in_parts() -> None:
    def sizes(rows: int, columns: int, card: Card = A100) -> list[int]:
        parts = ("rows", "result", "buffer", "semaphores")
        return [PartialGradient(part, columns, 4, 4).bytes((rows,), card) for part in parts]

    assert sizes(65_536, 256) == [0] * 4, "not above the threshold"
    # 8 blocks of columns leave room for 4,096 of rows; 65,568 rows are 2,049 blocks of 32.
    assert sizes(65_568, 256) == [2049 * 256 * 4, 1024, *reduction((2049, 256), {0})[:2]]
    assert sizes(2**20, 256)[0] == 4096 * 256 * 4
    assert sizes(2**20, 1728) == [0] * 4, "54 blocks of columns are half of an A100"
    assert sizes(2**20, 1728, H100)[0] > 0


def test_a_group_norm_holds_two_numbers_by_channel_for_a_moment() -> None:
    timeline = traced(nn.GroupNorm(2, 8), lambda size: torch.zeros(size, 8, 4, 4, dtype=torch.float32))
    made = [
        b for b in timeline.blocks if b.operator == "aten.native_group_norm.default" and b.category == "temporaries"
    ]
    assert [block.bytes_at(5) for block in made if block.bytes_at(5) == 5 * 8 * 4] == [5 * 8 * 4] * 4  # two steps


def test_norms_of_all_gradients_are_gathered_chunk_by_chunk() -> None:
    model = nn.Sequential(nn.Linear(1000, 1000), nn.Linear(1000, 10))
    timeline = traced(model, lambda size: torch.zeros(size, 1000), clip_grad_norm=1.0)
    sizes = [b.bytes_at(4) for b in timeline.blocks if "_foreach_norm" in b.operator]
    chunks = math.ceil(1000 * 1000 / 65536)
    assert sizes[:5] == [4 * chunks * 4, 4, 4, 4, 4]


def test_a_softmax_copies_what_is_not_contiguous() -> None:
    def copies(view: Any) -> list[int]:
        timeline = traced(Reduced(lambda x: torch.softmax(view(x), -1)), lambda size: torch.zeros(size, 64, 32), run)
        made = [b for b in timeline.blocks if b.operator == "aten._softmax.default" and b.category == "temporaries"]
        return [block.bytes_at(3) for block in made]

    def run(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x)

    plain, turned = copies(lambda x: x), copies(lambda x: x.transpose(1, 2))
    assert len(turned) == len(plain) + 2, "one more in each of two steps"
    assert set(turned) == {3 * 64 * 32 * 4}


def test_an_index_in_host_memory_is_copied_for_the_call() -> None:
    """As ``logits[torch.arange(n), labels]``: one copy forward, and in the backward one buffer less than on the GPU."""

    def held(device: str) -> tuple[int, int]:
        step = TrainingStep(
            model=lambda: nn.Linear(8, 512),
            batch=lambda size: torch.zeros(size, 8),
            loss=lambda model, batch: model(batch)[torch.arange(64, device=device)].sum(),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        )
        sizes = [(b.operator, b.bytes_at(64)) for b in trace_at(step, 64).blocks if b.bytes_at(64) == 64 * 8]
        return tuple(sum(name.startswith(f"aten.{kind}.") for name, _size in sizes) for kind in ("index", "index_put"))

    (on_gpu, back), (on_host, back_from_host) = held("cuda"), held("cpu")
    assert (on_host - on_gpu, back_from_host - back) == (2, -2)  # in each of two steps


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_each_result_gathers_the_same_elements_whatever_the_order(data: Any) -> None:
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    order = data.draw(st.permutations(range(len(shape))))
    back = [order.index(dim) for dim in range(len(shape))]
    tensor = torch.empty([shape[dim] for dim in order]).permute(back)
    dims = data.draw(st.sets(st.integers(0, len(shape) - 1), min_size=1))
    seen = reduced_iterator(tensor.shape, tensor.stride(), dims)
    gathered: dict[int, set[int]] = {}
    for places in itertools.product(*(range(dim.size) for dim in seen)):
        out = sum(place * dim.out_stride for place, dim in zip(places, seen, strict=True))
        read = sum(place * dim.stride for place, dim in zip(places, seen, strict=True))
        gathered.setdefault(out, set()).add(read)
    offsets = torch.empty(shape, dtype=torch.long)
    results = torch.empty(shape, dtype=torch.long)
    kept = [dim for dim in range(len(shape)) if dim not in dims]
    for places in itertools.product(*map(range, shape)):
        offsets[places] = sum(place * stride for place, stride in zip(places, tensor.stride(), strict=True))
        results[places] = sum(places[dim] * math.prod(shape[later] for later in kept if later > dim) for dim in kept)
    expected = {int(one): {int(each) for each in offsets[results == one]} for one in results.unique()}
    assert gathered == expected
    assert [dim.out_stride == 0 for dim in seen] == sorted((dim.out_stride == 0 for dim in seen), reverse=True)
    for one, other in itertools.pairwise(seen):
        if (one.out_stride == 0) == (other.out_stride == 0):
            key = "out_stride" if one.out_stride else "stride"
            assert getattr(one, key) <= getattr(other, key), "the innermost comes first"
            assert (one.size * one.stride, one.size * one.out_stride) != (other.stride, other.out_stride), "not joined"


def test_counting_a_mask_makes_int64_of_it_first() -> None:
    timeline = traced(Reduced(lambda x: (x > 0).sum()), lambda size: torch.zeros(size, 5000), lambda m, x: m(x))
    sizes = [b.bytes_at(3) for b in timeline.blocks if b.operator == "aten.sum.default" and b.scratch is None]
    assert 3 * 5000 * 8 in sizes


@pytest.mark.parametrize(("norm", "weights"), [(nn.LayerNorm, 2), (getattr(nn, "RMSNorm", nn.LayerNorm), 1)])
@pytest.mark.skipif(not hasattr(torch.ops.aten, "_fused_rms_norm_backward"), reason="a kernel of torch 2.8 and 2.9")
def test_a_trace_has_the_parts_of_both_gradients(norm: Any, weights: int) -> None:
    timeline = traced(norm(256), lambda size: torch.zeros(size, 256), lambda m, x: m(x).square().sum())
    for operator in ("aten.native_layer_norm_backward", "aten._fused_rms_norm_backward"):
        blocks = scratches(timeline, operator)
        if blocks:
            assert [block.bytes_at(65_536) for block in blocks] == [0] * 4 * weights
            found = [block.bytes_at(2**20) for block in blocks]
            assert found[:weights] == [4096 * 256 * 4] * weights
            assert found[weights : weights + 3] == [1024, *reduction((4096, 256), {0})[:2]]
            return
    pytest.fail("no parts")
