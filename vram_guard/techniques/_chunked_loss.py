"""Logits and their cross-entropy in chunks of rows (tokens): the whole of the logits is never there.

The last layer returns a stand-in for its logits, which remembers its input. What changes their rows alone (views,
slices of tokens) is done to that input, what is done to each number (casts, a scale, a soft cap) is noted, and
``cross_entropy`` runs layer and loss chunk by chunk, each under ``torch.utils.checkpoint``: its logits are computed
again in the backward pass. Sums of losses and of gradients are added up in another order, nothing else differs.
Whatever else is asked of the logits gets them whole, as the layer makes them: right, and without a saving.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from vram_guard.errors import UnsupportedTechniqueError
from vram_guard.language import _
from vram_guard.techniques.patched_forward import PatchedForward, patch_forwards
from vram_guard.tensors import version_of

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def chunk_loss(model: nn.Module, head: str) -> Callable[[], None]:
    """Compute the logits of this layer, and their cross-entropy, in chunks from now on.

    Only while the layer trains with gradients on.

    Args:
        model: any module; it is changed in place.
        head: a ``torch.nn.Linear`` as in ``model.named_modules()``.

    Returns:
        A function that puts the layer's own forward back.

    Raises:
        InvalidInputError: no module has this name; nothing was changed.
        UnsupportedTechniqueError: it is no plain linear layer.
    """
    found = dict(model.named_modules(remove_duplicate=False)).get(head)
    if found is not None and type(found) is not nn.Linear:
        kind = type(found).__name__
        raise UnsupportedTechniqueError(
            _("logits are computed in chunks by a plain Linear layer, and {name} is a {kind}", name=head, kind=kind)
        )
    return patch_forwards(model, (head,), _Head)


class _Head(PatchedForward):
    """A last layer that says what its logits would be."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """A stand-in for the logits, where they are to be trained on."""
        layer = self.module
        simple = len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor) and args[0].dim() > 1
        if not (simple and layer.training and torch.is_grad_enabled()) or torch.compiler.is_compiling():
            return self.as_written(*args, **kwargs)
        kind = args[0].device.type
        cast_to = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        recipe = _Recipe(cast("nn.Linear", layer), self.as_written, cast_to, version_of(args[0]), _versions(layer))
        return _Logits.of(args[0], recipe)


class _Recipe(NamedTuple):
    """What makes logits of an input."""

    layer: nn.Linear
    forward: Callable[..., Any]
    autocast: torch.dtype | None
    version: int
    versions: tuple[int, ...]
    each: tuple[Call, ...] = ()
    """What is done to each number of them."""
    moved: bool = False
    """True if classes stand in the second place, as cross-entropy wants them for more than one row a sample."""
    detached: bool = False

    @property
    def classes(self) -> int:
        return self.layer.out_features

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Those of some rows."""
        with torch.autocast(rows.device.type, dtype=self.autocast, enabled=self.autocast is not None):
            made: torch.Tensor = self.forward(rows)
        return self.changed(made)

    def changed(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits of the layer after what is done to each number."""
        for function, args, kwargs in self.each:
            logits = function(logits, *args, **kwargs)
        return logits

    def check(self, rows: torch.Tensor) -> None:
        """Refuse logits of weights that have been trained since."""
        if _versions(self.layer) != self.versions or version_of(rows) != self.version:
            raise UnsupportedTechniqueError(
                _(
                    "logits are read after the weights that make them have changed: with a loss in chunks, read them "
                    "before the optimizer steps, or leave chunked_loss out"
                )
            )


def _versions(layer: nn.Module) -> tuple[int, ...]:
    return tuple(version_of(weight) for weight in layer.parameters())


class _Logits(torch.Tensor):
    """A stand-in for logits: in memory it is the input that they would be made of."""

    rows: torch.Tensor
    recipe: _Recipe
    whole: torch.Tensor | None

    @staticmethod
    def of(rows: torch.Tensor, recipe: _Recipe) -> _Logits:
        made = rows.detach().as_subclass(_Logits)
        made.__dict__.update(rows=rows, recipe=recipe, whole=None)
        return made

    def made(self) -> torch.Tensor:
        """The logits themselves."""
        own = self.__dict__
        if own["whole"] is None:
            rows, recipe = own["rows"], own["recipe"]
            recipe.check(rows)
            with torch.set_grad_enabled(not recipe.detached):
                logits = recipe.logits(rows)
            own["whole"] = logits.transpose(1, 2) if recipe.moved else logits
        return cast("torch.Tensor", own["whole"])

    #: Not by way of ``__torch_function__``: a trace has attributes of its own for tensors.
    device = property(lambda self: self.__dict__["rows"].device)
    is_cuda = property(lambda self: self.__dict__["rows"].is_cuda)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """A cast of each number; a move to where the logits are is none."""
        return _Logits.__torch_function__(torch.Tensor.to, (), (self, *args), kwargs)

    @property
    def dimensions(self) -> torch.Size:
        """The logits' shape."""
        rows, recipe = self.__dict__["rows"], self.__dict__["recipe"]
        shape = (*rows.shape[:-1], recipe.classes)
        return torch.Size((shape[0], shape[2], shape[1]) if recipe.moved else shape)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        one = args[0] if args and isinstance(args[0], _Logits) else kwargs.get("input")
        if isinstance(one, _Logits) and one.__dict__["whole"] is None:
            answer = _answered(one, func, args[1:] if args and args[0] is one else args, kwargs)
            if answer is not NotImplemented:
                return answer
        return func(*map(_real, args), **{name: _real(value) for name, value in kwargs.items()})


def _real(value: Any) -> Any:
    if isinstance(value, _Logits):
        return value.made()
    if isinstance(value, (list, tuple)) and any(isinstance(item, _Logits) for item in value):
        return type(value)(map(_real, value))
    return value


# --- what is answered without logits ---------------------------------------------------------------------------------

#: Attributes that are those of the layer's input.
_OF_ROWS = frozenset({"device", "is_cuda", "is_cpu", "is_meta", "layout", "is_sparse", "is_quantized", "is_nested"})

#: What is done to each number, with numbers alone.
_EACH = frozenset(
    {
        *("float", "double", "half", "bfloat16", "tanh"),
        *("div", "mul", "true_divide", "multiply", "__truediv__", "__mul__", "__rmul__"),
    }
)


def _answered(one: _Logits, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The answer to a call on a stand-in alone; NotImplemented where the logits themselves are needed."""
    rows, recipe, shape = one.__dict__["rows"], one.__dict__["recipe"], one.dimensions
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return _attribute(one, getattr(func.__self__, "__name__", ""))
    if name in ("size", "dim", "__len__", "numel"):
        if name == "size":
            return shape[args[0] if args else kwargs["dim"]] if args or kwargs else shape
        return {"dim": len(shape), "__len__": shape[0], "numel": math.prod(shape)}[name]
    if func is functional.cross_entropy:
        return _cross_entropy(rows, recipe, args, {key: value for key, value in kwargs.items() if key != "input"})
    if name == "detach":
        return _Logits.of(rows.detach(), recipe._replace(detached=True))
    if recipe.moved or any(isinstance(value, torch.Tensor) for value in (*args, *kwargs.values())):
        return NotImplemented
    if name in _EACH:
        return _Logits.of(rows, recipe._replace(each=(*recipe.each, (func, args, kwargs))))
    if name == "to":
        return _to(rows, recipe, args, kwargs)
    return _of_rows(rows, recipe, name, args, kwargs)


def _attribute(one: _Logits, name: str) -> Any:
    rows, recipe = one.__dict__["rows"], one.__dict__["recipe"]
    if name == "shape":
        return one.dimensions
    if name == "ndim":
        return len(one.dimensions)
    if name == "dtype":
        return _dtype(rows, recipe)
    if name == "requires_grad":
        return not recipe.detached
    return getattr(rows, name) if name in _OF_ROWS else NotImplemented


def _dtype(rows: torch.Tensor, recipe: _Recipe) -> torch.dtype:
    """The dtype of the logits, as no numbers at all show it."""
    with torch.no_grad():
        none = rows.new_empty(0, dtype=recipe.autocast or recipe.layer.weight.dtype)
        return recipe.changed(none).dtype


def _to(rows: torch.Tensor, recipe: _Recipe, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A cast; a move to where they are is none."""
    target = [*args, *kwargs.values()]
    if len(target) == 1 and isinstance(target[0], torch.dtype):
        return _Logits.of(rows, recipe._replace(each=(*recipe.each, (torch.Tensor.to, (target[0],), {}))))
    if len(target) == 1 and isinstance(target[0], (str, torch.device)) and torch.device(target[0]) == rows.device:
        return _Logits.of(rows, recipe)
    return NotImplemented


def _of_rows(rows: torch.Tensor, recipe: _Recipe, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Views and slices that leave the classes where they are, done to what the logits are made of."""
    dims = rows.dim()
    changed = None
    if name in ("contiguous", "clone") and not args and not kwargs:
        changed = rows.contiguous()
    elif name in ("view", "reshape") and not kwargs:
        wanted = tuple(args[0]) if len(args) == 1 and isinstance(args[0], (tuple, list, torch.Size)) else args
        if all(isinstance(size, int) for size in wanted) and len(wanted) > 1 and wanted[-1] == recipe.classes:
            changed = rows.reshape(*wanted[:-1], rows.shape[-1])
    elif name == "flatten" and _flattened(dims, *args, **kwargs):
        changed = rows.flatten(*args, **kwargs)
    elif name == "__getitem__" and _keeps_classes(args[0], dims):
        changed = rows[args[0]]
    elif _moves_classes(name, args) and dims == 3 and not kwargs:
        return _Logits.of(rows, recipe._replace(moved=True))
    if changed is None or changed.dim() < 2:
        return NotImplemented
    return _Logits.of(changed, recipe._replace(version=version_of(changed)))


def _moves_classes(name: str, args: tuple[Any, ...]) -> bool:
    """True if the second and the third of three dimensions change places."""
    if name in ("transpose", "swapaxes"):
        return {place % 3 for place in args} == {1, 2}
    places = args[0] if len(args) == 1 else args
    return name == "permute" and [place % 3 for place in places] == [0, 2, 1]


def _flattened(dims: int, start_dim: int = 0, end_dim: int = -1) -> bool:
    """True if flattening leaves the classes alone."""
    return (start_dim % dims) <= (end_dim % dims) < dims - 1


def _keeps_classes(index: Any, dims: int) -> bool:
    """True for numbers, slices and an ellipsis over rows."""
    parts = index if isinstance(index, tuple) else (index,)
    if not all(part is Ellipsis or (isinstance(part, (int, slice)) and not isinstance(part, bool)) for part in parts):
        return False
    named = len(parts) - parts.count(Ellipsis)
    reaches = named == dims or (Ellipsis in parts and parts[-1] is not Ellipsis)
    return parts.count(Ellipsis) <= 1 and named <= dims and (not reaches or parts[-1] == slice(None))


# --- the loss --------------------------------------------------------------------------------------------------------


def _cross_entropy(
    rows: torch.Tensor,
    recipe: _Recipe,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """``torch.nn.functional.cross_entropy`` over chunks of rows."""
    names = ("target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    target: Any = given.get("target")
    weight = given.get("weight")
    reduction, ignored = given.get("reduction", "mean"), given.get("ignore_index", -100)
    plain = given.get("size_average") is None and given.get("reduce") is None
    at_rows = isinstance(target, torch.Tensor) and target.shape == rows.shape[:-1] and not target.is_floating_point()
    if not (plain and at_rows and reduction in ("mean", "sum", "none")) or (rows.dim() > 2 and not recipe.moved):
        return NotImplemented
    recipe.check(rows)
    flat = rows.flatten(0, -2)
    count = max(1, min(chunks_of(recipe.layer), len(flat)))
    inside = "none" if reduction == "none" else "sum"

    def loss(some: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        settings = {"ignore_index": ignored, "label_smoothing": given.get("label_smoothing", 0.0)}
        return functional.cross_entropy(recipe.logits(some), wanted, weight, reduction=inside, **settings)

    def chunk(some: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        if recipe.detached or not torch.is_grad_enabled():
            with torch.no_grad():
                return loss(some, wanted)
        return cast("torch.Tensor", checkpoint(loss, some, wanted, use_reentrant=False, preserve_rng_state=False))

    pairs = zip(flat.tensor_split(count), target.flatten().tensor_split(count), strict=True)
    parts = [chunk(some, wanted) for some, wanted in pairs]
    if reduction == "none":
        return torch.cat(parts).view(target.shape)
    # Added up with more digits than a chunk's loss may have: the whole's is rounded once.
    total = torch.stack([part.float() if part.itemsize < 4 else part for part in parts]).sum()
    if reduction == "mean":
        used = target != ignored
        total = total / (used.sum() if weight is None else (weight[target.clamp(min=0)] * used).sum())
    return total.to(parts[0].dtype)


def chunks_of(layer: nn.Linear) -> int:
    """Chunks of as many rows that their logits take about as many numbers as the layer's whole input has."""
    return max(1, math.ceil(layer.out_features / layer.in_features))
