"""Equivalence of two launches of a script as trainings, by the profiles of their loops in two dry runs."""

from __future__ import annotations

from vram_guard.language import _, marked
from vram_guard_accelerate.dry_run.loop_profile import LoopProfile

_MORE_OFTEN = {
    "clip": marked("it clips gradients {factor} times as often in an optimizer step"),
    "zero": marked("it sets gradients to zero {factor} times as often in an optimizer step"),
}


def disagreement(written: LoopProfile, changed: LoopProfile, *, losses: bool = True) -> str:
    """The difference between a changed launch and the launch as written; "" where it is the same training.

    Args:
        written: what the script does as written.
        changed: what it does when it is launched otherwise.
        losses: whether losses are compared too (another precision makes them of other operators).
    """
    if changed.batch_size != written.batch_size:
        return _("its batches hold {count} samples, not {meant}", count=changed.batch_size, meant=written.batch_size)
    if changed.batches_per_step != written.batches_per_step:
        return _(
            "it takes an optimizer step every {count} batches, not every {meant}",
            count=changed.batches_per_step,
            meant=written.batches_per_step,
        )
    if changed.batches != written.batches:
        return _("an epoch has {count} batches, not {meant}", count=changed.batches, meant=written.batches)
    if changed.rates != written.rates:
        return _("learning rates differ")
    for (kind, count), (_kind_too, other) in zip(written.counts, changed.counts, strict=True):
        if count != other:
            return _(_MORE_OFTEN[kind], factor=f"{other / max(1, count):g}")
    return _("its losses are made by other operators") if losses and changed.losses != written.losses else ""
