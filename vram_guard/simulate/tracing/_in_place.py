"""Real tensors that become symbolic where they are: whoever holds them, an optimizer say, sees it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from vram_guard.patching import replaced
from vram_guard.simulate.device.symbolic import is_symbolic, symbolic_like
from vram_guard.simulate.memory.recorder import Recorder

_base: Any = torch._C.TensorBase
_shares_memory_with: Callable[..., bool] = torch._has_compatible_shallow_copy_type

#: Hooks that Python keeps beside a tensor, and autograd with what is exchanged.
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def become(tensor: torch.Tensor, twin: torch.Tensor) -> None:
    """A real tensor is this symbolic one from here on, with the gradient and the hooks that it had."""
    leaf = tensor.is_leaf
    gradient = tensor.grad if leaf else None
    hooks = {name: getattr(tensor, name, None) for name in _HOOKS} if leaf else {}
    torch._C._swap_tensor_impl(tensor, twin.detach().requires_grad_(tensor.requires_grad and leaf))
    for name, own in hooks.items():
        if own:
            setattr(tensor, name, own)
    if gradient is not None:
        if not is_symbolic(gradient):
            become(gradient, symbolic_like(gradient))
        tensor.grad = gradient


@contextlib.contextmanager
def moved_in_place(recorder: Recorder) -> Iterator[None]:
    """Assignments to ``Tensor.data`` may move a real tensor to the simulated GPU; ``Module.to`` makes them.

    For a process that exists for a prediction only: nothing becomes real again.
    """

    def assigned(self: torch.Tensor, value: torch.Tensor) -> None:
        if is_symbolic(value) and not is_symbolic(self):
            become(self, value)
            if isinstance(self, nn.Parameter):
                recorder.classify([self], "parameters")
        else:
            _base.data.__set__(self, value)

    @functools.wraps(_shares_memory_with)  # torch's compiler, imported meanwhile, compares signatures with its own
    def shares(tensor: torch.Tensor, other: torch.Tensor) -> bool:
        plain = not (hasattr(tensor, "__tensor_flatten__") or hasattr(other, "__tensor_flatten__"))
        return (plain and is_symbolic(other) and not is_symbolic(tensor)) or _shares_memory_with(tensor, other)

    data = property(_base.data.__get__, assigned)
    with replaced(torch.Tensor, {"data": data}), replaced(torch, {"_has_compatible_shallow_copy_type": shares}):
        yield
