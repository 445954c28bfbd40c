"""What a loss is made of, read from its graph: the losses that models return, scaled and added, or anything else.

Nothing is computed, so symbolic losses are read as well as real ones.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import Any

import torch

from vram_guard.limits import GRAPH_NODES
from vram_guard.state.containers import children
from vram_guard.tensors import without_modes

#: Nodes of a graph that leave a number as it is.
_SAME = ("ToCopy", "Clone", "Alias", "View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "Identity", "Expand")

#: Of DeepSpeed's stage 3, around the calls of modules: they gather and free weights, and hand on what they are given.
_GATHERING = ("PreBackwardFunctionForModule", "PostBackwardFunctionModule")
_GATHERS = "deepspeed.runtime.zero.parameter_offload"


def number_of(value: torch.Tensor) -> int | None:
    """By which :func:`is_made_of` knows a value again, without keeping its graph alive; None where it has no graph."""
    return None if value.grad_fn is None else int(value.grad_fn._sequence_nr())  # noqa: SLF001 - see below


def is_made_of(loss: torch.Tensor, numbers: Collection[int]) -> bool:
    """Check that a loss is these values, scaled and added, and nothing else.

    Args:
        loss: one number with a graph.
        numbers: of :func:`number_of`.
    """
    waiting: list[Any] = [loss.grad_fn]
    for _step in range(GRAPH_NODES):
        if not waiting:
            return True
        node = waiting.pop()
        if node is None:
            return False
        if node._sequence_nr() in numbers:  # noqa: SLF001 - see simulate/private_api.py
            continue
        further = _behind(node)
        if not further:
            return False
        waiting += further
    return False


def _behind(node: Any) -> list[Any]:
    """The nodes behind one that only scales or adds; none for any other node."""
    kind = node.name().rpartition("Backward")[0]  # Div for DivBackward0
    behind = [other for other, _input in node.next_functions]
    carrying = [other for other in behind if other is not None]
    if kind in ("Neg", "Add", "Sub", "Rsub"):
        return carrying
    if len(behind) == 1 and (kind in _SAME or _gathers(node) or (kind in ("Mean", "Sum") and _of_one_number(node))):
        return behind
    if kind in ("Mul", "Div") and len(carrying) == 1 and _by_a_number(node, kind, behind):
        return carrying
    return []


def _gathers(node: Any) -> bool:
    made_by = getattr(node, "_forward_cls", None)
    return made_by is not None and (made_by.__module__, made_by.__name__) in [(_GATHERS, name) for name in _GATHERING]


def _of_one_number(node: Any) -> bool:
    """True for the mean or sum of a number alone, as MMEngine takes it of every loss."""
    return len(node._saved_self_sym_sizes) == 0 if hasattr(node, "_saved_self_sym_sizes") else False  # noqa: SLF001


def _by_a_number(node: Any, kind: str, behind: list[Any]) -> bool:
    """True where what has no graph is a number that is known, by which a product or quotient only scales."""
    first = behind[0] is not None
    if kind == "Div" and not first:
        return False
    saved = getattr(node, "_saved_other" if first else "_saved_self", None)
    if isinstance(saved, torch.Tensor):
        saved = _number_in(saved)
    return isinstance(saved, int | float) and bool(saved) and math.isfinite(saved)


def _number_in(tensor: torch.Tensor) -> Any:
    """The number in a real tensor on the CPU, or in one of a trace whose value is known; None for others."""
    from vram_guard.simulate.device.constants import compute
    from vram_guard.simulate.device.symbolic import is_symbolic

    with without_modes():  # in a trace, nothing is to be written down for this
        if tensor.dim():
            return None
        if is_symbolic(tensor):
            value = compute(tensor)
            return None if value is None else value.item()
        return tensor.item() if tensor.device.type == "cpu" else None


def parts_of(batch: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every part of a batch that is no container, with its path."""
    parts = children(batch)
    if parts is None:
        yield path, batch
    else:
        for key, part in parts.items():
            yield from parts_of(part, (*path, key))
