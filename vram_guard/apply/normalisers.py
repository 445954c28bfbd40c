"""Weights of micro-batches for a loss, found in its graph and checked by numbers.

Losses of a whole batch and of parts of it show what each of their terms is divided by: a number of samples, a constant,
the labels that are not ignored, what a mask leaves. Whatever is answered explains every term at every size, is linked
to the batch by the graph itself (a tensor that the graph keeps holds the same mask or labels), and makes the values and
the gradients of the parts add up to those of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch

from vram_guard.apply._normaliser import Normaliser
from vram_guard.apply._sample_paths import Comparison, kind_of
from vram_guard.apply.loss_terms import (
    MOST_NODES,
    Reduction,
    Term,
    ignored_by,
    is_view_of,
    loss_terms,
    number_in,
    parts_of,
    reductions,
)
from vram_guard.apply.loss_weight import IGNORED, LossWeight, loss_weights
from vram_guard.apply.microbatch import MicroBatch
from vram_guard.language import _
from vram_guard.state.containers import children
from vram_guard.tensors import without_modes

__all__ = ["Normaliser", "find_normaliser"]

#: Values of labels and masks that are commonly left out.
_LEFT_OUT = (IGNORED, -1, 0, 255, math.nan)

#: What stands for whole numbers and others that are not known, where a part of a batch is looked at.
_OF_PARTS = (5, 1.001953125)

#: So many nodes behind a term may hold the mask that it is taken over.
_NODES_LOOKED_AT = 400

#: What graphs keep of masks and labels.
_KEPT = (
    "_saved_mask",
    "_saved_condition",
    "_saved_weight",
    "_saved_other",
    "_saved_self",
)


def find_normaliser(
    loss_of: Callable[[Any], torch.Tensor], batch: Any, parts: Sequence[MicroBatch]
) -> tuple[LossWeight | None, str]:
    """The weight of micro-batches' losses that makes them add up to their batch's.

    A mask that leaves nothing out in this batch, or two parts of the batch that hold the same values, may be impossible
    to tell apart; then nothing is answered. Give a batch with ignored labels and masked positions.

    Args:
        loss_of: the loss of a batch, one number with its graph, on the CPU. It must be the same whenever it is called:
            no dropout, and normalisation with fixed statistics.
        batch: that is trained on.
        parts: the batch, cut into two or more.

    Returns:
        "mean", "sum" or a :class:`Normaliser`; None where no weight is right for every batch; and why there is none.

    Example:
        >>> x, y = torch.randn(4, 3, requires_grad=True), torch.tensor([0, 2, -100, 1])
        >>> batch = {"at": torch.arange(4), "labels": y}
        >>> parts = [MicroBatch({"at": batch["at"][cut], "labels": y[cut]}, 2, 4) for cut in (slice(2), slice(2, 4))]
        >>> loss_of = lambda part: torch.nn.functional.cross_entropy(x[part["at"]].exp(), part["labels"])
        >>> find_normaliser(loss_of, batch, parts)[0].words()
        "the number of values other than -100 in batch['labels']"
    """
    whole = MicroBatch(batch, parts[0].batch_samples, parts[0].batch_samples)
    looks = []
    for part in (whole, *parts):
        with torch.enable_grad():
            look = look_at(loss_of(part.data), part)
        if look is None:
            return None, _("a graph that is too long to read")
        looks.append(look)
    kind, why = explained(looks)
    if kind is None:
        return None, why
    wrong = _not_added_up(looks, kind)
    return (None, wrong) if wrong else (kind, "")


@dataclass(frozen=True)
class Look:
    """The loss of a batch or of a part of it."""

    part: MicroBatch
    loss: torch.Tensor
    reductions: list[Reduction]
    terms: tuple[Term, ...]
    given: Any
    """The batch as the loss got it, in a trace: symbolic."""

    def divisor(self, at: int) -> float:
        """By what the sum of a term's elements is divided; what it is multiplied with, inverted. NaN: not known."""
        one, term = self.reductions[at], self.terms[at]
        if term.labels and term.reduction == "mean":
            total = self.known(one.node._saved_total_weight)  # noqa: SLF001 - autograd's own
            return math.nan if total is None else float(total) / term.factor
        return 1 / term.of_each_element if term.of_each_element else math.inf

    def known(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The real value; None where it is not known in a trace."""
        from vram_guard.simulate.device.constants import compute

        return compute(tensor)

    def weights(self, node: Any) -> torch.Tensor | None:
        """Those of the classes of a cross-entropy; None: it has none, or they are not known."""
        kept = node._saved_weight  # noqa: SLF001 - autograd's own
        return None if kept is None else self.known(kept)

    def holds(self, tensor: torch.Tensor, candidate: Normaliser) -> bool:
        """Check whether a tensor is the part of the batch that is counted in, and no copy of it that was changed."""
        from vram_guard.simulate.device.constants import of_same_origin
        from vram_guard.simulate.device.symbolic import is_symbolic

        if not is_symbolic(tensor):
            return is_view_of(tensor, candidate.values(self.part.data))
        part = self.given
        for key in candidate.path:
            part = (children(part) or {}).get(key)
        return isinstance(part, torch.Tensor) and of_same_origin(tensor, part)


def look_at(loss: torch.Tensor, part: MicroBatch, given: Any = None) -> Look | None:
    """The loss of a batch or of a part of it, taken down while its graph is whole; None where that is too long."""
    found = reductions(loss)
    return None if found is None else Look(part, loss, found, loss_terms(loss, behind=True), given)


# --- by the graph ---------------------------------------------------------------------------------------------------


def explained(looks: Sequence[Look]) -> tuple[LossWeight | None, str]:
    """What every term's divisor is, at every size; None, and why, where that is not known.

    Args:
        looks: at a batch, and at its parts.
    """
    whole, *others = looks
    if any(len(one.terms) != len(whole.terms) for one in others):
        return None, _("it has different parts at different batch sizes")
    paths = [
        Comparison([t.behind for t in whole.terms], whole.part.samples, [t.behind for t in one.terms], one.part.samples)
        for one in others
        if one.part.samples != whole.part.samples
    ]
    why = next((path.why for path in paths if path.why), "") or _scaled(looks)
    kinds: set[LossWeight] = set()
    independent = 0
    for at, term in enumerate(whole.terms):
        if not any(path.depends(term.behind) for path in paths if term.behind) and term.behind:
            independent += 1
            continue
        picked = any(path.picked(term.behind) for path in paths)
        kind, reason = _of_term(looks, at, picked=picked)
        if kind is None:
            return None, why or reason
        kinds.add(kind)
    if why:
        return None, why
    if len(kinds) > 1:
        return None, _("it adds terms that are divided by different counts of the batch")
    kind = kinds.pop() if kinds else "mean"
    if kind == "sum" and independent:
        return None, _("it is a sum over the batch plus a term that does not depend on the batch")
    return kind, ""


def find_in_trace(
    loss_of: Callable[[Any], torch.Tensor], parts: Sequence[MicroBatch], real: Callable[[Any], Any]
) -> tuple[LossWeight | None, str]:
    """The same as :func:`find_normaliser` in a trace: by the graph alone, with the values that are known in it.

    Args:
        loss_of: the loss of a symbolic batch, one number with its graph.
        parts: the batch as a whole, and cut into two or more.
        real: a symbolic batch -> the same with real tensors, and None for those whose values are not known.
    """
    looks = []
    for part in parts:
        with torch.enable_grad(), placeholders_of(part):
            loss = loss_of(part.data)
        with without_modes():
            known = MicroBatch(real(part.data), part.samples, part.batch_samples)
        looks.append(look_at(loss, known, part.data))
    found = [look for look in looks if look is not None]
    if len(found) < len(looks):
        return None, _("a graph that is too long to read")
    with without_modes():
        return explained(found)


def placeholders_of(part: MicroBatch) -> AbstractContextManager[object]:
    """Inside the block numbers that a trace does not know are others than those of the whole batch."""
    from vram_guard.simulate.device.constants import other_placeholders

    return nullcontext() if part.samples == part.batch_samples else other_placeholders(*_OF_PARTS)


def _scaled(looks: Sequence[Look]) -> str:
    """Why samples are joined by a number that was computed of all of them; "" where none is seen.

    A constant is a number of Python, or the same tensor whenever the loss is computed.
    """
    used = []
    for look in looks:
        roots = [term.node for term in look.reductions]
        used.append({place for node in _nodes_behind(roots) for place in _numbers_of(node)})
    if any(one != used[0] for one in used[1:]):
        return _("it is multiplied with or divided by a number that was computed")
    return ""


def _numbers_of(node: Any) -> tuple[int, ...]:
    """Where the tensor is that holds the one number by which a node multiplies or divides; () for other nodes."""
    if kind_of(node) not in ("Mul", "Div"):
        return ()
    kept = (getattr(node, name, None) for name in ("_saved_other", "_saved_self"))
    tensors = [one for one in kept if isinstance(one, torch.Tensor) and not one.requires_grad and one.dim() == 0]
    return tuple(place for one in tensors for place in number_in(one)[1])


def _of_term(looks: Sequence[Look], at: int, *, picked: bool) -> tuple[LossWeight | None, str]:
    terms = [look.terms[at] for look in looks]
    unknown = next((term for term in terms if not term.known), None)
    if unknown is not None:
        return None, _("it comes out of {operation}", operation=unknown.reduction)
    if terms[0].labels and terms[0].reduction == "mean":
        return _only(_labels(looks, at), looks, at)
    # A tensor that is the same one for every batch is a constant like any other.
    computed = any(look.reductions[at].computed != looks[0].reductions[at].computed for look in looks)
    if not computed and not (picked and terms[0].reduction == "mean"):
        kind, why, told = _plain(looks, at, picked=picked)
        if told or terms[0].reduction == "mean":
            return kind, why
    smoothed = _smoothed(looks[0], at)
    return _only(_masks(looks, at) if smoothed is None else _labels(looks, smoothed), looks, at)


def _only(candidates: list[Normaliser], looks: Sequence[Look], at: int) -> tuple[Normaliser | None, str]:
    fitting = _best([one for one in candidates if _fits(looks, at, one)])
    if len(fitting) == 1:
        return fitting[0], ""
    if fitting:
        several = ", ".join(one.words() for one in fitting[:3])
        return None, _("it is divided by a count that may be any of these: {several}", several=several)
    return None, _("it is divided by a number that nothing in the batch explains")


def _plain(looks: Sequence[Look], at: int, *, picked: bool) -> tuple[Literal["mean", "sum"] | None, str, bool]:
    """The reduction of a term that is multiplied with constants only; and whether it cannot be another."""
    whole, *others = looks
    samples, divisor, elements = whole.part.samples, whole.divisor(at), whole.terms[at].elements
    if not picked and any(one.terms[at].elements * samples != elements * one.part.samples for one in others):
        return None, _("a {reduction} in it is not taken over the samples", reduction=whole.terms[at].reduction), True
    if all(math.isclose(one.divisor(at), divisor, rel_tol=1e-6) for one in others):
        return "sum", "", True
    if not all(math.isclose(one.divisor(at) * samples, divisor * one.part.samples, rel_tol=1e-6) for one in others):
        return None, _("a sample counts in it neither as in a mean nor as in a sum"), False
    # A number of Python may have been counted in a mask that leaves nothing out in this batch.
    sums = whole.terms[at].reduction == "sum"
    if sums and any(_fits(looks, at, one) for one in _masks(looks, at, telling=False)):
        unclear = _("it is divided by a count that may be that of its samples, or of a mask that covers them all")
        return None, unclear, True
    return "mean", "", True


def _fits(looks: Sequence[Look], at: int, candidate: Normaliser) -> bool:
    """Check whether a term's divisor is the candidate's count times one constant, at every size."""
    ratios = []
    for look in looks:
        count = float(candidate(look.part.data))
        if math.isnan(look.divisor(at)):
            return False
        if count:  # a slice in which nothing counts has no weight, whatever it is divided by
            ratios.append(look.divisor(at) / count)
    return len(ratios) > 1 and all(math.isclose(one, ratios[0], rel_tol=1e-4) for one in ratios)


def _best(candidates: list[Normaliser]) -> list[Normaliser]:
    """One of those that count the same: the sum of zeros and ones, what is above zero and what is not zero."""
    masks: dict[tuple[Any, ...], Normaliser] = {}
    for one in candidates:
        if one.weights is None and (one.counts != "others" or one.ignored == 0):
            masks.setdefault((one.path, one.shifted), one)
    return [
        one for one in candidates if one.weights is not None or (one.counts == "others" and one.ignored != 0)
    ] + list(masks.values())


# --- parts of the batch that a graph keeps --------------------------------------------------------------------------


def _labels(looks: Sequence[Look], at: int) -> list[Normaliser]:
    """Labels of the batch that a cross-entropy has counted."""
    node = looks[0].reductions[at].node
    weights = looks[0].weights(node)
    if weights is None and node._saved_weight is not None:  # noqa: SLF001 - autograd's own
        return []
    table = None if weights is None else tuple(weights.detach().double().tolist())
    made = [
        Normaliser(path, ignored=ignored_by(node), shifted=shifted, weights=table)
        for path, part in _tensors(looks[0].part.data)
        for shifted in (False, True)[: part.dim()]
        if not part.is_floating_point()
    ]
    targets = [look.reductions[at].node._saved_target for look in looks]  # noqa: SLF001 - the same
    held = [
        one
        for one in made
        if all(_is_target(one, look.known(target), look.part.data) for target, look in zip(targets, looks, strict=True))
    ]
    # Inputs of a language model are its labels too, where no position is padded: memory tells, then names.
    own = [one for one in held if looks[0].holds(targets[0], one)]
    named = [one for one in held if any(word in str(one.path[-1:]).lower() for word in ("label", "target"))]
    return own or named or held


def _is_target(candidate: Normaliser, target: torch.Tensor | None, batch: Any) -> bool:
    if target is None:
        return False
    values = candidate.values(batch)
    if candidate.shifted and values.numel() < target.numel():  # Transformers fills them up
        values = torch.nn.functional.pad(values, (0, 1), value=int(candidate.ignored))
    return _equal(values, target)


def _smoothed(look: Look, at: int) -> int | None:
    """The term of the cross-entropy with smoothed labels of which another is the rest; None for others."""
    rest = _scores(look.reductions[at].node, ("Sum", "MaskedFill", "Neg", "Mul"))
    for other, term in enumerate(look.terms):
        node = look.reductions[other].node
        if other != at and term.labels and rest is not None and rest is _scores(node.next_functions[0][0], ()):
            return other
    return None


def _scores(node: Any, through: tuple[str, ...]) -> Any:
    """The logarithms of probabilities that a node is made of by these operations and views; None for another node."""
    filled = not through
    while node is not None and kind_of(node) in (*through, "View", "ReshapeAlias", "UnsafeView", "Unsqueeze"):
        filled = filled or kind_of(node) == "MaskedFill"
        node = node.next_functions[0][0]
    return node if node is not None and filled and kind_of(node) == "LogSoftmax" else None


def _masks(looks: Sequence[Look], at: int, *, telling: bool = True) -> list[Normaliser]:
    """Counts of the batch's parts whose mask the graph of each look keeps.

    Args:
        looks: at the batch and at its parts.
        at: of the term; graphs are looked through from there on.
        telling: only those that leave something out of the batch: all others look alike.
    """
    linked: list[list[Normaliser]] = []
    for look in looks:
        saved = list(_kept_by(look, look.reductions[at : at + 1] + look.reductions))
        kept = [real for _tensor, real in saved]
        linked.append([one for one in _counts(look.part.data) if _is_kept(one, look.part.data, kept)])
        if telling and look is looks[0]:
            own = [one for one in linked[0] if one.counts == "sum" and any(look.holds(held, one) for held, _ in saved)]
            # The elements of a mean that a mask has picked are as many as that counts, also if it picks all of them.
            if look.terms[at].reduction == "sum" or not own:
                linked[0] = [one for one in linked[0] if _leaves_out(one, look.part.data)]
            linked[0] = [one for one in own if one in linked[0]] or linked[0]
    return [one for one in linked[0] if all(one in others for others in linked[1:])]


def _leaves_out(candidate: Normaliser, batch: Any) -> bool:
    counted = candidate.counted(candidate.values(batch))
    return bool((counted != counted.flatten()[0]).any())


def _counts(batch: Any) -> Iterator[Normaliser]:
    for path, part in _tensors(batch):
        for shifted in (False, True) if part.dim() > 1 else (False,):
            yield Normaliser(path, "sum", shifted=shifted)
            if part.dtype != torch.bool:
                yield Normaliser(path, "positive", shifted=shifted)
                for ignored in _LEFT_OUT:
                    if part.is_floating_point() or not math.isnan(ignored):
                        yield Normaliser(path, "others", ignored, shifted)


def _is_kept(candidate: Normaliser, batch: Any, kept: list[torch.Tensor]) -> bool:
    values = candidate.values(batch)
    counted = candidate.counted(values)
    outside = counted == 0 if candidate.counts != "sum" or values.dtype == torch.bool else None
    return any(_equal(counted, one) or (outside is not None and _equal(outside, one)) for one in kept)


def _kept_by(look: Look, roots: Iterable[Reduction]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """What the graph keeps that was computed without a graph, with its real values, where these are known."""
    for tensor in _saved_by(roots):
        real = look.known(tensor)
        if real is not None:
            yield tensor, real
    for node in _nodes_behind([one.node for one in roots if one.node is not None]):
        if kind_of(node).startswith("NllLoss"):
            target = look.known(node._saved_target)  # noqa: SLF001 - autograd's own
            if target is not None:
                yield node._saved_target, target != ignored_by(node)  # noqa: SLF001 - the same


def _saved_by(roots: Iterable[Reduction]) -> Iterator[torch.Tensor]:
    for node in _nodes_behind([one.node for one in roots if one.node is not None]):
        for name in _KEPT:
            kept = getattr(node, name, None)
            if isinstance(kept, torch.Tensor) and kept.dim() and not kept.requires_grad:
                yield kept
        if kind_of(node) == "Index":
            masks = (index for index in node._saved_indices if index is not None)  # noqa: SLF001 - autograd's own
            yield from (mask for mask in masks if mask.dtype in (torch.bool, torch.uint8))


def _nodes_behind(nodes: list[Any]) -> Iterator[Any]:
    """The nearest ones, themselves first."""
    waiting, seen = list(nodes), set[Any]()
    while waiting and len(seen) < _NODES_LOOKED_AT:
        node = waiting.pop(0)
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [other for other, _output in node.next_functions]
        yield node


def _tensors(batch: Any) -> list[tuple[tuple[Any, ...], torch.Tensor]]:
    return [(path, part) for path, part in parts_of(batch) if isinstance(part, torch.Tensor) and part.dim()]


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.numel() == other.numel() and bool((one.flatten().double() == other.flatten().double()).all())


# --- by numbers -----------------------------------------------------------------------------------------------------


def _not_added_up(looks: Sequence[Look], kind: LossWeight) -> str:
    """What does not add up; "" where values and gradients do."""
    whole, *others = looks
    if not whole.loss.isfinite():
        return _("the loss is {value}", value=float(whole.loss))
    exact = (lambda batch: float(kind(batch))) if callable(kind) else kind
    weights = loss_weights([one.part for one in others], exact)
    counted = [(one, weight) for one, weight in zip(others, weights, strict=True) if weight]
    tolerance = 4 * torch.finfo(whole.loss.dtype).eps ** 0.5
    value = sum(float(one.loss.detach()) * weight for one, weight in counted)
    if not math.isclose(value, float(whole.loss.detach()), rel_tol=tolerance, abs_tol=tolerance):
        return _(
            "the losses of its parts add up to {found}, not to {expected}",
            found=f"{value:.6g}",
            expected=f"{float(whole.loss.detach()):.6g}",
        )
    sources = _leaves_of(whole.loss)
    gradients = [_gradients(one.loss, sources, weight) for one, weight in ((whole, 1.0), *counted)]
    largest = max((float(one.norm()) for one in gradients[0] if one is not None), default=0.0)
    for at, expected in enumerate(gradients[0]):
        found = [of[at] for of in gradients[1:] if of[at] is not None]
        if expected is None and not found:
            continue
        difference = float((sum(cast("list[Any]", found)) - (0 if expected is None else expected)).norm())
        size = 0.0 if expected is None else float(expected.norm())
        if not difference <= tolerance * size + 1e-3 * tolerance * largest:
            return _("the gradients of its parts do not add up to those of the batch")
    return ""


def _leaves_of(loss: torch.Tensor) -> list[torch.Tensor]:
    """What a loss can be differentiated by: parameters, and parts of the batch that ask for it."""
    waiting, seen, found = [loss.grad_fn], set[Any](), list[torch.Tensor]()
    while waiting and len(seen) < MOST_NODES:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [other for other, _output in node.next_functions]
        if node.name().endswith("AccumulateGrad"):
            found.append(node.variable)
    return found


def _gradients(loss: torch.Tensor, sources: list[torch.Tensor], weight: float) -> list[torch.Tensor | None]:
    found = torch.autograd.grad(loss * weight, sources, allow_unused=True)
    return list(found)
