"""The outcome of one optimizer step, as values that travel between processes."""

from __future__ import annotations

import logging
import math
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from vram_guard.proof._norms import distance, norm
from vram_guard.proof._surroundings import used_by_class
from vram_guard.state.containers import children
from vram_guard.tensors import version_of

Value: TypeAlias = "torch.Tensor | bool | int | float | complex | str | bytes | None"
"""A value that an attribute comes down to."""

#: Bounds of the walk over attributes. A model's own state (counters, queues, statistics) is far below them; a data set
#: or a framework's objects that hang on a model are not walked to their end.
DEEPEST, MOST_ITEMS, MOST_VALUES, MOST_CHARACTERS = 8, 1_000, 20_000, 1_000
#: Elements of an attribute's tensor that is copied; of a larger one, sum and norm.
MOST_ELEMENTS = 2**24

_LEAVES = (bool, int, float, complex, str, bytes, type(None))
_WRITTEN_OUT = (Enum, torch.dtype, torch.device)
# What an optimizer did is seen in the weights, and its state before that holds gradients' rounding noise.
_CLOSED = (
    *(FunctionType, BuiltinFunctionType, MethodType, ModuleType, type),
    *(torch.optim.Optimizer, torch.utils.data.DataLoader, torch.Generator, torch.cuda.Stream, logging.Logger),
)
#: Attributes that every module has; ``training`` is state.
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}
#: Those that ``fully_shard`` gives to modules (torch/distributed/_composable/contract.py, _fully_shard.py).
_OF_FSDP2 = ("__composable_api_state_key", "_is_fsdp_managed_module", "_fsdp_use_orig_params")


@dataclass(frozen=True, eq=False)
class Observed:
    """The outcome of one optimizer step; tensors are copies on the CPU."""

    gradients: Mapping[str, torch.Tensor]
    """By parameter, as the optimizer was given them."""
    weights: Mapping[str, torch.Tensor]
    """All parameters after the step."""
    buffers: Mapping[str, torch.Tensor]
    """Those of normalisation layers are left out: see :func:`normalisation_buffers`."""
    attributes: Mapping[str, Value]
    """Of every module, its class and what they hold: "encoder.counter", "queue[0]", "helper.seen['a']"."""
    logged: Mapping[str, Value]
    hooks: Mapping[str, int]
    """How often each ran."""
    loss: float | None
    moved: Mapping[str, float]
    """Norm of the change of each weight, buffer and attribute, where the state before the step was given."""
    writes: Mapping[str, int]
    """How often each tensor of ``versions`` was written in place, where the state before the step was given."""
    versions: Mapping[str, tuple[int, int]]
    """Identity and version of buffers, of attributes and of parameters that are not trained."""
    unseen: tuple[str, ...]
    """Attributes that were not looked into: too many, too deep, too long."""

    def __reduce__(self) -> tuple[Any, ...]:
        # As arrays, which pickle sends without a copy; multiprocessing would share a tensor's memory, which ends with
        # its process.
        return _received, ({name: _sent(value) for name, value in vars(self).items()},)

    @property
    def is_telling(self) -> bool:
        """False where no gradient is other than zero or one is no number: equal steps of that kind prove nothing."""
        norms = [norm(gradient) for gradient in self.gradients.values()]
        return any(norms) and all(map(math.isfinite, norms))


class _Array(NamedTuple):
    """A tensor's content."""

    content: Any
    dtype: torch.dtype
    shape: tuple[int, ...]


def _sent(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _sent(held) for name, held in value.items()}
    if isinstance(value, torch.Tensor) and not value.is_quantized:
        flat = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        return _Array(flat.view(torch.uint8).numpy(), value.dtype, tuple(value.shape))
    return value


def _received(fields: dict[str, Any]) -> Observed:
    return Observed(**{name: _put_together(value) for name, value in fields.items()})


def _put_together(value: Any) -> Any:
    if isinstance(value, _Array):
        return torch.from_numpy(value.content).view(value.dtype).reshape(value.shape)
    return {name: _put_together(held) for name, held in value.items()} if isinstance(value, dict) else value


