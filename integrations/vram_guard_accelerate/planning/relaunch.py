"""A relaunch: the same script in mixed precision from its beginning.

What a script does with the precision that it asks for is the script's own business: it casts models before it trains.
Therefore nothing is assumed: the changed launch is run dry in a process of its own, which must turn out to be the same
training (:func:`disagreement`), and is then planned for as it is. The plan of the launch as written stands until the
relaunch is cheaper.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vram_guard.errors import UnsupportedStepError
from vram_guard.language import _, marked
from vram_guard.plan.descriptions import Reason, RelativeTime, Why
from vram_guard.plan.step_time import seconds_as_written
from vram_guard.plan.techniques import mixed_precision
from vram_guard.timeline import Estimate
from vram_guard_accelerate._precision import ACCELERATES
from vram_guard_accelerate.dry_run.loop_profile import LoopProfile
from vram_guard_accelerate.launch_plan import LaunchPlan, option_words

if TYPE_CHECKING:
    from vram_guard.plan import Plan
    from vram_guard_accelerate._settings import LaunchSettings
    from vram_guard_accelerate.dry_run.first_batch import FirstBatch


@dataclass(frozen=True)
class Baseline:
    """The launch that a relaunch is compared with: as it was typed."""

    precision: str
    accumulate: int
    batch_size: int
    effective_batch_size: int
    estimate: Estimate
    reason: Reason
    """The first of its plan."""
    seconds: float
    """The modelled time of an optimizer step of it."""
    profile: LoopProfile

    @classmethod
    def of(cls, plan: Plan, profile: LoopProfile) -> Baseline:
        """The baseline that a launch as it was typed makes."""
        return cls(
            plan.precision_before,
            plan.accumulate_before,
            plan.batch_size_before,
            plan.effective_batch_size_before,
            plan.before,
            plan.reason_values[0],
            seconds_as_written(plan),
            profile,
        )


@dataclass(frozen=True)
class Relaunch:
    """A launch in another precision, and what it is compared with.

    Attributes:
        precision: "fp16" or "bf16" from the script's beginning on.
        precision_option: the script's own option for it; "": Accelerate's environment variable alone.
        baseline: the launch as it was typed.
    """

    precision: str
    precision_option: str
    baseline: Baseline

    @property
    def arguments(self) -> list[str]:
        """Words for the script's command line; the last of two equal options counts."""
        return option_words((self.precision_option, self.precision))

    @property
    def environment(self) -> dict[str, str]:
        """Variables of the script's environment."""
        return {"ACCELERATE_MIXED_PRECISION": self.precision}

    @property
    def words(self) -> str:
        """The change as it would be typed."""
        return " ".join(self.arguments or ["--mixed_precision", self.precision])

    def applied_to(self, plan: LaunchPlan) -> LaunchPlan:
        """The launch plan of a relaunch, for a launch of the script as it was typed."""
        return replace(plan, precision=self.precision, precision_option=self.precision_option)

    def check(self, precision: str, profile: LoopProfile) -> None:
        """Raises UnsupportedStepError where it is not what was meant by it, or another training.

        Args:
            precision: in which it was seen to train.
            profile: of its loop.
        """
        found, wanted = ACCELERATES[precision], self.precision
        if found != wanted:
            raise UnsupportedStepError(
                _("with these options it trains in {precision}, not in {wanted}", precision=found, wanted=wanted)
            )
        why = disagreement(self.baseline.profile, profile)
        if why:
            raise UnsupportedStepError(_("with these options, {difference}", difference=why))

    def combined(self, plan: Plan) -> Plan:
        """A plan for the relaunch, as a plan for the launch as it was typed."""
        written = self.baseline
        slowdown = round((plan.slowdown or 1.0) * seconds_as_written(plan) / written.seconds, 4)
        cost = (Why.CHEAPEST, Why.CHANGES_LEAST)
        own = [reason for reason in plan.reason_values if reason.kind not in cost] if plan.changed else []
        return replace(
            plan,
            precision_before=written.precision,
            accumulate_before=written.accumulate,
            batch_size_before=written.batch_size,
            effective_batch_size_before=written.effective_batch_size,
            before=written.estimate,
            timeline_before=None,
            slowdown=slowdown,
            reason_values=(
                written.reason,
                Reason(Why.LAUNCHED_WITH, options=self.words),
                *(_launched_so(reason) for reason in own),
                Reason(Why.CHEAPEST, time=RelativeTime(slowdown)),
            ),
        )

    @property
    def note(self) -> str:
        """A note for a reader of its plan."""
        return _(
            "{options}: seen in a dry run of its own, with the same batches, and the same learning rates at the first "
            "two optimizer steps",
            options=self.words,
        )


def _launched_so(reason: Reason) -> Reason:
    """The same reason where "as written" means: launched with these options."""
    kinds = {Why.FITS: Why.FITS_LAUNCHED, Why.SHORTAGE: Why.SHORTAGE_LAUNCHED}
    return Reason(kinds[reason.kind], **dict(reason.values)) if reason.kind in kinds else reason


def relaunched_in(first: FirstBatch, settings: LaunchSettings) -> str:
    """The mixed precision in which a script may be launched anew, in Accelerate's words; "" where it need not be.

    That is where the script acts on its precision before it trains, and none is fixed that nobody can change.
    """
    script = first.script
    acts = script.reads_precision or script.by_trainer or script.precision_option
    fixed = script.precision_given and not script.precision_option and not script.by_trainer
    if not acts or fixed or first.sharded or "precision" not in settings.techniques:
        return ""
    name, _why = mixed_precision(first.precision, first.shape.capability)
    return ACCELERATES[name] if name is not None else ""


_MORE_OFTEN = {
    "clip": marked("it clips gradients {factor} times as often in an optimizer step"),
    "zero": marked("it sets gradients to zero {factor} times as often in an optimizer step"),
}


def disagreement(written: LoopProfile, changed: LoopProfile) -> str:
    """The difference between a changed launch and the launch as written; "" where it is the same training."""
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
    return ""
