"""The cost model: laws that hold for any work, and what it says of real steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from architectures import BY_NAME, adamw
from each import each
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from vram_guard import TrainingStep, trace
from vram_guard.budget.catalogue import catalogue, find_gpu
from vram_guard.errors import InvalidInputError
from vram_guard.plan.roofline import (
    HOST_PER_CHECKPOINTED_CALL,
    HOST_PER_OPERATOR,
    HOST_PER_SELECTED_OPERATOR,
    HOST_PER_TRAINED_OPERATOR,
    LAUNCH,
    PINNED_SHARE,
    flops_per_second,
)
from vram_guard.plan.step_time import (
    StepTime,
    assumed_gpu,
    forward_seconds_by_module,
    offload_seconds,
    recompute_seconds,
    relative_cost,
    step_seconds,
)
from vram_guard.timeline import Affine, Timeline, Work

#: torch 2.4's own checkpoint.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.cpu.amp.autocast:FutureWarning")

A100 = find_gpu("A100 SXM4 80GB")
laws = settings(max_examples=100, deadline=None)


def matmul(flops: int, moved: int = 0, unit: str = "bf16", **changes: object) -> Work:
    work = Work("aten.mm.default", "", "forward", False, Affine(0, flops), Affine(0, moved), unit)  # type: ignore[arg-type]
    return work._replace(**changes)


def timeline_of(*work: Work) -> Timeline:
    return Timeline(blocks=(), events=(), phases=(), traced=(2, 3), work=work)


affine = st.builds(Affine, st.integers(0, 2**40), st.integers(0, 2**36))
works = st.lists(
    st.builds(
        Work,
        st.sampled_from(["aten.mm.default", "aten.add.Tensor", "aten._to_copy.default"]),
        st.sampled_from(["", "a", "a.b", "a.b.c", "ab"]),
        st.sampled_from(["batch", "forward", "backward", "optimizer"]),
        st.booleans(),
        affine,
        affine,
        st.sampled_from(["vector", "fp32", "tf32", "3xtf32", "fp16", "bf16", "fp64", "host"]),
        st.integers(1, 500),
        st.one_of(st.just(Affine(0, 0)), affine),
        st.integers(0, 1),
        st.booleans(),
        st.integers(0, 2),
    ),
    min_size=1,
    max_size=12,
)
gpus = st.sampled_from(catalogue())
sizes = st.integers(1, 512)


# --- laws ---------------------------------------------------------------------------------------------------------


@laws
@given(works, gpus, sizes, sizes)
def test_more_samples_never_take_less_time(work, gpu, one, more):
    timeline = timeline_of(*work)
    small, large = sorted((one, more))
    assert step_seconds(timeline, small, gpu).seconds <= step_seconds(timeline, large, gpu).seconds * (1 + 1e-12)


@laws
@given(works, gpus, sizes, st.integers(1, 64))
def test_more_micro_batches_never_take_less_time(work, gpu, size, count):
    timeline = timeline_of(*work)
    few, more = (step_seconds(timeline, size, gpu, micro_batches=n).seconds for n in (count, count + 1))
    assert few <= more * (1 + 1e-12)


@laws
@given(works, gpus, sizes, st.floats(1, 10))
def test_a_better_card_is_never_slower(work, gpu, size, factor):
    def better(value: int | None) -> int | None:
        return None if value is None else int(value * factor)

    figures = ("fp32_flops", "tf32_flops", "fp16_flops", "bf16_flops", "memory_bandwidth")
    faster = replace(gpu, **{name: better(getattr(gpu, name)) for name in figures})
    timeline = timeline_of(*work)
    assert step_seconds(timeline, size, faster).seconds <= step_seconds(timeline, size, gpu).seconds * (1 + 1e-9)


@laws
@given(works, gpus, sizes, st.sets(st.sampled_from(["a", "a.b", "a.b.c", "ab"])))
def test_recomputing_more_modules_never_costs_less_and_never_more_than_the_forward(work, gpu, size, modules):
    chosen = recompute_seconds(work, modules, size, gpu)
    everything = recompute_seconds(work, {"", *modules}, size, gpu)
    forward = sum(part.device for part in forward_seconds_by_module(work, size, gpu).values())
    assert chosen.device <= forward * (1 + 1e-9)
    assert everything.device <= forward * (1 + 1e-9)
    assert recompute_seconds(work, (), size, gpu).seconds == 0


@laws
@given(works, gpus, sizes)
def test_the_parts_add_up_to_the_whole(work, gpu, size):
    time = step_seconds(timeline_of(*work), size, gpu, micro_batches=2)
    whole = time.compute + time.memory + time.launches + time.transfers + time.host
    assert time.seconds == pytest.approx(whole)
    assert time.seconds >= time.device
    assert (time + time).device == pytest.approx(time.times(2).device)


def test_checkpointing_takes_the_hosts_time_for_each_call_and_selecting_for_each_operator():
    tail = matmul(1)._replace(module="b")
    work = [matmul(1)._replace(module="a", operator="aten.tanh.default"), tail] * 2
    whole = recompute_seconds(work, {"a"}, 1, A100)
    assert whole.dispatch == pytest.approx(2 * (HOST_PER_TRAINED_OPERATOR + HOST_PER_CHECKPOINTED_CALL))
    selected = recompute_seconds(work, {"a"}, 1, A100, keeps=("mm",), micro_batches=3)
    assert selected.dispatch == pytest.approx(3 * (whole.dispatch + 4 * HOST_PER_SELECTED_OPERATOR))


# --- one operator --------------------------------------------------------------------------------------------------


def test_the_slowest_of_arithmetic_memory_and_launching_decides():
    work = timeline_of(matmul(312 * 10**9), matmul(0, 2039 * 10**7, unit="vector"), matmul(1, 1))
    time = step_seconds(work, 1, A100)
    assert time.compute == pytest.approx(312e9 / A100.bf16_flops)
    assert time.memory == pytest.approx(2039e7 / A100.memory_bandwidth)
    assert time.kernels == LAUNCH
    assert time.dispatch == pytest.approx(3 * HOST_PER_TRAINED_OPERATOR)
    assert time.seconds == pytest.approx(time.compute + time.memory + LAUNCH)


def test_small_operators_wait_for_the_host():
    time = step_seconds(timeline_of(*[matmul(10)] * 100), 1, A100)
    assert time.seconds == pytest.approx(100 * HOST_PER_TRAINED_OPERATOR)
    assert time.launches == pytest.approx(time.seconds)


def test_copies_add_to_the_step_and_overlap_with_nothing():
    computing = matmul(312 * 10**9)
    copying = matmul(0, transfer=Affine(0, 10**9))
    both = step_seconds(timeline_of(computing, copying), 1, A100)
    alone = step_seconds(timeline_of(computing), 1, A100)
    rate = A100.pcie_bandwidth * PINNED_SHARE
    assert both.seconds - alone.seconds == pytest.approx(1e9 / rate)
    assert offload_seconds(10**9, A100).seconds == pytest.approx(2e9 / rate)
    assert offload_seconds(10**9, A100, pinned=False).seconds > 2 * offload_seconds(10**9, A100).seconds


@pytest.mark.parametrize("moved", [10**9, 10**12])
def test_copies_on_a_stream_of_their_own_go_on_beside_the_rest_of_their_phase(moved: int) -> None:
    copies = matmul(0, transfer=Affine(10**10, 0), unit="vector", phase="backward")
    rate = A100.host_bandwidth * PINNED_SHARE
    backward = matmul(0, moved, phase="backward")
    behind, aside = (
        step_seconds(timeline_of(backward, copies._replace(stream=stream)), 1, A100).seconds for stream in (0, 1)
    )
    computing = moved / A100.memory_bandwidth
    assert behind == pytest.approx(computing + 10**10 / rate)
    assert aside == pytest.approx(max(computing, 10**10 / rate))
    # What runs in another phase hides nothing of them.
    elsewhere = step_seconds(timeline_of(backward, copies._replace(stream=1, phase="forward")), 1, A100).seconds
    assert elsewhere == pytest.approx(behind)


def test_copies_of_the_optimizer_go_on_beside_the_work_of_the_host():
    copies = matmul(0, transfer=Affine(10**10, 0), unit="vector", phase="optimizer", stream=1)
    on_host = matmul(0, 5 * 10**10, unit="host", phase="optimizer")
    time = step_seconds(timeline_of(copies, on_host), 1, A100)
    assert time.host == pytest.approx(5e10 / 51.2e9)
    assert time.seconds == pytest.approx(time.host + HOST_PER_OPERATOR), "and starting the copies"
    few = step_seconds(timeline_of(copies, on_host._replace(moved=Affine(10**9, 0))), 1, A100)
    assert few.seconds == pytest.approx(10**10 / (A100.host_bandwidth * PINNED_SHARE))


def test_work_on_the_host_comes_on_top_and_says_what_is_assumed():
    step = matmul(0, 10**9, unit="host", phase="optimizer")
    time = step_seconds(timeline_of(matmul(312 * 10**9), step), 1, A100)
    assert time.host == pytest.approx(1e9 / 51.2e9)
    assert time.seconds == pytest.approx(time.compute + time.host)
    assert "host memory" in time.assumptions[0]


@each(
    ("card", "unit", "figure"),
    [
        ("A100 SXM4 80GB", "tf32", 156e12),
        ("A100 SXM4 80GB", "3xtf32", 52e12),
        ("A100 SXM4 80GB", "fp64", 19.5e12),
        ("Tesla V100 SXM2 16GB", "fp64", 7.8e12),
        ("RTX 4090", "fp64", 82.6e12 / 64),
        ("GTX 1080 Ti", "fp16", 11.34e12),
        ("T4", "bf16", 8.1e12),
        ("T4", "tf32", 8.1e12),
        ("T4", "fp16", 65e12),
    ],
)
def test_what_a_card_lacks_its_ordinary_cores_do(card, unit, figure):
    assert flops_per_second(find_gpu(card), unit) == pytest.approx(figure, rel=0.01)


@each("gpu", catalogue())
def test_every_card_of_the_catalogue_has_what_the_model_needs(gpu):
    time = step_seconds(timeline_of(matmul(10**12, 10**9), matmul(0, transfer=Affine(0, 10**9))), 1, gpu)
    assert 0 < time.seconds < 10
    assert time.assumptions == ()


# --- who is meant ---------------------------------------------------------------------------------------------------


def test_without_a_name_the_slowest_card_of_the_capability_stands_in_and_it_is_said():
    timeline = timeline_of(matmul(10**12))
    time = step_seconds(timeline, 1)
    assumed = assumed_gpu((8, 0))
    assert assumed.compute_capability == (8, 0)
    assert time.compute == step_seconds(timeline, 1, assumed).compute == step_seconds(timeline, 1, assumed.name).compute
    assert assumed.name in time.assumptions[0]
    assert all(gpu.fp32_flops >= assumed.fp32_flops for gpu in catalogue() if gpu.compute_capability == (8, 0))


def test_a_link_that_nobody_knows_is_assumed_and_said():
    unlinked = replace(A100, pcie_generation=None, pcie_lanes=None)
    assert "PCIe 4.0 x16 is assumed" in offload_seconds(10**9, unlinked).assumptions[0]


def test_bad_input_is_refused():
    with pytest.raises(InvalidInputError):
        step_seconds(timeline_of(), 1, A100)
    with pytest.raises(InvalidInputError, match="batch_size"):
        step_seconds(timeline_of(matmul(1)), 0, A100)
    with pytest.raises(InvalidInputError, match="micro_batches"):
        step_seconds(timeline_of(matmul(1)), 1, A100, micro_batches=0)
    with pytest.raises(InvalidInputError):
        relative_cost(StepTime(), StepTime())


def test_a_step_that_could_not_be_followed_has_a_lower_bound_only():
    time = step_seconds(replace(timeline_of(matmul(1)), tier="formula"), 1, A100)
    assert "lower bound" in time.assumptions[0]


# --- real steps ------------------------------------------------------------------------------------------------------


class Blocks(nn.Module):
    """Wide and long enough that arithmetic decides; ``again``: every block is checkpointed."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        layers = (nn.TransformerEncoderLayer(2048, 16, 8192, dropout=0.0, batch_first=True) for _ in range(4))
        self.layers = nn.ModuleList(layers)
        self.again = again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.again else layer(x)
        return x


