"""A relaunch: the same script with other options of its own, or in another precision or sharding from its beginning.

What a script does with its options, or with the precision that it asks for, is the script's own business: it makes
loaders, schedules and casts of it before it trains; so is what it does with a sharded model. Therefore nothing is
assumed: the changed command line is run dry in a process of its own, which must turn out to be the same training
(:mod:`.equivalence`), and which is then planned for as it is. The plan of the launch as written stands until a relaunch
is cheaper.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from vram_guard.errors import UnsupportedStepError
from vram_guard.language import _
from vram_guard.plan.descriptions import Reason, StepTime, Why
from vram_guard.plan.techniques import uses_batch_norm
from vram_guard.timeline import Estimate
from vram_guard_accelerate._launch_plan import LaunchPlan, option_words
from vram_guard_accelerate._precision import ACCELERATES
from vram_guard_accelerate._sharding_change import AS_LAUNCHED, ShardingChange
from vram_guard_accelerate.dry_run.loop_profile import LoopProfile
from vram_guard_accelerate.relaunch.equivalence import disagreement
from vram_guard_accelerate.relaunch.step_time import launch_seconds

if TYPE_CHECKING:
    from vram_guard.plan import Plan
    from vram_guard_accelerate.dry_run.first_batch import FirstBatch


@dataclass(frozen=True)
class LaunchChange:
    """The difference of a relaunch to the launch as it was typed.

    Attributes:
        precision: "fp16" or "bf16" from the script's beginning on; "" leaves it.
        precision_option: the script's own option for it; "": Accelerate's environment variable alone.
        sharding: what is changed of how Accelerate divides the model.
        splits: by how much the script's batches are smaller, and its optimizer steps more batches long.
        batch_size: the script's own, under this change; 0 leaves it.
        batch_option: the option that is set for it.
        accumulation: batches of an optimizer step, under this change.
        accumulation_option: the option that is set for it.
    """

    precision: str = ""
    precision_option: str = ""
    sharding: ShardingChange = AS_LAUNCHED
    splits: int = 1
    batch_size: int = 0
    batch_option: str = ""
    accumulation: int = 0
    accumulation_option: str = ""

    @property
    def kind(self) -> Literal["options", "precision", "shard", "offload", "reshard"]:
        """The kind of change that was made last: of those that it has, the one that comes after all others."""
        return "options" if self.splits > 1 else self.sharding.kind or "precision"

    @property
    def arguments(self) -> list[str]:
        """Words for the script's command line; the last of two equal options counts."""
        return option_words(
            (self.precision_option, self.precision),
            (self.batch_option, self.batch_size),
            (self.accumulation_option, self.accumulation),
        )

    @property
    def environment(self) -> dict[str, str]:
        """Variables of the script's environment."""
        precision = {"ACCELERATE_MIXED_PRECISION": self.precision} if self.precision else {}
        return {**precision, **self.sharding.variables}

    @property
    def words(self) -> str:
        """The change as it would be typed."""
        typed = [] if self.precision_option or not self.precision else ["--mixed_precision", self.precision]
        return " ".join([*typed, *self.sharding.options, *self.arguments])

    def applied_to(self, plan: LaunchPlan) -> LaunchPlan:
        """The launch plan of a relaunch, for a launch of the script as it was typed."""
        own: dict[str, Any] = {"sharding": self.sharding}
        if self.precision:
            own.update(precision=self.precision, precision_option=self.precision_option)
        if self.splits > 1:
            own.update(batch_option=self.batch_option, accumulation_option=self.accumulation_option)
            own.update(accumulation=self.accumulation)
        return replace(plan, **own)


@dataclass(frozen=True)
class Baseline:
    """The launch that a relaunch is compared with."""

    precision: str
    accumulate: int
    batch_size: int
    effective_batch_size: int
    estimate: Estimate
    """Of the launch as it was typed, as all before it."""
    reason: Reason
    """The first of its plan."""
    seconds: float
    """The modelled time of an optimizer step of it."""
    profile: LoopProfile
    """Of the launch from which the relaunch was made, which may be a relaunch itself."""

    @classmethod
    def of(cls, plan: Plan, profile: LoopProfile, first: FirstBatch) -> Baseline:
        """The baseline that a launch as it was typed makes."""
        return cls(
            plan.precision_before,
            plan.accumulate_before,
            plan.batch_size_before,
            plan.effective_batch_size_before,
            plan.before,
            plan.reason_values[0],
            launch_seconds(plan, first),
            profile,
        )


