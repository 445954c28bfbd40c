"""Terms of a loss, read from its graph: which sums and means over which elements, each times which number.

``cross_entropy(...) / 4 + 0.1 * penalty.mean()`` is two terms: a mean times 0.25, and a mean times 0.1. Nothing is
computed, so symbolic losses are read as well as real ones. Of one batch, a sum that is divided by its number of samples
and a sum that is divided by another constant look alike; of two sizes of batches they do not (:func:`reduction_of`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from vram_guard.apply.loss_weight import IGNORED
from vram_guard.language import _

#: Nodes of a graph that leave a number as it is.
_SAME = ("ToCopy", "Clone", "Alias", "View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "Identity", "Expand")

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
    behind: tuple[object, ...] = ()
    """The sizes of what it was computed from, where they were asked for: equal for batches of two sizes, where it does
    not depend on the batch (the square of the weights)."""
    ignored: int = IGNORED
    """The label that is left out, where labels are counted."""

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


def loss_terms(loss: torch.Tensor, *, behind: bool = False) -> tuple[Term, ...]:
    """The terms of a loss.

    Args:
        loss: one number with a graph that is not freed.
        behind: whether to look for what the terms were computed from, as :func:`reduction_of` needs it.
    """
    waiting: list[tuple[Any, float]] = [(loss.grad_fn, 1.0)]
    terms: list[Term] = []
    seen = 0
    while waiting:
        node, factor = waiting.pop()
        seen += 1
        if node is None:
            terms.append(Term(_("a number without a graph"), factor, ()))
        elif seen > MOST_NODES:
            return (Term(_("a graph that is too long to read"), 1.0, ()),)
        else:
            further = list(_further(node, factor))
            waiting += reversed(further)
            if not further:
                term = _leaf(node, factor)
                terms.append(term._replace(behind=_sizes_behind(node)) if behind else term)
    return tuple(terms)


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
        further = [other for other, _factor in _further(node, 1.0)]
        if not further:
            return False
        waiting += further
    return False


def reduction_of(
    one: Sequence[Term], samples: int, other: Sequence[Term], other_samples: int
) -> tuple[Literal["mean", "sum"] | None, str]:
    """Reduction of a loss over the samples of its batch, from its terms at two sizes of batches.

    Returns:
        "mean", "sum", or None where it is neither; and why it is neither.
    """
    if len(one) != len(other):
        return None, _("it has different parts at different batch sizes")
    found: set[Literal["mean", "sum"]] = set()
    independent = 0
    for term, twin in zip(one, other, strict=True):
        if term.behind and term == twin:
            independent += 1
            continue
        kind, why = _over_samples(term, samples, twin, other_samples)
        if kind is None:
            return None, why
        found.add(kind)
    if len(found) > 1:
        return None, _("it adds a mean over the batch to a sum over the batch")
    kind = found.pop() if found else "mean"  # what is the same for every slice is its own mean
    if kind == "sum" and independent:
        return None, _("it is a sum over the batch plus a term that does not depend on the batch")
    return kind, ""


def _over_samples(
    term: Term, samples: int, twin: Term, other_samples: int
) -> tuple[Literal["mean", "sum"] | None, str]:
    for one in (term, twin):
        if not one.known:
            return None, _("it comes out of {operation}", operation=one.reduction)
    if term.elements * other_samples != twin.elements * samples:
        return None, _("a {reduction} in it is not taken over the samples", reduction=term.reduction)
    if math.isclose(term.of_each_element, twin.of_each_element, rel_tol=1e-6):
        return "sum", ""
    if math.isclose(term.of_each_element * samples, twin.of_each_element * other_samples, rel_tol=1e-6):
        return "mean", ""
    return None, _("a sample counts in it neither as in a mean nor as in a sum")


# --- nodes ----------------------------------------------------------------------------------------------------


def _further(node: Any, factor: float) -> Iterator[tuple[Any, float]]:
    """The nodes behind one that only scales or adds, with their factors; nothing for any other node."""
    kind = _kind(node)
    behind = [other for other, _input in node.next_functions]
    if kind == "Neg":
        yield behind[0], -factor
    elif kind in _SAME and len(behind) == 1:
        yield behind[0], factor
    elif kind in ("Add", "Sub", "Rsub") and behind:
        yield from _added(kind, behind, factor, float(getattr(node, "_saved_alpha", 1.0)))
    elif kind in ("Mul", "Div"):
        scale = _constant(node, behind)
        if scale is not None:
            yield scale[0], factor * scale[1] if kind == "Mul" else factor / scale[1]


def _added(kind: str, behind: list[Any], factor: float, alpha: float) -> Iterator[tuple[Any, float]]:
    signs = {"Add": (1.0, alpha), "Sub": (1.0, -alpha), "Rsub": (-alpha, 1.0)}[kind]
    for node, sign in zip(behind, signs, strict=False):
        if node is not None:  # a constant, added
            yield node, factor * sign


def _constant(node: Any, behind: list[Any]) -> tuple[Any, float] | None:
    """The operand that carries the graph, and the number that it is multiplied with or divided by; None: no number."""
    carrying = [at for at, other in enumerate(behind) if other is not None]
    if len(carrying) != 1 or (carrying[0] == 1 and _kind(node) == "Div"):
        return None
    saved = getattr(node, "_saved_other" if carrying[0] == 0 else "_saved_self", None)
    if isinstance(saved, torch.Tensor):
        # A number of Python lies on the CPU as a tensor; what a model computed is nothing that is known beforehand.
        saved = _number(saved)
    if not isinstance(saved, int | float) or not saved or not math.isfinite(saved):
        return None
    return behind[carrying[0]], float(saved)


def _number(tensor: torch.Tensor) -> Any:
    """Number in a real tensor on the CPU; None for others."""
    from vram_guard.simulate.device.symbolic import is_symbolic

    with _disable_current_modes():  # in a trace, nothing is to be written down for this
        real = tensor.dim() == 0 and not is_symbolic(tensor) and tensor.device.type == "cpu"
        return tensor.item() if real else None


def _leaf(node: Any, factor: float) -> Term:
    kind = _kind(node)
    if kind in ("Mean", "Sum"):
        return Term(kind.lower(), factor, tuple(map(int, node._saved_self_sym_sizes)))  # noqa: SLF001 - autograd's own
    reduction = _REDUCTIONS.get(getattr(node, "_saved_reduction", 0))
    counted = _counted(node)
    if reduction is None or counted is None:
        return Term(node.name(), factor, ())
    labels = hasattr(node, "_saved_ignore_index")
    weighed = labels and node._saved_weight is not None  # noqa: SLF001 - the same
    ignored = node._saved_ignore_index if labels else IGNORED  # noqa: SLF001 - the same
    return Term(reduction, factor, tuple(counted.shape), labels, weighed, ignored=_signed(ignored))


def _signed(number: int) -> int:
    """Autograd hands out negative labels as unsigned numbers of 64 bits."""
    return number - 2**64 if number >= 2**63 else number


#: So many nodes behind a term tell whether it depends on the batch: the nearest ones hold what was computed last.
_NODES_BEHIND = 400


def _sizes_behind(node: Any) -> tuple[object, ...]:
    """Every operation behind a node, with the sizes of what it made."""
    waiting, seen, found = [node], {node}, list[object]()
    while waiting and len(seen) < _NODES_BEHIND:
        current = waiting.pop(0)
        found.append((current.name(), *_sizes(current)))
        for other, _input in current.next_functions:
            if other is not None and other not in seen:
                seen.add(other)
                waiting.append(other)
    return tuple(found)


def _sizes(node: Any) -> Iterator[tuple[object, ...]]:
    """Of what a node made, and of what a reduction reduced.

    What it saved is not looked at where that can be avoided: activation checkpointing would compute it again for it,
    once for each look, and keep it.
    """
    if node.name().endswith("AccumulateGrad"):
        yield tuple(node.variable.shape)
    for name in dir(node):
        if name.startswith("_saved_") and name.endswith("_sizes"):
            yield name, *getattr(node, name)
    made = getattr(node, "_input_metadata", None)
    if made is not None:
        yield from (tuple(one.shape) for one in made)
        return
    for name in dir(node):  # torch before 2.5
        saved = getattr(node, name) if name.startswith("_saved_") else None
        if isinstance(saved, torch.Tensor):
            yield name, *saved.shape


def _counted(node: Any) -> torch.Tensor | None:
    """Tensor whose elements a loss's own reduction counts: labels of a cross-entropy, else what meets its target."""
    for name in ("_saved_target", "_saved_self") if hasattr(node, "_saved_ignore_index") else ("_saved_self",):
        found = getattr(node, name, None)
        if isinstance(found, torch.Tensor):
            return found
    return None


def _kind(node: Any) -> str:
    """The operation that a node belongs to: Div for DivBackward0."""
    name: str = node.name()
    return name.rpartition("Backward")[0]