def wide(again: bool = False, **changes: object) -> TrainingStep:
    return TrainingStep(
        model=lambda: Blocks(again),
        batch=lambda b: torch.zeros(1, 1, 1).expand(b, 1024, 2048).requires_grad_(),
        loss=lambda model, x: model(x).sum(),
        optimizer=adamw,
        **changes,  # type: ignore[arg-type]
    )


@pytest.fixture(scope="module")
def as_written() -> Timeline:
    return trace(wide())


PATHS = tuple(f"layers.{i}" for i in range(4))


def test_checkpointing_every_block_of_a_compute_bound_step_costs_a_forward_more(as_written):
    """Chen et al. 2016 (arXiv:1604.06174): one forward more, of three; torch's early stop saves a little of it."""
    before = step_seconds(as_written, 16, A100)
    assert before.compute > 0.9 * before.seconds
    exact = step_seconds(trace(wide(again=True)), 16, A100)
    untraced = before + recompute_seconds(as_written.work, PATHS, 16, A100)
    assert 1.28 < relative_cost(exact, before) < 4 / 3 + 0.01
    assert untraced.seconds == pytest.approx(exact.seconds, rel=0.01)


def test_the_estimate_for_some_blocks_is_their_share(as_written):
    all_of_them = recompute_seconds(as_written.work, PATHS, 16, A100).seconds
    assert recompute_seconds(as_written.work, PATHS[:1], 16, A100).seconds == pytest.approx(all_of_them / 4, rel=0.01)
    assert recompute_seconds(as_written.work, PATHS, 8, A100, micro_batches=2).seconds == pytest.approx(
        all_of_them, rel=0.02
    )
    one, nested = (
        recompute_seconds(as_written.work, p, 16, A100) for p in (["layers.1"], ["layers.1", "layers.1.linear1"])
    )
    assert nested == one