def observe(
    model: nn.Module,
    *,
    before: Observed | None = None,
    gradients: Mapping[str, torch.Tensor | None] | None = None,
    loss: float | torch.Tensor | None = None,
    logged: Mapping[str, Any] | None = None,
    hooks: Mapping[str, int] | None = None,
    closed: tuple[type, ...] = (),
) -> Observed:
    """Take down what a step left behind; the model is not changed.

    Args:
        model: whose parameters, buffers and attributes.
        before: the same model before the step, observed in this process or the one that it was forked from: then
            differences are measured by what the step changed, and writes in place are counted.
        gradients: by parameter name at the time of the optimizer's step; None: as :func:`gradients_of` finds them now.
        loss: of the whole batch.
        logged: name -> number or tensor.
        hooks: name -> how often it ran.
        closed: attributes of these types are not looked into, such as a framework's own objects.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> model.counter = 3
        >>> model(torch.ones(4, 2)).mean().backward()
        >>> seen = observe(model, loss=0.5)
        >>> seen.attributes["counter"], seen.gradients["weight"].tolist()
        (3, [[1.0, 1.0]])
    """
    walk = _Walk(closed)
    walk.model(model)
    left_out = normalisation_buffers(model)
    buffers = {name: buffer for name, buffer in model.named_buffers() if name not in left_out}
    frozen = {name: weight for name, weight in model.named_parameters() if not weight.requires_grad}
    versions = {
        name: (id(tensor), version_of(tensor)) for name, tensor in {**walk.tensors, **buffers, **frozen}.items()
    }
    weights = {name: _copied(weight) for name, weight in model.named_parameters()}
    copies = {name: _copied(buffer) for name, buffer in buffers.items()}
    given = gradients_of(model) if gradients is None else gradients
    return Observed(
        gradients={name: _copied(gradient) for name, gradient in given.items() if gradient is not None},
        weights=weights,
        buffers=copies,
        attributes=walk.found,
        logged={name: _plain(value) for name, value in (logged or {}).items()},
        hooks=dict(hooks or {}),
        loss=None if loss is None else float(loss),
        moved={} if before is None else _moved(before, {**walk.found, **copies, **weights}),
        writes={} if before is None else _writes(before.versions, versions),
        versions=versions,
        unseen=tuple(walk.unseen),
    )


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the gradients as they are now, for the moment before the optimizer steps.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> model.weight.sum().backward()
        >>> gradients_of(model)
        {'weight': tensor([[1., 1.]])}
    """
    return {name: _copied(weight.grad) for name, weight in model.named_parameters() if weight.grad is not None}


def normalisation_buffers(model: nn.Module) -> frozenset[str]:
    """Running statistics and counters, which a step in micro-batches is known to advance in another way.

    Example:
        >>> sorted(normalisation_buffers(torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.LayerNorm(2))))
        ['0.num_batches_tracked', '0.running_mean', '0.running_var']
    """
    return frozenset(
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._NormBase)  # noqa: SLF001 - the base of batch and instance norm
        for name in ("running_mean", "running_var", "num_batches_tracked")
    )


class _Walk:
    """The attributes of a model, down to their values; each object once."""

    def __init__(self, closed: tuple[type, ...]) -> None:
        self.found: dict[str, Value] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self.unseen: list[str] = []
        self._closed = (*_CLOSED, *closed)
        # Objects and not their ids alone: an id of an object that is gone would be given again.
        self._seen: dict[int, object] = {}

    def model(self, model: nn.Module) -> None:
        registered = [*model.modules(), *model.parameters(), *model.buffers()]
        self._seen.update((id(each), each) for each in registered)
        for prefix, module in model.named_modules():
            if prefix and isinstance(module, self._closed):
                continue
            for name, value in _attributes_of(module):
                self._visit(f"{prefix}.{name}" if prefix else name, value, 0)
        for kind in {kind: None for module in model.modules() for kind in type(module).__mro__}:
            for name, value in _attributes_of_class(kind):
                self._visit(f"{kind.__qualname__}.{name}", value, 0)
            for name, value in used_by_class(kind):
                self._visit(name, value, 0)

    def _visit(self, name: str, value: Any, depth: int) -> None:
        if isinstance(value, self._closed) or _is_of_a_layout(value):
            return
        if depth > DEEPEST or len(self.found) >= MOST_VALUES:
            self.unseen.append(name)
        elif _is_leaf(value):
            self._keep(name, value)
        elif id(value) not in self._seen:
            self._seen[id(value)] = value
            if isinstance(value, torch.Tensor):
                self.tensors[name] = value
                self._keep(name, value)
                return
            for part, child in self._parts(name, value):
                self._visit(part, child, depth + 1)

    def _keep(self, name: str, value: Any) -> None:
        try:
            self.found[name] = _plain(value)
        except (
            RuntimeError,
            TypeError,
            ValueError,
            NotImplementedError,
        ):  # a tensor without data, or of a kind that has no copy
            self.unseen.append(name)

    def _parts(self, name: str, value: Any) -> Iterator[tuple[str, Any]]:
        parts = _items(value)
        if parts is None:
            yield from ((f"{name}.{key}", child) for key, child in _attributes_of(value))
            return
        yield f"len({name})", len(parts)
        if len(parts) > MOST_ITEMS:
            self.unseen.append(name)
        for position, (key, child) in enumerate(parts[:MOST_ITEMS]):
            shown = repr(key) if isinstance(key, (str, int)) else f"#{position}"
            yield f"{name}[{shown}]", child


def _is_of_a_layout(value: Any) -> bool:
    """True for what FSDP and device meshes keep: memory that they have freed looks like a tensor."""
    return type(value).__module__.startswith("torch.distributed.") and not isinstance(value, torch.Tensor)


def _items(value: Any) -> list[tuple[Any, Any]] | None:
    """Keys and items of a container; None for an object."""
    if isinstance(value, (deque, list, tuple)):
        return list(enumerate(value))
    if isinstance(value, (set, frozenset)):  # has no order, and objects none that two processes share
        return list(enumerate(sorted(filter(_is_leaf, value), key=repr)))
    try:
        held = children(value) if isinstance(value, Mapping) else None
    except Exception:  # noqa: BLE001 - a mapping of somebody else's making may fail in any way
        return None
    return None if held is None else list(held.items())


def _attributes_of(value: Any) -> Iterator[tuple[str, Any]]:
    """What an object holds; of a module that hangs on the model without being part of it, its tensors and parts too."""
    own: dict[str, Any] = dict(getattr(value, "__dict__", None) or {})
    if isinstance(value, nn.Module):
        for part in ("_parameters", "_buffers", "_modules"):
            yield from own.get(part, {}).items()
        own = {n: held for n, held in own.items() if n not in _OF_EVERY_MODULE and not n.startswith(_OF_FSDP2)}
    yield from own.items()
    slots = (slot for kind in type(value).__mro__ for slot in vars(kind).get("__slots__", ()))
    yield from ((slot, getattr(value, slot)) for slot in slots if slot != "__dict__" and hasattr(value, slot))


def _attributes_of_class(kind: type) -> Iterator[tuple[str, Any]]:
    """State that a class keeps for all its modules, such as a counter; torch's own classes have none."""
    if kind.__module__.partition(".")[0] not in ("torch", "builtins", "abc", "typing"):
        own = ((name, value) for name, value in vars(kind).items() if not name.startswith("__"))
        plain = (torch.Tensor, list, dict, set, deque, *_LEAVES)
        yield from ((name, value) for name, value in own if isinstance(value, plain))


