"""A short way for lists of DTensors: what an optimizer does with them is done with each rank's own part.

DTensor derives how each result is divided, tensor by tensor, for every operator of the optimizer: two thirds of the
time of a trace. Where all tensors at one place of the lists are divided alike, and no sum is pending, an operator on
each element divides its results as its operands, and runs on the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from vram_guard.tensors import map_tensors_in

#: Element by element over lists; those that reduce a tensor to a number are not.
_LISTS = ("aten::_foreach_", "aten::_fused_", "aten::_amp_foreach_")
_REDUCING = ("aten::_foreach_norm", "aten::_foreach_max", "aten::_foreach_powsum")

Runner = Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], Any]


def goes_over_lists(func: Any) -> bool:
    """True for operators that compute element by element over lists of tensors."""
    name: str = func._schema.name
    return name.startswith(_LISTS) and name not in _REDUCING


def on_parts(run: Runner, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator of :func:`goes_over_lists` on the parts of DTensors.

    Args:
        run: runs an operator on plain tensors; called with the operator, their types, and its arguments.
        func: the operator.
        args: its arguments, with DTensors among them.
        kwargs: the others.

    Returns:
        Its result; NotImplemented where DTensor has to do it, which may move data.
    """
    first = args[0]
    if not isinstance(first, (list, tuple)) or not first or not _alike((*args, *kwargs.values()), len(first)):
        return NotImplemented
    parts = tuple(map_tensors_in(_part, value) for value in args)
    made = run(func, (), parts, {name: map_tensors_in(_part, value) for name, value in kwargs.items()})
    if not func._schema.returns or func._schema.is_mutable:
        return first if func._schema.returns else None
    return type(made)(_whole(part, given) for part, given in zip(made, first, strict=True))


def _part(tensor: torch.Tensor) -> torch.Tensor:
    part: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def _alike(values: Sequence[Any], length: int) -> bool:
    """True where the tensors at each place of the lists are divided alike, and tensors outside of lists not at all."""
    lists = [value for value in values if isinstance(value, (list, tuple)) and value]
    lists = [value for value in lists if isinstance(value[0], torch.Tensor)]
    if any(len(value) != length for value in lists):
        return False
    single = (value for value in values if isinstance(value, torch.Tensor))
    return all(map(_divided_alike, zip(*lists, strict=True))) and all(map(_is_everywhere, single))


def _divided_alike(together: Sequence[torch.Tensor]) -> bool:
    first = getattr(together[0], "_spec", None)
    if first is None or any(placement.is_partial() for placement in first.placements):
        return False
    for tensor in together[1:]:
        spec = getattr(tensor, "_spec", None)
        if spec is None:
            if tensor.dim():
                return False
        elif spec.placements != first.placements or spec.mesh != first.mesh:
            return False
    return True


def _is_everywhere(tensor: torch.Tensor) -> bool:
    spec = getattr(tensor, "_spec", None)
    return spec is None or all(placement.is_replicate() for placement in spec.placements)


def _whole(part: torch.Tensor, given: Any) -> Any:
    """A result divided as the operand at its place."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    spec = given._spec
    if part.dtype != given.dtype:
        spec = DTensorSpec(spec.mesh, spec.placements, TensorMeta(given.shape, given.stride(), part.dtype))
    return DTensor(part, spec, requires_grad=False)
