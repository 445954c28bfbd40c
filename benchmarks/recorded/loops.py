"""The sources' whole programs, followed from their first line to their last: every step, every name, every run.

``trace`` shows a fresh process. What had been allocated before a recording began also decides where blocks lie at its
peak: five other models in the same process. So the programs are followed too, with the names that they give their
results. A followed program ends the process that it is in: ask for it in a worker.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from benchmarks.recorded import lm_2_7b
from vram_guard.allocator import CachingAllocator
from vram_guard.allocator.blocks import PoolBlock
from vram_guard.simulate.tracing.external_loop import ExternalLoopTracer

Peaks = dict[str, tuple[int, int]]


class Program:
    """A program on the simulated device.

    Args:
        capability: compute capability of the GPU.
    """

    def __init__(self, capability: tuple[int, int]) -> None:
        self._tracer = ExternalLoopTracer(capability, lambda _: None)
        self._tracer.begin()
        self._emptied: set[int] = set()
        self._recorded: dict[int, str] = {}
        self._device = torch.device("cuda")

    def zeros(self, *shape: int) -> torch.Tensor:
        """Tokens on the GPU."""
        return torch.zeros(*shape, dtype=torch.long, device=self._device)

    @contextlib.contextmanager
    def on_device(self) -> Iterator[None]:
        """Models that are built inside are on the GPU."""
        with self._device:
            yield

    def empty_cache(self) -> None:
        """Give unused segments back, as ``torch.cuda.empty_cache`` does."""
        self._emptied.add(self._now())

    def record(self, name: str) -> None:
        """From here on, and until the next such call, the recording of that name was made."""
        self._recorded[self._now()] = name

    def _now(self) -> int:
        return len(self._tracer.recorder.events)

    def peaks(self, batch_size: int) -> Peaks:
        """Recording -> reserved and allocated bytes at their maxima while it was made. Ends what is followed."""
        timeline = self._tracer.timeline(batch_size, "").on(None)
        sizes = timeline.sizes(batch_size)
        allocator = CachingAllocator()
        held: dict[int, PoolBlock] = {}
        found: Peaks = {}
        name = ""
        for at, event in enumerate(timeline.events):
            if at in self._emptied:
                allocator.empty_cache()
            if at in self._recorded:
                name = self._recorded[at]
                found[name] = (0, 0)
            if event < 0:
                if ~event in held:
                    allocator.release(held.pop(~event))
            elif sizes[event]:
                held[event] = allocator.allocate(sizes[event])
            if name:
                reserved, allocated = found[name]
                found[name] = max(reserved, allocator.reserved), max(allocated, allocator.allocated)
        return found


def billions() -> Peaks:
    """``profile_memory_forward_fullstep`` of kkaitlyn111/cs336-a2-systems in float32: six models, one after another."""
    program = Program((9, 0))
    for name in ("forward", "fullstep"):
        for context in (128, 256, 512):
            _one_of_the_billions(program, context, name)
    return program.peaks(lm_2_7b.BATCH)


def _one_of_the_billions(program: Program, context: int, name: str) -> None:
    with program.on_device():
        model = lm_2_7b.LanguageModel(context)
    optimizer = lm_2_7b.AdamW(model.parameters())
    tokens = program.zeros(lm_2_7b.BATCH, context)
    program.empty_cache()
    program.record(f"lm-2.7b-{context}-{name}")
    logits = model(tokens)
    if name == "fullstep":
        loss = lm_2_7b.cross_entropy(logits, tokens)
        loss.backward()
        optimizer.step()


#: Recording -> the program that it was made by, and its arguments.
PROGRAMS: dict[str, tuple[Callable[..., Peaks], tuple[int, ...]]] = {
    "lm-2.7b-256-forward": (billions, ()),
    "lm-2.7b-128-fullstep": (billions, ()),
    "lm-2.7b-512-fullstep": (billions, ()),
}
