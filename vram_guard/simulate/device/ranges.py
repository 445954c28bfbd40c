"""Bounds of whole numbers that are not known: the class that ``argmax`` finds is one of those that there are.

A number that is read from such a tensor, counted in it or taken for an index must be one that can be there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from vram_guard.simulate.device.symbolic import is_symbolic

_ATTRIBUTE = "_vram_guard_range"
_TYPES = (one for one in vars(torch).values() if isinstance(one, torch.dtype))
_WHOLE = frozenset(one for one in _TYPES if not (one.is_floating_point or one.is_complex or one == torch.bool))


class Bounds(NamedTuple):
    """What the elements of a tensor lie between."""

    low: int
    end: int
    """Above the largest one."""
    at_most: bool = False
    """Whether it is the largest, or smallest, of values that are not known: taken to be their bound."""

    @property
    def number(self) -> int:
        """The most different values that there may be."""
        return self.end - self.low


class _OperatorCall:
    """A call of an operator, whose arguments are asked for by their names in its schema."""

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args = args
        names = [argument.name for argument in func._schema.arguments]
        self._given = {**dict(zip(names, args, strict=False)), **kwargs}
        self._default = {argument.name: argument.default_value for argument in func._schema.arguments}

    def __getitem__(self, name: str) -> Any:
        return self._given.get(name, self._default.get(name))

    def whole(self, name: str) -> int | None:
        """A whole number among them."""
        value = self[name]
        return value if isinstance(value, int) and not isinstance(value, bool) else None


def bounds_of(tensor: torch.Tensor) -> Bounds | None:
    """The bounds of a tensor's unknown values; None where there are none."""
    if tensor.dtype == torch.bool:
        return Bounds(0, 2)
    found: Bounds | None = tensor.__dict__.get(_ATTRIBUTE) if is_symbolic(tensor) else None
    return found


def forget(tensor: torch.Tensor) -> None:
    """The tensor was written to."""
    tensor.__dict__.pop(_ATTRIBUTE, None)


def derive(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    """Give the results of an operator of :data:`BOUNDED` their bounds."""
    results = out if isinstance(out, (tuple, list)) else (out,)
    for rule, result in zip(BOUNDED[func._schema.name], results, strict=False):
        if rule is None or not isinstance(result, torch.Tensor) or result.dtype not in _WHOLE:  # most are not
            continue
        bounds = rule(_OperatorCall(func, args, kwargs)) if is_symbolic(result) else None
        if bounds is not None and bounds.number > 0:
            setattr(result, _ATTRIBUTE, bounds)


def _position(call: _OperatorCall) -> Bounds | None:
    """A place in a dimension, or in the whole tensor."""
    tensor: torch.Tensor = call.args[0]
    dim = call.whole("dim")
    return Bounds(0, (tensor.shape[dim] if tensor.dim() else 1) if dim is not None else tensor.numel())


def _same(call: _OperatorCall) -> Bounds | None:
    return bounds_of(call.args[0])


def _largest(call: _OperatorCall) -> Bounds | None:
    bounds = bounds_of(call.args[0])
    return None if bounds is None else Bounds(bounds.end - 1, bounds.end, at_most=True)


def _smallest(call: _OperatorCall) -> Bounds | None:
    bounds = bounds_of(call.args[0])
    return None if bounds is None else Bounds(bounds.low, bounds.low + 1, at_most=True)


def _of_all(call: _OperatorCall) -> Bounds | None:
    """Of a list of tensors."""
    found = [bounds_of(one) for one in call.args[0]]
    if None in found or not found:
        return None
    return Bounds(min(one.low for one in found if one), max(one.end for one in found if one))


def _counted(call: _OperatorCall) -> Bounds | None:
    """How many truth values are true, in some dimensions or in all."""
    tensor: torch.Tensor = call.args[0]
    dims = call["dim"]
    if tensor.dtype != torch.bool or (dims is not None and not tensor.dim()):
        return None
    sizes = [tensor.shape[dim] for dim in dims] if dims else list(tensor.shape)
    return Bounds(0, math.prod(sizes) + 1)


def _drawn(call: _OperatorCall) -> Bounds | None:
    end = call.whole("high")
    return None if end is None else Bounds(call.whole("low") or 0, end)


def _remainder(call: _OperatorCall) -> Bounds | None:
    divisor = call.whole("other")
    return Bounds(0, divisor) if divisor and divisor > 0 else None


def _quotient(call: _OperatorCall) -> Bounds | None:
    bounds, divisor = bounds_of(call.args[0]), call.whole("other")
    if bounds is None or not divisor or divisor < 0:
        return None
    return Bounds(bounds.low // divisor, (bounds.end - 1) // divisor + 1)


def _clamped(call: _OperatorCall) -> Bounds | None:
    known = bounds_of(call.args[0])
    low, most = call.whole("min"), call.whole("max")
    low = known.low if low is None and known is not None else low
    end = (known.end if known is not None else None) if most is None else most + 1
    return None if low is None or end is None else Bounds(low, max(end, low + 1))


_Rule = Callable[[_OperatorCall], "Bounds | None"]

#: Operators -> the bounds of each of their results.
BOUNDED: dict[str, tuple[_Rule | None, ...]] = {
    "aten::" + name: rules
    for names, rules in (
        (("argmax", "argmin"), (_position,)),
        (("topk", "sort", "median", "nanmedian", "mode", "kthvalue", "cummax", "cummin"), (_same, _position)),
        (("max",), (_largest, _position)),
        (("min",), (_smallest, _position)),
        (("amax",), (_largest,)),
        (("sum", "count_nonzero"), (_counted,)),
        (("amin",), (_smallest,)),
        (("multinomial",), (lambda call: Bounds(0, call.args[0].shape[-1]),)),
        (("bucketize",), (lambda call: Bounds(0, call["boundaries"].numel() + 1),)),
        (("searchsorted",), (lambda call: Bounds(0, call["sorted_sequence"].shape[-1] + 1),)),
        (("randint", "randint_like"), (_drawn,)),
        (("randperm",), (lambda call: Bounds(0, call.whole("n") or 0),)),
        (("remainder",), (_remainder,)),
        (("floor_divide", "div"), (_quotient,)),
        (("clamp",), (_clamped,)),
        (("cat", "stack"), (_of_all,)),
        (
            (
                *("view", "_unsafe_view", "_reshape_alias", "slice", "narrow", "select", "squeeze", "unsqueeze"),
                *("clone", "contiguous", "_to_copy", "detach", "alias", "transpose", "t", "permute", "expand"),
                *("index", "index_select", "gather", "flip", "repeat", "_unique2", "unique_consecutive"),
            ),
            (_same,),
        ),
    )
    for name in names
}
