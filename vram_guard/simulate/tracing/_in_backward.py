"""Optimizers that step in the backward pass, from hooks that the user registered on the parameters before.

A hook knows its parameter as an object (a key of a dict, a variable of the function around it). So the object itself
becomes symbolic for the time of a trace, in place of a stand-in beside it, and is given back as it was.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from vram_guard.simulate.memory.recorder import Recorder
from vram_guard.simulate.tracing.optimizer_states import classify_states


class Hooked(NamedTuple):
    """A parameter with hooks of the user's, symbolic in place."""

    parameter: Any
    real: Any
    """The object that keeps what the parameter was."""
    hooks: Any

    def give_back(self) -> None:
        """The parameter is what it was, with the hooks that it had."""
        torch._C._swap_tensor_impl(self.parameter, self.real)
        self.parameter._post_accumulate_grad_hooks = self.hooks


def hooked(parameter: Any, twin: Any) -> Hooked:
    """Make a parameter symbolic where it is; its hooks stay, and a trace may add others."""
    hooks = parameter._post_accumulate_grad_hooks
    torch._C._swap_tensor_impl(parameter, twin)
    parameter._post_accumulate_grad_hooks = OrderedDict(hooks)
    return Hooked(parameter, twin, hooks)


def before_others(parameter: Any, hook: Callable[[Any], None]) -> None:
    """Call this with the parameter once its gradient is there, before a hook of the user's frees it."""
    own = parameter._post_accumulate_grad_hooks or {}
    others = dict(own)
    own.clear()
    parameter.register_post_accumulate_grad_hook(hook)
    own.update(others)  # autograd calls them in the order in which they came, whatever an OrderedDict says


@contextlib.contextmanager
def optimizers_in_backward(parameters: Sequence[Hooked], recorder: Recorder) -> Iterator[None]:
    """The optimizers that these hooks step begin without states, and get back those that they had."""
    own = {id(one.parameter) for one in parameters}
    kept: dict[int, tuple[torch.optim.Optimizer, dict[Any, Any]]] = {}

    def before(optimizer: torch.optim.Optimizer, *_given: object) -> None:
        if id(optimizer) not in kept and any(id(one) in own for one in _parameters(optimizer)):
            kept[id(optimizer)] = optimizer, dict(optimizer.state)
            optimizer.state.clear()

    def after(optimizer: torch.optim.Optimizer, *_given: object) -> None:
        if id(optimizer) in kept:
            classify_states(recorder, optimizer)

    if not own:
        yield
        return
    handles = register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for optimizer, states in kept.values():
            optimizer.state.clear()
            optimizer.state.update(states)


def _parameters(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
