"""Host memory in a timeline: what is counted, when, and as CUDA's pinned allocator rounds it."""

from __future__ import annotations

import torch
from architectures import adamw
from each import each
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from vram_guard.allocator import host_peak, pinned_size
from vram_guard.simulate import trace
from vram_guard.simulate.tracing.run import run_step
from vram_guard.step import TrainingStep
from vram_guard.timeline import Affine, HostBlock, Phase, Timeline, merge_affine

AMPERE = (8, 0)


@each(("asked", "taken"), [(0, 0), (1, 1), (2, 2), (3, 4), (4097, 8192), (2**30, 2**30)])
def test_pinned_memory_is_rounded_up_to_a_power_of_two(asked: int, taken: int) -> None:
    assert pinned_size(asked) == taken


@given(st.integers(1, 2**50))
def test_pinned_memory_at_most_doubles(size: int) -> None:
    assert size <= pinned_size(size) < 2 * size


def test_ordinary_memory_goes_back_and_pinned_memory_waits_for_its_like() -> None:
    sizes = (100, 100, 100)
    one_after_the_other = (0, ~0, 1, ~1, 2, ~2)
    assert host_peak(one_after_the_other, sizes, (False,) * 3) == 100
    assert host_peak(one_after_the_other, sizes, (True,) * 3) == 128
    assert host_peak((0, 1, ~0, ~1, 2), sizes, (True,) * 3) == 256
    assert host_peak((0, ~0, 1), (100, 300), (True, True)) == 128 + 512
    assert host_peak((0, ~0, 1), (100, 300), (True, False)) == 128 + 300
    assert host_peak((), (), ()) == 0


def timeline(size: int, pinned: bool, traced: int, events: tuple[int, ...] = (0, ~0)) -> Timeline:
    return Timeline(
        blocks=(),
        events=(),
        phases=(Phase("forward", 1, 0),),
        traced=(traced,),
        host_blocks=(HostBlock(Affine(size, 0), pinned),),
        host_events=events,
    )


def test_host_blocks_follow_the_same_law_as_those_of_the_gpu() -> None:
    merged = merge_affine(timeline(20, True, 2), timeline(30, True, 3))
    assert merged is not None
    assert merged.host_blocks == (HostBlock(Affine(0, 10), True),)
    assert [merged.at(batch).host_peak for batch in (1, 10, 13)] == [16, 128, 256]
    assert merge_affine(timeline(20, True, 2), timeline(30, False, 3)) is None
    assert merge_affine(timeline(20, True, 2), timeline(30, True, 3, (0,))) is None
    assert merge_affine(timeline(20, True, 2), timeline(10, True, 3)) is None


def step(loss) -> TrainingStep:
    return TrainingStep(lambda: nn.Linear(64, 64), lambda b: torch.randn(b, 64), loss, adamw)


def test_what_moves_to_the_host_and_back_is_counted_on_both_sides() -> None:
    def loss(model, batch):
        hidden = model(batch)
        on_host = hidden.detach().cpu()
        assert on_host.device.type == "cpu"
        assert on_host.cpu() is on_host
        assert on_host.numpy().shape == hidden.shape
        back = on_host.to(hidden.device)
        assert back.is_cuda
        return (hidden * back).sum()

    found = trace(step(loss))
    assert [block.size.at(8) for block in found.host_blocks] == [8 * 64 * 4] * 2
    assert not any(block.pinned for block in found.host_blocks)
    assert found.at(8).host_peak == 8 * 64 * 4
    plain = run_step(step(lambda model, batch: (model(batch) * model(batch).detach()).sum()), 8, AMPERE)
    copies = [b for b in found.blocks if b.operator == "aten._to_copy.default" and b.size.at(8) == 8 * 64 * 4]
    assert len(copies) == 2
    assert plain.at(8).host_peak == 0


def test_real_buffers_that_receive_what_comes_from_the_gpu_are_counted() -> None:
    def into(pinned: bool):
        def loss(model, batch):
            hidden = model(batch)
            kept = torch.empty(hidden.shape, pin_memory=pinned)
            kept.copy_(hidden.detach(), non_blocking=pinned)
            return (hidden * kept.to(hidden.device)).sum()

        return trace(step(loss))

    assert into(False).at(9).host_peak == 9 * 64 * 4
    assert into(True).at(9).host_peak == 4096
    assert [b.pinned for b in into(True).host_blocks] == [True, True]