@dataclass(frozen=True)
class Relaunch:
    """A launch that is changed, and what it is compared with."""

    change: LaunchChange
    baseline: Baseline
    splits: int = 1
    """By how much batches are smaller than the baseline's."""
    proven: int = 0
    """Samples that were run, whole and in halves, with equal results; 0: none was."""

    @property
    def settled(self) -> set[str]:
        """Techniques that this launch has been chosen for already, and that are not to be planned once more."""
        change = self.change
        done = {"grow": True, "accumulate": change.splits > 1, "precision": bool(change.precision)}
        done |= {"shard": change.sharding.stage is not None, "offload_optimizer": change.sharding.states_on_host}
        return {name for name, chosen in done.items() if chosen}

    def check(self, precision: str, profile: LoopProfile, ranks: int) -> None:
        """Raises UnsupportedStepError where it is not what was meant by it, or another training.

        Args:
            precision: in which it was seen to train.
            profile: of its loop.
            ranks: processes of the launch.
        """
        found, wanted = ACCELERATES[precision], self.change.precision
        if wanted and found != wanted:
            raise UnsupportedStepError(
                _("with these options it trains in {precision}, not in {wanted}", precision=found, wanted=wanted)
            )
        # Another precision makes losses of other operators, and under FSDP2 so does mixed precision.
        alike = precision == self.baseline.precision == "32-true" or self.change.sharding.by_engine
        losses = self.splits > 1 or (bool(self.change.sharding.kind) and alike)
        why = disagreement(self.baseline.profile, profile, self.splits, ranks, losses=losses)
        if why:
            raise UnsupportedStepError(_("with these options, {difference}", difference=why))

    def combined(self, plan: Plan, first: FirstBatch) -> Plan:
        """A plan for the relaunch, as a plan for the launch as it was typed.

        Args:
            plan: for the relaunch.
            first: the script that is launched so.
        """
        written = self.baseline
        slowdown = round((plan.slowdown or 1.0) * launch_seconds(plan, first) / written.seconds, 4)
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
            recipe=plan.recipe.with_(sharding=self.change.sharding.planned),
            slowdown=slowdown,
            reason_values=(
                written.reason,
                Reason(Why.LAUNCHED_WITH, options=self.change.words),
                *(_launched_so(reason) for reason in own),
                Reason(Why.CHEAPEST, time=StepTime(slowdown)),
            ),
        )

    def notes(self, plan: Plan) -> list[str]:
        """Notes for a reader of the plan, which was made for this launch."""
        seen = _(
            "{options}: seen in a dry run of its own, with the same samples and learning rates at every optimizer step",
            options=self.change.words,
        )
        if self.change.splits == 1:
            return [seen]
        proven = _("smaller batches: proven by the loss graph")
        if self.proven:
            proven = _(
                "{proven}; {count} samples, run whole and in halves, came to the same",
                proven=proven,
                count=self.proven,
            )
        smaller = _(
            "the script's own batches are smaller and its loader is {count} times as long: what it "
            "counts in batches (prints, limits, progress) comes {count} times as often; what it counts "
            "in optimizer steps stays. Random numbers (noise, dropout) are drawn for smaller batches: "
            "different numbers from the same distribution. No forward runs twice",
            count=self.change.splits,
        )
        if plan.timeline is None or not uses_batch_norm(plan.timeline):
            return [seen, proven, smaller]
        return [seen, proven, smaller, _("batch normalisation takes its statistics over the samples of a batch")]


def _launched_so(reason: Reason) -> Reason:
    """The same reason where "as written" means: launched with these options."""
    kinds = {Why.FITS: Why.FITS_LAUNCHED, Why.SHORTAGE: Why.SHORTAGE_LAUNCHED}
    return Reason(kinds[reason.kind], **dict(reason.values)) if reason.kind in kinds else reason
