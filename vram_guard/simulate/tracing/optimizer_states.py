"""What an optimizer keeps from one step to the next."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vram_guard.simulate.device.symbolic import is_symbolic
from vram_guard.tensors import tensors_kept

if TYPE_CHECKING:
    import torch

    from vram_guard.simulate.memory.recorder import Recorder


def classify_states(recorder: Recorder, optimizer: torch.optim.Optimizer) -> None:
    """Classify what the optimizer keeps for each parameter as optimizer states."""
    inner = getattr(optimizer, "optim", optimizer)  # ZeroRedundancyOptimizer's own, over this rank's part
    recorder.optimizer = type(inner).__name__
    states = getattr(inner, "state", None) or {}  # torchao's CPUOffloadOptimizer has one for each parameter inside
    for state in states.values():
        if isinstance(state, dict):
            for value in state.values():
                kept = [tensor for tensor in tensors_kept(value) if is_symbolic(tensor)]
                recorder.classify(kept, "optimizer_states")
