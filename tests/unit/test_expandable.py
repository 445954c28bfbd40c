"""Expandable segments in a process that runs."""

from __future__ import annotations

import pytest
import torch

from vram_guard.allocator import AllocatorSettings
from vram_guard.guard.applied import Applied
from vram_guard.guard.expandable import expand_segments, why_not_expandable

settings_of_torch = getattr(torch._C, "_accelerator_getAllocatorSettings", None)


def test_a_training_that_takes_no_memory_of_a_gpu_has_nothing_to_set() -> None:
    assert why_not_expandable(torch.device("cpu"))


@pytest.mark.skipif(settings_of_torch is None, reason="this torch does not tell its allocator's settings")
def test_the_allocator_is_told_and_has_its_own_settings_again_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    own = settings_of_torch()
    try:
        with Applied() as applied:
            expand_segments(applied)
            made = AllocatorSettings.from_conf(settings_of_torch())
            assert made == AllocatorSettings(expandable_segments=True, max_split_size=64 * 2**20)
        after = AllocatorSettings.from_conf(settings_of_torch())
        assert after == AllocatorSettings.from_environment()
        assert "expandable_segments:False" in settings_of_torch()  # torch keeps what is not named
    finally:
        torch._C._accelerator_setAllocatorSettings(own)


@pytest.mark.gpu
def test_memory_of_a_gpu_is_reserved_in_segments_that_grow_until_it_is_too_late() -> None:
    device = torch.device("cuda", 0)
    torch.cuda.empty_cache()
    assert why_not_expandable(device) == ""
    with Applied() as applied:
        expand_segments(applied)
        held = torch.empty(2**24, device=device)
        assert [segment["is_expandable"] for segment in torch.cuda.memory_snapshot()] == [True]
        assert why_not_expandable(device)
        del held
    torch.cuda.empty_cache()
    held = torch.empty(2**24, device=device)
    assert [segment["is_expandable"] for segment in torch.cuda.memory_snapshot()] == [False]
    del held
