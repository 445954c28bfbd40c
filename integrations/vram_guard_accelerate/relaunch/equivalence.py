"""Equivalence of two launches of a script as trainings, by the profiles of their loops in two dry runs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from vram_guard.apply.loss_terms import Term
from vram_guard.language import _, marked
from vram_guard_accelerate.dry_run.loop_profile import UNKNOWN_RATES, LoopProfile

#: Learning rates that differ by less are equal: schedules multiply and divide in floating point.
RATE_TOLERANCE = 1e-6


def why_not_accumulated(profile: LoopProfile, ranks: int) -> str:
    """The reason why smaller batches of a script could not be the same training ("" where they can).

    Args:
        profile: of the script as written.
        ranks: processes of the launch.
    """
    return why_not_counted(profile, ranks) or why_not_weighed(profile)


def why_not_counted(profile: LoopProfile, ranks: int) -> str:
    """The reason why a script's loop could not take as many samples in every step with smaller batches."""
    if not profile.complete:
        return _("it takes no second optimizer step")
    if profile.rates_unknown:
        return _(UNKNOWN_RATES[profile.rates_unknown])
    if profile.samples is None or profile.batches is None:
        return _("the end of its data is not known, and a short batch at the end would count for more than its share")
    full = profile.batch_size * ranks
    if profile.samples % full and not profile.drops_last:
        return _(
            "the last batch of an epoch is short ({samples} samples in batches of {size}), and its samples would count "
            "for less than they do",
            samples=profile.samples,
            size=full,
        )
    return ""


def why_not_weighed(profile: LoopProfile) -> str:
    """The reason why the parts of its losses could weigh otherwise in smaller batches."""
    return "; ".join(dict.fromkeys(_unequal(profile)))


def _unequal(profile: LoopProfile) -> Iterator[str]:
    """Losses whose parts would not have the same weight in smaller batches."""
    for terms in profile.losses:
        for term in terms:
            if profile.counts_items or term.by_items:
                continue
            if not term.known:
                yield _(
                    "its loss comes out of {operator}, which may be a mean or a sum or neither", operator=term.reduction
                )
            elif term.computed:  # the labels of this batch that count, perhaps: those of later ones may be fewer
                yield _("its loss is multiplied with or divided by a number that was computed")
            elif term.weighed or (term.labels and term.elements != profile.batch_size):
                yield _("its loss is a mean over labels of which some may not count, more in one part than in another")


def disagreement(written: LoopProfile, changed: LoopProfile, splits: int, ranks: int, *, losses: bool = True) -> str:
    """The difference between a changed launch and the launch as written; "" where it is the same training.

    Args:
        written: what the script does as written.
        changed: what it does when it is launched with other options.
        splits: by how much its batches are smaller there, and its optimizer steps more batches long.
        ranks: processes of the launch.
        losses: whether losses are compared too (another precision makes them of other operators).
    """
    if changed.batch_size * splits != written.batch_size:
        return _(
            "its batches hold {count} samples, not {meant}",
            count=changed.batch_size,
            meant=written.batch_size // splits,
        )
    if changed.batches_per_step != written.batches_per_step * splits:
        return _(
            "it takes an optimizer step every {count} batches, not every {meant}",
            count=changed.batches_per_step,
            meant=written.batches_per_step * splits,
        )
    epoch, other = _of_a_rank(written.batches, ranks), _of_a_rank(changed.batches, ranks)
    if epoch is not None and other != epoch * splits:
        return _("an epoch has {count} batches, not {meant}", count=other, meant=epoch * splits)
    if changed.rates_unknown and changed.rates_unknown != written.rates_unknown:
        return _(UNKNOWN_RATES[changed.rates_unknown])
    step = _first_difference(written.rates, changed.rates)
    if step is not None:
        return _("learning rates differ, from optimizer step {number} on", number=step + 1)
    for (kind, count), (_kind_too, other) in zip(written.counts, changed.counts, strict=True):
        if count != other:
            return _(_MORE_OFTEN[kind], factor=f"{other / max(1, count):g}")
    if not _same_bars(written, changed, splits):
        return _("its own count of steps differs (the lengths of its progress bars)")
    return _other_losses(written, changed, splits) if losses else ""


def _of_a_rank(batches: int | None, ranks: int) -> int | None:
    """The batches of an epoch that each process gets: all of them full, or those that are left out do not count."""
    return None if batches is None else batches // ranks


_MORE_OFTEN = {
    "clip": marked("it clips gradients {factor} times as often in an optimizer step"),
    "zero": marked("it sets gradients to zero {factor} times as often in an optimizer step"),
}


def _first_difference(one: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> int | None:
    for at, (rates, others) in enumerate(zip(one, other, strict=False)):
        same = len(rates) == len(others) and all(
            math.isclose(a, b, rel_tol=RATE_TOLERANCE, abs_tol=1e-12) for a, b in zip(rates, others, strict=True)
        )
        if not same:
            return at
    return None if len(one) == len(other) else min(len(one), len(other))


def _same_bars(written: LoopProfile, changed: LoopProfile, splits: int) -> bool:
    """Bars over steps have equal lengths; one over the loader is as much longer as that is."""
    if len(written.bars) != len(changed.bars):
        return False
    return all(
        other == bar or (bar == written.batches and other == splits * bar)
        for bar, other in zip(written.bars, changed.bars, strict=True)
    )


def _other_losses(written: LoopProfile, changed: LoopProfile, splits: int) -> str:
    """Each sample must count in the loss of a small batch what it counts in that of a whole one.

    How a script divides (``accumulate()``, by hand, by the number of items) does not matter: the losses that
    ``backward`` is called for are read, with all that they were divided by.
    """
    as_written = Counter({parts: count * splits for parts, count in _counted(written.losses, 1).items()})
    if as_written == _counted(changed.losses, splits):
        return ""
    pairs = zip(written.losses, changed.losses, strict=False)
    if len(changed.losses) == splits * len(written.losses) and all(
        _kind(one, written) == _kind(other, changed) for one, other in pairs
    ):
        factor = _times(written.losses[0], changed.losses[0])
        return _(
            "it divides its loss by a different number: gradients would be {factor} times as large",
            factor=f"{factor:g}",
        )
    return _("its loss has different parts")


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
                term.by_items,
            )
            for term in terms
        )
        for terms in losses
    )


def _kind(terms: Sequence[Term], profile: LoopProfile) -> tuple[object, ...]:
    return tuple((term.reduction, term.elements / profile.batch_size, term.shape[1:]) for term in terms)


def _times(one: Sequence[Term], other: Sequence[Term]) -> float:
    return abs(other[0].of_each_element / one[0].of_each_element) if one and other else 1.0