def test_half_precision_is_faster_on_tensor_cores_and_not_without(as_written):
    mixed = trace(wide(precision="bf16-mixed"))

    def ratio(card: str) -> float:
        return relative_cost(step_seconds(mixed, 16, card), step_seconds(as_written, 16, card))

    assert 0.06 < ratio("A100 SXM4 80GB") < 0.2  # 312 to 19.5 TFLOP/s, and casts
    assert 0.4 < ratio("RTX 3090") < 0.8
    assert 0.9 < ratio("GTX 1080 Ti") < 1.1  # no fast bfloat16: less memory traffic, and casts


def test_micro_batches_cost_little_until_they_are_tiny():
    architecture = BY_NAME["decoder"]
    timeline = trace(architecture.step())
    whole = step_seconds(timeline, 2**16, A100)
    halved = step_seconds(timeline, 2**15, A100, micro_batches=2)
    tiny = step_seconds(timeline, 1, A100, micro_batches=2**16)
    assert 1 <= relative_cost(halved, whole) < 1.05
    assert relative_cost(tiny, whole) > 20
    assert tiny.launches > 0.9 * tiny.seconds


def test_micro_batches_from_the_step_as_written_take_what_their_own_trace_says():
    step = BY_NAME["decoder"].step()
    own = trace(step.with_(accumulate=2, whole_batch=True))
    for size in (4, 4096):
        guessed = step_seconds(trace(step), size, A100, micro_batches=8).seconds
        assert guessed == pytest.approx(step_seconds(own, size, A100, micro_batches=8).seconds, rel=0.05)
