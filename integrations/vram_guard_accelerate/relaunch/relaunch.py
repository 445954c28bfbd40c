"""A relaunch: the same script in another precision or sharding from its beginning.

What a script does with the precision that it asks for is the script's own business: it casts models before it trains;
so is what it does with a sharded model. Therefore nothing is assumed: the changed launch is run dry in a process of its
own, which must turn out to be the same training (:func:`disagreement`), and is then planned for as it is. The plan
of the launch as written stands until a relaunch is cheaper.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from vram_guard.errors import UnsupportedStepError
from vram_guard.language import _, marked
from vram_guard.parallel.links import topology
from vram_guard.parallel.spec import Kind, Parallel
from vram_guard.plan.communication import communication
from vram_guard.plan.descriptions import Reason, RelativeTime, Why
from vram_guard.plan.step_time import card_of, seconds_as_written
from vram_guard.timeline import Estimate
from vram_guard_accelerate._launch_plan import LaunchPlan, option_words
from vram_guard_accelerate._precision import ACCELERATES
from vram_guard_accelerate._sharding_change import AS_LAUNCHED, ShardingChange
from vram_guard_accelerate.dry_run.loop_profile import LoopProfile

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
    """

    precision: str = ""
    precision_option: str = ""
    sharding: ShardingChange = AS_LAUNCHED

    @property
    def kind(self) -> Literal["precision", "shard", "offload", "reshard"]:
        """The kind of change that was made last: of those that it has, the one that comes after all others."""
        return self.sharding.kind or "precision"

    @property
    def arguments(self) -> list[str]:
        """Words for the script's command line; the last of two equal options counts."""
        return option_words((self.precision_option, self.precision))

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

    @property
    def settled(self) -> set[str]:
        """Techniques that this launch has been chosen for already, and that are not to be planned once more."""
        change = self.change
        done = {"grow": True, "precision": bool(change.precision)}
        done |= {"shard": change.sharding.stage is not None, "offload_optimizer": change.sharding.states_on_host}
        return {name for name, chosen in done.items() if chosen}

    def check(self, precision: str, profile: LoopProfile) -> None:
        """Raises UnsupportedStepError where it is not what was meant by it, or another training.

        Args:
            precision: in which it was seen to train.
            profile: of its loop.
        """
        found, wanted = ACCELERATES[precision], self.change.precision
        if wanted and found != wanted:
            raise UnsupportedStepError(
                _("with these options it trains in {precision}, not in {wanted}", precision=found, wanted=wanted)
            )
        # Another precision makes losses of other operators, and under FSDP2 so does mixed precision.
        alike = precision == self.baseline.precision == "32-true" or self.change.sharding.by_engine
        losses = bool(self.change.sharding.kind) and alike
        why = disagreement(self.baseline.profile, profile, losses=losses)
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
                Reason(Why.CHEAPEST, time=RelativeTime(slowdown)),
            ),
        )

    @property
    def note(self) -> str:
        """A note for a reader of its plan."""
        return _(
            "{options}: seen in a dry run of its own, with the same batches, and the same learning rates at the first "
            "two optimizer steps",
            options=self.change.words,
        )


def _launched_so(reason: Reason) -> Reason:
    """The same reason where "as written" means: launched with these options."""
    kinds = {Why.FITS: Why.FITS_LAUNCHED, Why.SHORTAGE: Why.SHORTAGE_LAUNCHED}
    return Reason(kinds[reason.kind], **dict(reason.values)) if reason.kind in kinds else reason


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


def launch_seconds(made: Plan, first: FirstBatch) -> float:
    """The modelled seconds of an optimizer step; the links of the machine are those that its card usually has.

    Args:
        made: a plan for the launch.
        first: the script that is launched so.
    """
    timeline, shape, card = made.timeline_before, first.shape, made.budget.gpu
    computing = seconds_as_written(made)
    if timeline is None or shape.ranks == 1:
        return computing
    kind: Kind = "ddp" if first.fsdp_plugin is None else "fsdp2" if first.fsdp_plugin.fsdp_version == 2 else "fsdp1"
    node = shape.ranks if shape.ranks % shape.local_ranks else shape.local_ranks
    layout = first.engine or Parallel(gpus=shape.ranks, node=node, kind=kind)
    links = topology(None, gpus=shape.ranks, node=node, gpu=card)
    card = card_of(card, timeline.compute_capability)
    size, rounds = made.batch_size_before, made.accumulate_before
    waiting = communication(replace(timeline, parallel=layout), size, card, links, micro_batches=rounds)
    return computing + waiting.exposed
