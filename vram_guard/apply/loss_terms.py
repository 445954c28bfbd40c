"""Terms of a loss, read from its graph: which sums and means over which elements, each times which number.

``cross_entropy(...) / 4 + 0.1 * penalty.mean()`` is two terms: a mean times 0.25, and a mean times 0.1. Nothing is
computed, so symbolic losses are read as well as real ones. Of one batch, a sum that is divided by its number of samples
and a sum that is divided by another constant look alike; of two sizes of batches they do not (:func:`reduction_of`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import torch

from vram_guard.language import _
from vram_guard.state.containers import children
from vram_guard.tensors import without_modes

#: Nodes of a graph that leave a number as it is.
_SAME = ("ToCopy", "Clone", "Alias", "View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "Identity", "Expand")

#: Of DeepSpeed's stage 3, around the calls of modules: they gather and free weights, and hand on what they are given.
_GATHERING = ("PreBackwardFunctionForModule", "PostBackwardFunctionModule")
_GATHERS = "deepspeed.runtime.zero.parameter_offload"

#: torch's enumeration of reductions (``at::Reduction``): 0 is none.
_REDUCTIONS = {1: "mean", 2: "sum"}

#: More nodes than this between a loss and its reductions are not looked at.
MOST_NODES = 10_000


class Term(NamedTuple):
    """One part of a loss."""

    reduction: str
    """"mean" or "sum"; else what stands there instead, which is neither."""
    factor: float
    """The number by which it is multiplied."""
    shape: tuple[int, ...]
    """Of what is reduced; of labels, where a reduction counts those. () where nothing is known."""
    labels: bool = False
    """True where labels are counted, of which it leaves out those that are to be ignored."""
    weighed: bool = False
    """True where classes have weights, so that one label counts more than another."""
    computed: bool = False
    """True where it is multiplied with, or divided by, a number that was computed."""

    @property
    def known(self) -> bool:
        """True for a mean or a sum."""
        return self.reduction in ("mean", "sum")

    @property
    def elements(self) -> int:
        """Number of elements that are reduced."""
        return math.prod(self.shape)

    @property
    def of_each_element(self) -> float:
        """Weight of one element in the loss."""
        return self.factor / max(1, self.elements) if self.reduction == "mean" else self.factor


class Reduction(NamedTuple):
    """A node of a loss's graph where scaling and adding end."""

    node: Any
    """None for a number without a graph."""
    factor: float
    computed: tuple[int, ...] = ()
    """Where in memory its factors are that were tensors, not numbers of Python."""


def reductions(loss: torch.Tensor) -> list[Reduction] | None:
    """The reductions that a loss is made of; None where there are too many."""
    waiting = [Reduction(loss.grad_fn, 1.0)]
    found: list[Reduction] = []
    seen = 0
    while waiting:
        one = waiting.pop()
        seen += 1
        if seen > MOST_NODES:
            return None
        further = [] if one.node is None else list(_further(one.node, one.factor))
        waiting += [Reduction(node, factor, one.computed + computed) for node, factor, computed in reversed(further)]
        if not further:
            found.append(one)
    return found


def loss_terms(loss: torch.Tensor) -> tuple[Term, ...]:
    """The terms of a loss.

    Args:
        loss: one number with a graph that is not freed.
    """
    found = reductions(loss)
    if found is None:
        return (Term(_("a graph that is too long to read"), 1.0, ()),)
    return tuple(map(term_of, found))


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
    for _step in range(MOST_NODES):
        if not waiting:
            return True
        node = waiting.pop()
        if node is None:
            return False
        if node._sequence_nr() in numbers:  # noqa: SLF001 - see simulate/private_api.py
            continue
        further = [other for other, _factor, _computed in _further(node, 1.0)]
        if not further:
            return False
        waiting += further
    return False


# --- nodes ----------------------------------------------------------------------------------------------------


def _further(node: Any, factor: float) -> Iterator[tuple[Any, float, tuple[int, ...]]]:
    """The nodes behind one that only scales or adds, with their factors, and where those are that were tensors.

    Nothing for any other node.
    """
    kind = kind_of(node)
    behind = [other for other, _input in node.next_functions]
    if kind == "Neg":
        yield behind[0], -factor, ()
    elif len(behind) == 1 and (kind in _SAME or _gathers(node) or (kind in ("Mean", "Sum") and _of_one_number(node))):
        yield behind[0], factor, ()
    elif kind in ("Add", "Sub", "Rsub") and behind:
        yield from _added(kind, behind, factor, float(getattr(node, "_saved_alpha", 1.0)))
    elif kind in ("Mul", "Div"):
        scale = _constant(node, behind)
        if scale is not None:
            yield scale[0], factor * scale[1] if kind == "Mul" else factor / scale[1], scale[2]


