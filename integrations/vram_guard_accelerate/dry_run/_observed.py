"""What a step leaves behind, and where two of them differ."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from vram_guard.language import _, marked
from vram_guard_accelerate.dry_run.first_batch import root_of

#: Tensors are equal up to so much of their largest element: sums in another order, in double and in single precision.
ROUNDING = {"float64": 1e-6, "float32": 2e-3}

_KINDS = {
    "gradient": marked("the gradient of {name} ({apart} of it)"),
    "weight": marked("the weight {name}"),
    "buffer": marked("the buffer {name}"),
    "attribute": marked("the attribute {name}"),
    "loss": marked("the loss ({apart} of it)"),
}


@dataclass(frozen=True)
class Observed:
    """The state after a backward pass, by kind and name. It holds no tensors: a dry run saves none."""

    arrays: dict[tuple[str, str], np.ndarray[Any, Any]]
    values: dict[tuple[str, str], Any]


def observe(models: Sequence[nn.Module], losses: Sequence[torch.Tensor]) -> Observed:
    """What is compared of a step: gradients, weights, buffers but running statistics, attributes, losses."""
    root = root_of(tuple(models))
    tensors = {("loss", str(at)): loss.detach() for at, loss in enumerate(losses)}
    for name, parameter in root.named_parameters():
        tensors["weight", name] = parameter.detach()
        if parameter.grad is not None:
            tensors["gradient", name] = parameter.grad.detach()
    values: dict[tuple[str, str], Any] = {}
    for path, module in root.named_modules():
        prefix = f"{path}." if path else ""
        if not isinstance(module, nn.modules.batchnorm._NormBase):  # noqa: SLF001 - their common class is private
            for name, buffer in module.named_buffers(recurse=False):
                tensors["buffer", prefix + name] = buffer.detach()
        for name, attribute in vars(module).items():
            if name not in vars(nn.Module()):
                values |= ((("attribute", prefix + name), value) for value in _plain(attribute))
    return Observed({key: _array(tensor) for key, tensor in tensors.items()}, values)


def _array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    return (tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor).cpu().numpy()


def _plain(value: Any) -> Iterator[Any]:
    if isinstance(value, (bool, int, float, str, bytes)):
        yield value
    elif isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
        yield value.detach().tolist() if value.numel() <= 64 else tuple(value.shape)
    elif isinstance(value, (list, tuple, set, dict)):
        yield len(value)


def differences(one: Observed, other: Observed) -> list[str]:
    """What differs, in words, losses first, then what differs most."""
    found: list[tuple[float, str]] = []
    for (kind, name), apart in _apart(one, other):
        found.append((apart if kind != "loss" else 1e9, _(_KINDS[kind], name=name, apart=f"{apart:.1e}")))
    return [words for _apart_by, words in sorted(found, key=lambda pair: -pair[0])]


def _apart(one: Observed, other: Observed) -> Iterator[tuple[tuple[str, str], float]]:
    for key in {**one.arrays, **other.arrays}:
        a, b = one.arrays.get(key), other.arrays.get(key)
        apart = math.inf if a is None or b is None or a.shape != b.shape else _distance(a, b)
        if a is None or apart > ROUNDING.get(a.dtype.name, 0.0):
            yield key, apart
    for value in {**one.values, **other.values}:
        if one.values.get(value) != other.values.get(value):
            yield value, math.inf


def _distance(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> float:
    """The largest difference, as a share of the largest number."""
    if np.array_equal(one, other, equal_nan=one.dtype.kind == "f"):
        return 0.0
    if one.dtype.kind != "f":
        return math.inf
    apart = float(np.abs(one - other).max()) / float(max(np.abs(one).max(), np.abs(other).max()))
    return math.inf if math.isnan(apart) else apart


def added(parts: Sequence[Observed], weight: float) -> Observed:
    """Gradients and losses of several steps, added up with this weight; the rest is the first one's."""
    first = parts[0]
    arrays = {
        key: sum(part.arrays[key] * weight for part in parts)
        if key[0] in ("gradient", "loss") and all(key in part.arrays for part in parts)
        else array
        for key, array in first.arrays.items()
    }
    return Observed(arrays, first.values)