def _is_leaf(value: Any) -> bool:
    return isinstance(value, (*_LEAVES, *_WRITTEN_OUT)) or _is_numpy(value)


def _is_numpy(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic))


def _plain(value: Any) -> Value:
    """A value that can be sent and compared.

    Raises:
        RuntimeError, TypeError, ValueError, NotImplementedError: there is no such value.
    """
    if isinstance(value, torch.Tensor):
        return _copied(value) if value.numel() <= MOST_ELEMENTS else _summed_up(_own_part(value.detach()))
    if _is_numpy(value):
        if value.size > MOST_ELEMENTS:  # perhaps a file that is as large as a data set
            raise TypeError
        if value.ndim:
            return torch.from_numpy(value.copy())
        item = value.item()
        return _plain(item) if isinstance(item, _LEAVES) else str(item)
    if isinstance(value, (bool, type(None))):
        return value
    if isinstance(value, bytes):
        return bytes(value[:MOST_CHARACTERS])
    # A subclass of a script's own could not be sent everywhere.
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    return complex(value) if isinstance(value, complex) else str(value)[:MOST_CHARACTERS]


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    held = _own_part(tensor.detach())
    dense = held if held.layout == torch.strided else held.to_dense()
    return dense.to("cpu").clone(memory_format=torch.contiguous_format)


def _own_part(tensor: torch.Tensor) -> torch.Tensor:
    """Of a DTensor what this process has of it: in a rehearsal, which has one process, all."""
    own: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return own


def _summed_up(tensor: torch.Tensor) -> torch.Tensor:
    values = tensor if tensor.is_floating_point() else tensor.float()
    return torch.stack([values.sum(dtype=torch.double), torch.linalg.vector_norm(values, dtype=torch.double)]).cpu()


def _moved(before: Observed, after: Mapping[str, Value]) -> dict[str, float]:
    old: dict[str, Value] = {**before.attributes, **before.buffers, **before.weights}
    moves = ((name, _move(old.get(name), value)) for name, value in after.items())
    return {name: move for name, move in moves if move is not None and math.isfinite(move)}


def _move(old: Value, new: Value) -> float | None:
    """The norm of a change; None where the two are no numbers of one shape."""
    if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
        alike = old.shape == new.shape and old.is_complex() == new.is_complex()
        return distance(old, new) if alike else None
    return abs(new - old) if isinstance(old, float) and isinstance(new, float) else None


def _writes(before: Mapping[str, tuple[int, int]], after: Mapping[str, tuple[int, int]]) -> dict[str, int]:
    """Versions counted up, of tensors that are still the same objects."""
    return {
        name: version - before[name][1]
        for name, (identity, version) in after.items()
        if name in before and before[name][0] == identity
    }
