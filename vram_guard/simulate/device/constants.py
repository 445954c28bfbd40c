"""Values that are known although nothing is computed: where they come from decides ``if`` and ``.item()``.

A training step asks few questions of its tensors: is the loss NaN, is every mask entry set, how many labels are
masked. Tensors that come from the batch, from constants or from ``arange`` carry a deferred computation (the
operator and its arguments); when the step asks, it is run for real, on the CPU. For what depends on weights there is
none: the answer is then a placeholder that keeps a training loop going (finite, not NaN, one).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from vram_guard.limits import LARGEST_COMPUTED
from vram_guard.simulate.device import ranges
from vram_guard.simulate.device.ranges import bounds_of
from vram_guard.simulate.device.symbolic import is_symbolic
from vram_guard.tensors import map_tensors_in, tensors_in

_ATTRIBUTE = "_vram_guard_constant"
#: Tests for NaN and infinity, whose answer is taken for granted where nothing is known: a healthy step.
_HEALTHY: dict[str, bool] = {
    "aten::isnan": False,
    "aten::isinf": False,
    "aten::isposinf": False,
    "aten::isneginf": False,
}

#: Operators of two truth values -> the value of one side that settles the result, whatever the other side is.
_SETTLED_BY: dict[str, bool] = {
    **dict.fromkeys(("aten::bitwise_or", "aten::logical_or", "aten::__or__"), True),
    **dict.fromkeys(("aten::bitwise_and", "aten::logical_and", "aten::__and__"), False),
}

#: Losses over labels, whose second result depends on labels and weights of classes alone.
COUNTING_LABELS = ("aten::nll_loss_forward", "aten::nll_loss2d_forward")

Computation = Callable[[], torch.Tensor]


def known(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """The symbolic tensor has this real value (a CPU tensor of its shape), if it is small enough."""
    if value.numel() <= LARGEST_COMPUTED:
        setattr(tensor, _ATTRIBUTE, lambda: value)


def forget(tensor: torch.Tensor) -> None:
    """The tensor was written to: what was known of it is void."""
    if _ATTRIBUTE in tensor.__dict__:
        delattr(tensor, _ATTRIBUTE)
    ranges.forget(tensor)


def computation(tensor: torch.Tensor) -> Computation | None:
    """The computation that gives the tensor's real value, or None."""
    made: Computation | None = tensor.__dict__.get(_ATTRIBUTE) if is_symbolic(tensor) else (lambda: tensor)
    return made


