"""Whether a launch with other options is the same training: two dry runs of a script, held against each other."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from vram_guard.apply.loss_terms import reduction_of

if TYPE_CHECKING:
    from vram_guard.apply.loss_terms import Term
    from vram_guard_accelerate.dry_run.loop_profile import Conduct

#: Learning rates that differ by less are equal: schedules multiply and divide in floating point.
RATE_TOLERANCE = 1e-6


def why_not_accumulated(conduct: Conduct, ranks: int) -> str:
    """Why a script cannot deliver its batches in smaller parts and still be the same training ("" where it can).

    Args:
        conduct: of the script as written.
        ranks: processes of the launch.
    """
    if not conduct.complete:
        return "it takes no second optimizer step"
    if conduct.rates_unknown:
        return conduct.rates_unknown
    if conduct.samples is None or conduct.batches is None:
        return "the end of its data is not known, and a short batch at the end would count for more than its share"
    full = conduct.batch_size * ranks
    if conduct.samples % full and not conduct.drops_last:
        return (
            f"the last batch of an epoch is short ({conduct.samples} samples in batches of {full}), and its samples "
            "would count for less than they do"
        )
    return "; ".join(dict.fromkeys(_unequal(conduct)))


def _unequal(conduct: Conduct) -> Iterator[str]:
    """Losses whose parts would not weigh the same in smaller batches."""
    for terms in conduct.losses:
        for term in terms:
            if not term.known and not conduct.counts_items:
                yield f"its loss comes out of {term.reduction}, which may be a mean or a sum or neither"
            elif not conduct.counts_items and (term.weighed or (term.labels and term.elements != conduct.batch_size)):
                yield "its loss is a mean over labels of which some may not count, more in one part than in another"


def disagreement(written: Conduct, varied: Conduct, splits: int, ranks: int, *, losses: bool = True) -> str:
    """What a changed launch does otherwise than the launch as written; "" where it is the same training.

    Args:
        written: what the script does as written.
        varied: what it does when it is launched with other options.
        splits: by how much its batches are smaller there, and its optimizer steps more batches long.
        ranks: processes of the launch.
        losses: whether losses are compared too (another precision makes them of other operators).
    """
    if varied.batch_size * splits != written.batch_size:
        return f"its batches hold {varied.batch_size} samples, not {written.batch_size // splits}"
    if varied.batches_per_step != written.batches_per_step * splits:
        return (
            f"it takes an optimizer step every {varied.batches_per_step} batches, not every "
            f"{written.batches_per_step * splits}"
        )
    epoch, other = _of_a_rank(written.batches, ranks), _of_a_rank(varied.batches, ranks)
    if epoch is not None and other != epoch * splits:
        return f"an epoch has {other} batches, not {epoch * splits}"
    if varied.rates_unknown != written.rates_unknown:
        return varied.rates_unknown
    step = _first_difference(written.rates, varied.rates)
    if step is not None:
        return f"learning rates differ, from optimizer step {step + 1} on"
    for (kind, count), (_, other) in zip(written.counts, varied.counts, strict=True):
        if count != other:
            return f"it {_DOES[kind]} {other / max(1, count):g} times as often in an optimizer step"
    if not _same_bars(written, varied, splits):
        return "its own count of steps is another one (the lengths of its progress bars)"
    return _other_losses(written, varied, splits) if losses else ""


def _of_a_rank(batches: int | None, ranks: int) -> int | None:
    """The batches of an epoch that each process gets: all of them full, or those that are left out do not count."""
    return None if batches is None else batches // ranks


_DOES = {"clip": "clips gradients", "zero": "sets gradients to zero"}


def _first_difference(one: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> int | None:
    for at, (rates, others) in enumerate(zip(one, other, strict=False)):
        same = len(rates) == len(others) and all(
            math.isclose(a, b, rel_tol=RATE_TOLERANCE, abs_tol=1e-12) for a, b in zip(rates, others, strict=True)
        )
        if not same:
            return at
    return None if len(one) == len(other) else min(len(one), len(other))


def _same_bars(written: Conduct, varied: Conduct, splits: int) -> bool:
    """Bars over steps have equal lengths; one over the loader is as much longer as that is."""
    if len(written.bars) != len(varied.bars):
        return False
    return all(
        other == bar or (bar == written.batches and other == splits * bar)
        for bar, other in zip(written.bars, varied.bars, strict=True)
    )


def _other_losses(written: Conduct, varied: Conduct, splits: int) -> str:
    """Each sample must count in the loss of a small batch what it counts in that of a whole one.

    How a script divides (``accumulate()``, by hand, by the number of items) does not matter: the losses that
    ``backward`` is called for are read, with all that they were divided by.
    """
    as_written = Counter({parts: count * splits for parts, count in _counted(written.losses, 1).items()})
    if as_written == _counted(varied.losses, splits):
        return ""
    pairs = zip(written.losses, varied.losses, strict=False)
    if len(varied.losses) == splits * len(written.losses) and all(
        _kind(one, written) == _kind(other, varied) for one, other in pairs
    ):
        factor = _times(written.losses[0], varied.losses[0])
        return f"it divides its loss by another number: gradients would be {factor:g} times as large"
    return "its loss is made of other parts"


def _counted(losses: Sequence[Sequence[Term]], splits: int) -> Counter[tuple[object, ...]]:
    """Losses by what they are made of, and what each element counts in them."""
    return Counter(
        tuple(
            (
                term.elements * splits if term.known else term.reduction,
                term.shape[1:],
                f"{term.of_each_element:.6g}",
                term.labels,
                term.weighed,
            )
            for term in terms
        )
        for terms in losses
    )


def _kind(terms: Sequence[Term], conduct: Conduct) -> tuple[object, ...]:
    return tuple((term.reduction, term.elements / conduct.batch_size, term.shape[1:]) for term in terms)


def _times(one: Sequence[Term], other: Sequence[Term]) -> float:
    return abs(other[0].of_each_element / one[0].of_each_element) if one and other else 1.0


def loss_weight(
    one: Sequence[Sequence[Term]], samples: int, other: Sequence[Sequence[Term]], other_samples: int
) -> tuple[Literal["mean", "sum"], str]:
    """What the losses that models return are over the samples of a batch.

    Args:
        one: the terms of each loss, for a batch of ``samples``.
        samples: see ``one``.
        other: the same for a batch of another size.
        other_samples: see ``other``.

    Returns:
        Which, and why that cannot be told ("" where it can).
    """
    if len(one) != len(other):
        return "mean", "it returns other numbers for other sizes of batches"
    found: set[Literal["mean", "sum"]] = set()
    for terms, twins in zip(one, other, strict=True):
        kind, why = reduction_of(terms, samples, twins, other_samples)
        if kind is None:
            return "mean", why
        found.add(kind)
    if len(found) > 1:
        return "mean", "some of the numbers that it returns are means over the batch, others sums"
    return (found.pop() if found else "mean"), ""
