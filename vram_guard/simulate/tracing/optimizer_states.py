"""What an optimizer keeps from one step to the next."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch

from vram_guard.simulate.device.cuda_module import CUDA
from vram_guard.simulate.device.symbolic import is_symbolic
from vram_guard.tensors import tensors_kept

if TYPE_CHECKING:
    from vram_guard.simulate.memory.recorder import Recorder

ClosureUse = Literal["none", "alone", "behind backward"]


def over_twins(optimizer: torch.optim.Optimizer, twins: Mapping[int, torch.Tensor]) -> torch.optim.Optimizer:
    """The same optimizer over the twins of its parameters, for one that was made before the trace.

    Args:
        optimizer: stays as it is.
        twins: by the identity of the real parameter.
    """
    memo: dict[int, Any] = dict(twins)
    for state in optimizer.state.values():  # of a training that is resumed; counts of steps keep their values
        for value in state.values() if isinstance(state, dict) else ():
            for tensor in tensors_kept(value):
                if tensor.dim():
                    memo[id(tensor)] = tensor.to(CUDA)
    made = object.__new__(type(optimizer))
    # Of an instance, "step" is a scheduler's: it would step the original.
    own = {name: value for name, value in vars(optimizer).items() if name != "step"}
    vars(made).update(copy.deepcopy(own, memo))
    return made


def closure_use(optimizer: torch.optim.Optimizer, recorder: Recorder) -> ClosureUse:
    """How an optimizer of others uses a closure, without which it fails: seen on copies that have nothing to do.

    Returns:
        "behind backward": it first takes gradients that are there (SAM), and then calls it.
    """
    kind = type(optimizer)
    if kind.__module__.partition(".")[0] == "torch" or "closure" not in inspect.signature(kind.step).parameters:
        return "none"
    own = [p for group in optimizer.param_groups for p in group["params"]]
    states = getattr(optimizer, "state", None)  # torchao's CPUOffloadOptimizer has none, nor twins that it could step
    if states is None or states or not all(is_symbolic(p) for p in own):
        return "none"
    called: list[bool] = []

    def fails(*closure: Callable[[], None]) -> bool:
        twins = {id(p): torch.empty_like(p) for p in own}
        try:
            over_twins(optimizer, twins).step(*closure)  # type: ignore[arg-type]
        except Exception:  # noqa: BLE001 - other people's optimizers
            return True
        return False

    with recorder.aside():
        if not fails():
            return "none"
        fails(lambda: called.append(True))
    return "alone" if called else "behind backward"


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