def _gathers(node: Any) -> bool:
    made_by = getattr(node, "_forward_cls", None)
    return made_by is not None and (made_by.__module__, made_by.__name__) in [(_GATHERS, name) for name in _GATHERING]


def _of_one_number(node: Any) -> bool:
    """True for the mean or sum of a number alone, as MMEngine takes it of every loss."""
    return len(node._saved_self_sym_sizes) == 0 if hasattr(node, "_saved_self_sym_sizes") else False  # noqa: SLF001


def _added(kind: str, behind: list[Any], factor: float, alpha: float) -> Iterator[tuple[Any, float, tuple[int, ...]]]:
    signs = {"Add": (1.0, alpha), "Sub": (1.0, -alpha), "Rsub": (-alpha, 1.0)}[kind]
    for node, sign in zip(behind, signs, strict=False):
        if node is not None:  # a constant, added
            yield node, factor * sign, ()


def _constant(node: Any, behind: list[Any]) -> tuple[Any, float, tuple[int, ...]] | None:
    """The operand that carries the graph, and the number that it is multiplied with or divided by; None: no number.

    Of a number that is a tensor to the script as well, also where it is.
    """
    carrying = [at for at, other in enumerate(behind) if other is not None]
    if len(carrying) != 1 or (carrying[0] == 1 and kind_of(node) == "Div"):
        return None
    saved = getattr(node, "_saved_other" if carrying[0] == 0 else "_saved_self", None)
    computed: tuple[int, ...] = ()
    if isinstance(saved, torch.Tensor):
        # A number of Python lies on the CPU as a tensor; what a model computed is nothing that is known beforehand.
        saved, computed = number_in(saved)
    if not isinstance(saved, int | float) or not saved or not math.isfinite(saved):
        return None
    return behind[carrying[0]], float(saved), computed


def number_in(tensor: torch.Tensor) -> tuple[Any, tuple[int, ...]]:
    """Number in a real tensor on the CPU, or in one of a trace whose value is known, None for others.

    And its place, if it was a tensor before it met another.
    """
    from vram_guard.simulate.device.constants import compute
    from vram_guard.simulate.device.symbolic import is_symbolic

    with without_modes():  # in a trace, nothing is to be written down for this
        if tensor.dim():
            return None, ()
        if is_symbolic(tensor):
            value = compute(tensor)
            return None if value is None else value.item(), (id(tensor),)
        if tensor.device.type != "cpu":
            return None, ()
        # Numbers of Python are of the widest type, and make no other tensor as wide.
        narrow = torch.zeros((), dtype=torch.float32 if tensor.is_floating_point() else torch.int32)
        of_python = tensor.dtype != narrow.dtype and torch.result_type(tensor, narrow) == narrow.dtype
        return tensor.item(), () if of_python else (tensor.data_ptr(),)


def term_of(one: Reduction) -> Term:
    """The term that ends at a node; see :func:`loss_terms`."""
    node, factor, computed = one
    if node is None:
        return Term(_("a number without a graph"), factor, ())
    kind = kind_of(node)
    if kind in ("Mean", "Sum"):
        sizes = tuple(map(int, node._saved_self_sym_sizes))  # noqa: SLF001 - autograd's own
        return Term(kind.lower(), factor, sizes, computed=bool(computed))
    reduction = _REDUCTIONS.get(getattr(node, "_saved_reduction", 0))
    counted = _counted(node)
    if reduction is None or counted is None:
        return Term(node.name(), factor, ())
    term = Term(reduction, factor, tuple(counted.shape), computed=bool(computed))
    if not hasattr(node, "_saved_ignore_index"):
        return term
    return term._replace(labels=True, weighed=node._saved_weight is not None)  # noqa: SLF001 - the same


def kind_of(node: Any) -> str:
    """The operator that a node belongs to: Div for DivBackward0."""
    name: str = node.name()
    return name.rpartition("Backward")[0]


def parts_of(batch: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every part of a batch that is no container, with its path."""
    parts = children(batch)
    if parts is None:
        yield path, batch
    else:
        for key, part in parts.items():
            yield from parts_of(part, (*path, key))


def _counted(node: Any) -> torch.Tensor | None:
    """Tensor whose elements a loss's own reduction counts: labels of a cross-entropy, else what meets its target."""
    for name in ("_saved_target", "_saved_self") if hasattr(node, "_saved_ignore_index") else ("_saved_self",):
        found = getattr(node, name, None)
        if isinstance(found, torch.Tensor):
            return found
    return None
