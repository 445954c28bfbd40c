"""Which variants of a launch are worth a dry run of their own, and whether one that was run is what was meant."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from vram_guard.errors import UnsupportedStepError
from vram_guard.plan.step_time import seconds_as_written
from vram_guard.plan.techniques import mixed_precision, splits_of
from vram_guard_accelerate.dry_run.script_options import accumulation_option, batch_size_option, precision_option
from vram_guard_accelerate.relaunch.equivalence import why_not_accumulated
from vram_guard_accelerate.relaunch.relaunch import Origin, Variant, Varied

if TYPE_CHECKING:
    from vram_guard.plan import Plan
    from vram_guard.plan.source import Source
    from vram_guard_accelerate.dry_run.results import Facts
    from vram_guard_accelerate.dry_run.run import DryRun
    from vram_guard_accelerate.settings import Settings

#: Of batches in smaller parts, how many sizes are asked for: the largest that is thought to fit, and the next smaller.
SIZES = 2


class Wishes:
    """What a launch would have to be launched with.

    Args:
        run: the script, at its first training batch.
        settings: what may be changed.
        facts: what the loop was seen to do.
        refused: technique -> why it cannot be put on the script from outside.
    """

    def __init__(self, run: DryRun, settings: Settings, facts: Facts, refused: dict[str, str]) -> None:
        self._run = run
        self._settings = settings
        self._facts = facts
        self._refused = refused
        self.notes: list[str] = []
        """Why the script's own options are not set, where they could have been."""

    @property
    def to_be_varied(self) -> set[str]:
        """What the script itself acts on before it trains: that cannot be had from outside, only by a variant."""
        run = self._run
        acts = run.precision_read or run.by_trainer or precision_option(run) is not None
        return {"precision"} if acts and self._mixed else set()

    @property
    def _mixed(self) -> str:
        """The mixed precision that may replace the script's own, in Accelerate's words; "" where none may."""
        from vram_guard_accelerate.dry_run.run import ACCELERATES

        run = self._run
        fixed = run.precision_given and precision_option(run) is None and not run.by_trainer
        if fixed or "precision" not in self._settings.techniques:
            return ""
        name, _ = mixed_precision(run.precision, run.capability)
        return ACCELERATES[name] if name is not None else ""

    def wanted(
        self, made: Plan, source: Source, planned: Callable[..., Plan], varied: Varied | None
    ) -> tuple[Varied, ...]:
        """The variants that may be better than the plan of the launch as it is, the likeliest first.

        Args:
            made: that plan.
            source: the script's loop.
            planned: makes plans, as :func:`vram_guard_accelerate.planning.decide.decide` does.
            varied: of which launch this one is a variant itself.
        """
        assert self._facts.conduct is not None
        if varied is None:
            shown = replace(made, timeline=None, timeline_before=None)
            origin = Origin(shown, seconds_as_written(made), self._facts.conduct)
        else:
            origin = replace(varied.origin, conduct=self._facts.conduct)
        so_far = Variant() if varied is None else varied.variant
        found = []
        if self.to_be_varied:
            mixed = replace(so_far, precision=self._mixed, precision_option=precision_option(self._run) or "")
            found.append(Varied(mixed, origin))
        if so_far.splits == 1:
            found += [
                Varied(variant, origin, variant.splits) for variant in self._in_parts(so_far, made, source, planned)
            ]
        return tuple(found)

    # --- the script's own options for batch size and accumulation -----------------------------------------------

    def _in_parts(self, so_far: Variant, made: Plan, source: Source, planned: Callable[..., Plan]) -> list[Variant]:
        """Smaller batches, more of them: where slices would run forwards twice, or cannot be made."""
        run, facts = self._run, self._facts
        assert run.sample is not None
        assert facts.conduct is not None
        batch, accumulation = batch_size_option(run), accumulation_option(run, facts.batches_per_step)
        if not (batch and accumulation and "accumulate" in self._settings.techniques):
            return []
        if facts.inside and made.splits > 1:
            self.notes.append(
                f"the models return their loss: slices inside their forward cost nothing, so the script's own options "
                f"({batch}, {accumulation}) stay as they are"
            )
            return []
        # Memory that grows otherwise than with the batch: a table of all samples against all samples.
        uneven = made.timeline_before is not None and made.timeline_before.retrace is not None
        compares = "samples of a batch are compared with each other" if facts.compares or uneven else ""
        why = compares or why_not_accumulated(facts.conduct, run.ranks)
        if why:
            self.notes.append(f"the script's own options ({batch}, {accumulation}) are not set: {why}")
            return []
        gathered = replace(source, sliced_by="loader", forward_again=False)
        found = planned(gathered, possible=("accumulate",), growing=False)
        if not found.fits or found.splits == 1 or (made.fits and (found.slowdown or 1.0) >= (made.slowdown or 1.0)):
            return []
        counts = [count for count in splits_of(run.sample.batch_size) if count >= found.splits][:SIZES]
        return [
            replace(
                so_far,
                splits=count,
                batch_size=run.sample.batch_size // count,
                batch_option=batch,
                accumulation=facts.batches_per_step * count,
                accumulation_option=accumulation,
            )
            for count in counts
        ]


def check(varied: Varied, run: DryRun, facts: Facts) -> None:
    """Raises UnsupportedStepError where a variant is not what was meant by it, or another training."""
    from vram_guard_accelerate.dry_run.run import ACCELERATES

    assert facts.conduct is not None
    precision, wanted = ACCELERATES[run.precision], varied.variant.precision
    if wanted and precision != wanted:
        raise UnsupportedStepError(f"launched so, it trains in {precision}, not in {wanted}")
    why = varied.disagreement(facts.conduct, run.ranks)
    if why:
        raise UnsupportedStepError(f"launched so, {why}")
