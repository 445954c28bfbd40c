"""flex_attention under ``torch.compile``, where a trace runs uncompiled: one kernel forward and one backward.

Inductor makes them of templates, whose results and temporaries its source shows (``flex_attention`` and
``flex_attention_backward`` in torch/_inductor/kernel/flex/flex_attention.py). Outside ``torch.compile`` torch computes
the scores of all pairs of tokens, as it warns; that is not followed.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from vram_guard.errors import UnsupportedStepError
from vram_guard.language import _
from vram_guard.patching import replaced
from vram_guard.private_names import missing_names
from vram_guard.simulate.operators.higher_order import kernel_under
from vram_guard.simulate.private_api import FLEX_NAMES

#: The module of the two higher-order operators, which the function of the same name calls.
OPERATORS = "torch._higher_order_ops.flex_attention"

#: Name and module of the function that users call.
FLEX_ATTENTION = ("flex_attention", "torch.nn.attention.flex_attention")
_COMPILED = ("compile_wrapper", "torch._dynamo.eval_frame")


@contextlib.contextmanager
def flex_attention_followed(mode: type) -> Iterator[None]:
    """Inside the block both operators allocate what their CUDA kernels do, and what is saved for backward is.

    Args:
        mode: of the trace, whose tensors no other kernel takes.
    """
    if missing_names(FLEX_NAMES):
        yield
        return
    operators = sys.modules[OPERATORS]
    forward, backward = operators.flex_attention, operators.flex_attention_backward
    traced = operators.create_fw_bw_graph

    def graphs(score_mod: Callable[..., Any], *examples: Any) -> Any:
        """``score_mod`` is computed within the kernels: it is traced where the compiler asks alone."""
        return (score_mod, score_mod) if type(_get_current_dispatch_mode()) is mode else traced(score_mod, *examples)

    with (
        replaced(operators, {"create_fw_bw_graph": graphs}),
        kernel_under(forward, mode, _forward),
        kernel_under(backward, mode, _backward),
    ):
        yield


def _forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_rest: Any) -> tuple[torch.Tensor, ...]:
    _check_compiled(sys._getframe())
    rows = query.shape[:3]
    logsumexp = query.new_empty(rows, dtype=torch.float32)
    largest = query.new_empty(rows, dtype=torch.float32)
    out = _as_dense((*rows, value.shape[-1]), query)
    # Compiled code lets go of the largest scores, which the operator's autograd would save.
    del largest
    return out, logsumexp, query.new_empty((), dtype=torch.float32).expand(rows)


def _backward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    grad_out: torch.Tensor | None,
    _grad_logsumexp: torch.Tensor | None,
    *rest: Any,
) -> tuple[Any, ...]:
    # AOTAutograd copies a gradient that lies otherwise than what it is the gradient of (``coerce_tangent``).
    copied = None if grad_out is None or grad_out.stride() == out.stride() else torch.empty_like(out)
    delta = torch.empty_like(logsumexp)
    batch = query.shape[0]
    grads = (
        _as_dense(query.shape, query),
        _as_dense((batch, *key.shape[1:]), key),
        _as_dense((batch, *value.shape[1:]), value),
    )
    del delta, copied
    if batch > key.shape[0]:
        grads = grads[0], grads[1].sum(0, keepdim=True), grads[2].sum(0, keepdim=True)
    captured = rest[5] if len(rest) > 5 else ()
    return (*grads, tuple(_grad_of(one) for one in captured))


def _grad_of(captured: Any) -> torch.Tensor | None:
    """What ``score_mod`` adds up for a tensor of its own: in float32, then in the tensor's type."""
    if not isinstance(captured, torch.Tensor) or not captured.requires_grad:
        return None
    return torch.zeros_like(captured, dtype=torch.float32, memory_format=torch.contiguous_format).to(captured.dtype)


def _as_dense(size: Any, like: torch.Tensor) -> torch.Tensor:
    """An empty tensor of this size whose dimensions lie in the order of another one's (``infer_dense_strides``)."""
    order = sorted(range(len(size)), key=lambda at: like.stride()[at], reverse=True)
    made = like.new_empty([size[at] for at in order])
    return made.permute([order.index(at) for at in range(len(size))])


def _check_compiled(frame: FrameType | None) -> None:
    """Raises UnsupportedStepError where ``torch.compile`` is not around flex_attention."""
    inside = True
    while frame is not None:
        place = frame.f_code.co_name, frame.f_globals.get("__name__")
        inside = inside and place != FLEX_ATTENTION
        if not inside and place == _COMPILED:
            return
        frame = frame.f_back
    raise UnsupportedStepError(
        _(
            "flex_attention outside torch.compile computes the scores of all pairs of tokens, as torch warns, and is "
            "not followed; call torch.compile(flex_attention), or compile the model"
        )
    )
