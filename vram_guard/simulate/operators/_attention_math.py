"""Attention's math backend as eager CUDA runs it, ``_scaled_dot_product_attention_math`` (``attention.cpp``)."""

from __future__ import annotations

import contextlib
from typing import Any, Final

import torch
from torch._guards import TracingContext
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

#: Softmax whose rows of -inf are zero, since torch 2.5: its C++ is made of other operators, on any device.
_SAFE_SOFTMAX: Final[Any] = getattr(getattr(torch.ops.aten, "_safe_softmax", None), "default", None)


class _MathAttention(TorchDispatchMode):
    """Around the operator: what it does within, and where with a dispatch mode on it would do something else.

    Its only sum is that of the scores and the mask. With a mode on, torch takes the scores for a subclass and adds the
    mask to a copy (``areAnyTensorSubclassLike``).

    Args:
        alone: the trace's own mode is the only one; else the step itself has one on, as selective checkpointing does.
    """

    def __init__(self, *, alone: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._alone = alone

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Each operator of the block."""
        if self._alone and func is torch.ops.aten.add.Tensor:
            scores, mask = args
            torch.ops.aten.add_.Tensor(scores, mask)
            return torch.ops.aten.view.default(scores, scores.shape)  # autograd wants a tensor that it has not seen
        if func is _SAFE_SOFTMAX:
            return func._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def math_as_on_cuda() -> contextlib.AbstractContextManager[Any]:
    """What to put around the operator; while torch compiles it, its modes are on for real."""
    if TracingContext.try_get():
        return contextlib.nullcontext()
    return _MathAttention(alone=len(_get_current_dispatch_mode_stack()) < 2)
