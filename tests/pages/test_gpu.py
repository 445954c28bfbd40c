"""With a real GPU: what the symbolic step says beside what CUDA's allocator did. Skipped where there is none.

Peaks are those of processes of their own: what earlier steps leave in a process (dropout's states, libraries' buffers)
stands in segments whose rest the next step uses.
"""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch
from architectures import BY_NAME
from torch.utils import _pytree as pytree

from benchmarks.gpu.operators.command import large
from benchmarks.harness.workers import ask
from vram_guard.allocator import read_recording
from vram_guard.simulate.tracing.run import run_step
from vram_guard.step import TrainingStep
from vram_guard.timeline import Timeline

pytestmark = pytest.mark.gpu

AUTOCAST = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}


def run_for_real(step: TrainingStep, batch_size: int):
    """The two steps of a trace on the GPU, in the same order, with the allocator's history recorded."""
    torch._C._cuda_clearCublasWorkspaces()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()  # cuDNN's states of dropout stay
    torch.cuda.memory._record_memory_history(max_entries=1_000_000, stacks="python")
    try:
        kept = _loop(step, batch_size)
        torch.cuda.synchronize()
        peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        return torch.cuda.memory._snapshot(), *(peak - earlier for peak, earlier in zip(peaks, before, strict=True))
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
        kept = None  # noqa: F841 - model and optimizer live until here, as in a training script


def _loop(step: TrainingStep, batch_size: int):
    model = step.model().to("cuda")
    optimizer = step.optimizer(model.parameters())
    scaler = torch.amp.GradScaler("cuda", enabled=step.precision == "16-mixed")
    dtype = AUTOCAST.get(step.precision)
    batch = loss = None
    for _ in range(2):
        batch = None  # as ``for batch in loader`` does: its name holds a batch of the host first
        batch = pytree.tree_map(lambda t: t.to("cuda"), step.batch(batch_size))
        with torch.autocast("cuda", dtype=dtype) if dtype else contextlib.nullcontext():
            loss = step.loss(model, batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return model, optimizer, batch, loss


def without_workspaces(timeline: Timeline) -> list[int]:
    sizes = [
        0 if b.category == "workspace" else size for b, size in zip(timeline.blocks, timeline.sizes(0), strict=True)
    ]
    return large(timeline.events, sizes)


@pytest.mark.parametrize("precision", ["32-true", "16-mixed", "bf16-mixed"])
@pytest.mark.parametrize("name", ["decoder", "encoder", "unet"])
def test_the_symbolic_sequence_is_the_real_one(name: str, precision: str) -> None:
    step = BY_NAME[name].step(precision=precision)
    capability = torch.cuda.get_device_capability()
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    timeline = run_step(step, 64, capability).on(multiprocessors)
    snapshot, _, _ = run_for_real(step, 64)
    recording = read_recording(snapshot)
    workspaces = {block.size.base for block in timeline.blocks if block.category == "workspace"}
    real = [size for size in large(recording.events, recording.sizes) if abs(size) not in workspaces]
    assert without_workspaces(timeline) == real


def peaks_of(name: str, batch_size: int) -> list[int]:
    """In a worker: the allocated and the reserved peak of an architecture's steps."""
    _, *peaks = run_for_real(BY_NAME[name].step(), batch_size)
    return peaks


@pytest.mark.parametrize("name", list(BY_NAME))
def test_the_predicted_peak_is_the_measured_one_to_the_percent(name: str) -> None:
    step = BY_NAME[name].step()
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    found = run_step(step, 512, torch.cuda.get_device_capability()).on(multiprocessors).at(512)
    allocated, reserved = ask(peaks_of, name, 512, limit=120.0, fresh=True).checked()
    assert found.peak_allocated == pytest.approx(allocated, rel=0.01)
    assert found.peak_reserved == pytest.approx(reserved, rel=0.03)
