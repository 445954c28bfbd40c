"""Numbers without a graph that are computed of several samples and reach the loss.

The graph of a loss shows nothing of them: a mean over the batch that is subtracted, a count of what is positive, a
largest value that scales. In two symbolic runs of batches of two sizes they show in their sizes: they are computed of
something that grows with the batch, and do not grow with it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from vram_guard.proof._step_state import storage_of

#: Functions whose results say nothing about values.
_FACTS = (
    "size",
    "dim",
    "shape",
    "device",
    "dtype",
    "numel",
    "stride",
    "_like",
    "new_",
    "requires_grad",
    "is_",
    "layout",
)
#: Functions that give a number of Python.
_NUMBERS = ("item", "tolist", "__float__", "__int__", "__index__")
#: Functions that move samples, or add them up, along a dimension that they are given.
_ALONG = ("flip", "roll", "sort", "argsort", "cumsum", "cumprod", "cummax", "cummin")


class Call(NamedTuple):
    """One function that the step called."""

    name: str
    operands: tuple[int, ...]
    """Numbers of the values that went into it."""
    made: tuple[int, ...]
    """Numbers of what came out, or was written."""
    shapes: tuple[tuple[int, ...], ...]
    """Of what came out."""
    has_graph: bool
    along: tuple[int, ...]
    """Dimensions that it works along, where it is one that moves samples."""


class Calls(TorchFunctionMode):
    """Writes down what is called inside the block.

    Args:
        batch: whose tensors are the samples'.
    """

    def __init__(self, batch: Any) -> None:
        super().__init__()
        self._numbers: dict[int, int] = {}
        self._shapes: list[tuple[int, ...]] = []
        self._alive: list[torch.Tensor] = []  # an id of one that is gone would be given again
        self.given = tuple(self._number(one) for one in tree_leaves(batch) if isinstance(one, torch.Tensor))
        self.calls: list[Call] = []
        self.loss = -1
        self.written: set[int] = set()
        """Storages that were written in place."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The function itself, written down."""
        out = func(*args, **(kwargs or {}))
        short = str(getattr(func, "__name__", func))  # a trace may have put another function in its place
        operands = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        made = [one for one in tree_leaves(out) if isinstance(one, torch.Tensor)]
        if operands and (short == "__setitem__" or (short.endswith("_") and not short.endswith("__"))):
            made.append(operands[0])
            self.written.add(storage_of(operands[0]))
        if operands and (made or short in _NUMBERS) and not any(fact in short for fact in _FACTS):
            self.calls.append(
                Call(
                    short,
                    tuple(map(self._number, operands)),
                    tuple(map(self._number, made)),
                    tuple(tuple(one.shape) for one in made),
                    any(one.requires_grad for one in made),
                    _dimensions(short, args, kwargs or {}),
                )
            )
        return out

    def returned(self, loss: torch.Tensor) -> None:
        """The loss that the step has computed."""
        self.loss = self._number(loss)

    def shape(self, number: int) -> tuple[int, ...]:
        """Of the value with this number, when it was first seen."""
        return self._shapes[number]

    def _number(self, value: torch.Tensor) -> int:
        number = self._numbers.setdefault(id(value), len(self._alive))
        if number == len(self._alive):
            self._alive.append(value)
            self._shapes.append(tuple(value.shape))
        return number


def _dimensions(name: str, args: Any, kwargs: Any) -> tuple[int, ...]:
    if name not in _ALONG:
        return ()
    given = [one for one in tree_leaves((args, kwargs)) if type(one) is int]
    return tuple(given) or (-1,)


def joined_by(one: Calls, other: Calls) -> tuple[str, bool]:
    """The function whose result joins samples behind the graph's back and reaches the loss, "" for none.

    And whether a number of Python was made of such a result, which may have reached it.
    """
    if len(one.calls) != len(other.calls):
        return "", False
    of_batch = dict.fromkeys(one.given, True)
    seen: dict[int, str] = {}
    """What is joined and has a graph, which tells it, until it is detached."""
    joined: dict[int, str] = {}
    numbers = False
    for call, twin in zip(one.calls, other.calls, strict=True):
        if call[:3] != twin[:3]:
            return "", False
        from_batch = [at for at in call.operands if of_batch.get(at)]
        before = next((joined[at] for at in call.operands if at in joined), "")
        told = next((seen[at] for at in call.operands if at in seen), "")
        grown = any(one.shape(at) != other.shape(at) for at in from_batch)
        numbers = numbers or (not call.made and bool(before))
        for at, shape, another in zip(call.made, call.shapes, twin.shapes, strict=True):
            of_batch[at] = bool(from_batch) or of_batch.get(at, False)
            dims = [dim for dim, (a, b) in enumerate(zip(shape, another, strict=False)) if a != b]
            moved = any(dim % max(1, len(shape)) in dims for dim in call.along)
            by = told or (call.name if grown and (len(dims) != 1 or moved) and at not in call.operands else "")
            if before or (by and not call.has_graph):
                joined[at] = before or by
            elif by:
                seen[at] = by
    return joined.get(one.loss, ""), numbers