def compute(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor's real value on the CPU, or None where it is not known."""
    with torch.no_grad():
        return _tried(computation(tensor))


def derive(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, part: int | None = None) -> None:
    """Give ``out`` a deferred computation if all tensors it was made from have one (or are real).

    Args:
        func: the operator, with its arguments.
        args: of it.
        kwargs: of it.
        out: its result: a symbolic tensor, or several (``unbind``); anything else has no values.
        part: which of several results it is; None: it is the only one.
    """
    if isinstance(out, (list, tuple)):
        for number, one in enumerate(out):
            derive(func, args, kwargs, one, number)
        return
    if not isinstance(out, torch.Tensor) or not is_symbolic(out):
        return
    if out.numel() > LARGEST_COMPUTED:
        return
    name = func._schema.name
    if name in COUNTING_LABELS and part == 1:
        labels, weights = args[1], args[2] if len(args) > 2 else None
        setattr(out, _ATTRIBUTE, _labels_counted(computation(labels), weights, args[4] if len(args) > 4 else -100))
        return
    if name in _SETTLED_BY and _may_be_settled(name, args, out):
        setattr(out, _ATTRIBUTE, _settled(func, args, out))
        return
    first = args[0] if args and isinstance(args[0], torch.Tensor) else None
    if first is not None and is_symbolic(first) and _ATTRIBUTE not in first.__dict__:
        healthy = _healthy_answer(name, args)
        if healthy is not None:
            _answer(out, healthy)
        return
    if any(computation(tensor) is None for tensor in tensors_in(args)):
        return
    on_cpu = {key: torch.device("cpu") if key == "device" else value for key, value in kwargs.items()}
    on_cpu.pop("pin_memory", None)
    if any(isinstance(value, torch.Tensor) for value in on_cpu.values()):
        return
    memory: list[torch.Tensor] = []
    # Not the tensors themselves: a computation must not keep memory alive that the step has freed.
    without_tensors = map_tensors_in(_Deferred, args)

    def made() -> torch.Tensor:
        if not memory:
            made_by = func(*_filled(without_tensors), **on_cpu)
            memory.append(made_by if part is None else made_by[part])
        return memory[0]

    setattr(out, _ATTRIBUTE, made)


def _labels_counted(labels: Computation | None, weights: torch.Tensor | None, ignored: int) -> Computation | None:
    """The second result of a loss over labels: how many count, or the weights of their classes together."""
    weighing = None if weights is None else computation(weights)
    if labels is None or (weights is not None and weighing is None):
        return None

    def made() -> torch.Tensor:
        values = labels()
        counted = values[values != ignored]
        return torch.tensor(float(counted.numel())) if weighing is None else weighing()[counted].sum()

    return made


def _may_be_settled(name: str, args: tuple[Any, ...], out: torch.Tensor) -> bool:
    """True where something is known of one of two sides, which are truth values, or numbers with 0 for none of them."""
    if out.dtype != torch.bool and (_SETTLED_BY[name] or out.is_floating_point()):
        return False
    sides = [one for one in args[:2] if isinstance(one, torch.Tensor)]
    return len(sides) == 2 and any(computation(one) is not None for one in sides)


def _settled(func: Any, args: tuple[Any, ...], out: torch.Tensor) -> Computation:
    """The result of a logical operator, which one side alone may settle."""
    sides, shape, dtype = [computation(one) for one in args[:2]], out.shape, out.dtype
    settling = _SETTLED_BY[func._schema.name]
    memory: list[torch.Tensor | None] = []

    def result() -> torch.Tensor | None:
        values = [_tried(made) for made in sides]
        if all(value is not None for value in values):
            both: torch.Tensor = func(*values)
            return both
        if any(value is not None and bool((value == settling).all()) for value in values):
            return torch.full((), settling, dtype=dtype).expand(shape)
        return None

    def made() -> torch.Tensor:
        if not memory:
            memory.append(result())
        if memory[0] is None:
            raise RuntimeError("neither side settles it")
        return memory[0]

    return made


def _tried(made: Computation | None) -> torch.Tensor | None:
    try:
        return None if made is None else made()
    except RuntimeError:  # an operator that the CPU cannot run on these arguments: then it is not known
        return None


def written(func: Any, args: tuple[Any, ...]) -> torch.Tensor | None:
    """The value of a known number once an operator has written to it in place (a counter); None: not known."""
    target = args[0]
    if target.numel() != 1 or _ATTRIBUTE not in target.__dict__:
        return None
    values = [compute(one) if isinstance(one, torch.Tensor) else one for one in args]
    if any(value is None and isinstance(one, torch.Tensor) for one, value in zip(args, values, strict=True)):
        return None
    result: torch.Tensor = func(values[0].clone(), *values[1:])  # type: ignore[union-attr]
    return result


class _Deferred:
    """The place of a tensor among arguments, with its computation."""

    __slots__ = ("compute",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.compute = computation(tensor)


def _filled(value: Any) -> Any:
    """Arguments with their tensors computed."""
    if isinstance(value, _Deferred):
        return value.compute() if value.compute is not None else None
    return type(value)(map(_filled, value)) if isinstance(value, (list, tuple)) else value


def _healthy_answer(name: str, args: tuple[Any, ...]) -> bool | None:
    """The answer of a test for NaN or infinity; torch decomposes ``isfinite`` into ``x == x`` and ``|x| != inf``."""
    if name in _HEALTHY:
        return _HEALTHY[name]
    if name in ("aten::eq", "aten::ne"):
        with_itself = args[0] is args[1]
        with_infinity = isinstance(args[1], float) and math.isinf(args[1])
        if with_itself or with_infinity:
            return (name == "aten::eq") == with_itself
    return None


def _answer(out: torch.Tensor, value: bool) -> None:
    shape = out.shape
    setattr(out, _ATTRIBUTE, lambda: torch.full((), value).expand(shape))


def scalar(tensor: torch.Tensor) -> Any:
    """The Python number that ``.item()`` answers: the real one where it is known, else a placeholder."""
    value = compute(tensor)
    return placeholder(tensor) if value is None else value.item()


def placeholder(tensor: torch.Tensor) -> Any:
    """The stand-in for an unknown value: 1 (a loss, a norm or a count to divide by), False for truth values.

    Where the tensor has bounds, it lies between them.
    """
    dtype = tensor.dtype
    if dtype == torch.bool:
        return False
    bounds = bounds_of(tensor)
    if bounds is not None:
        return bounds.low + (1 - bounds.low) % bounds.number
    if dtype.is_floating_point:
        return 1.0
    return complex(1) if dtype.is_complex else 1
