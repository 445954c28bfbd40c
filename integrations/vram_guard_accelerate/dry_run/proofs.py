"""Proof by execution: copies of the script train on a few samples, as written and under a plan, and are compared."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from vram_guard.errors import UnsupportedStepError
from vram_guard.language import _
from vram_guard.techniques.recipe import AS_WRITTEN
from vram_guard_accelerate._launch_plan import LaunchPlan
from vram_guard_accelerate.dry_run._cpu_time import seconds_on_cpu
from vram_guard_accelerate.dry_run._fork_server import ForkServer
from vram_guard_accelerate.dry_run._observed import Observed, added, differences
from vram_guard_accelerate.dry_run._proving import ProofStep, ProofTask
from vram_guard_accelerate.dry_run.first_batch import FirstBatch
from vram_guard_accelerate.dry_run.results import DryRunFailure, FirstLook

#: Samples that copies train on: as many as the time allows.
SAMPLES = (4, 2)

#: Differences that are named; the others are counted.
NAMED = 3


@dataclass(frozen=True)
class Proof:
    """The outcome of one comparison."""

    samples: int = 0
    """Of how many the copies trained on; 0: none did."""
    difference: str = ""
    """"" where none was found."""
    why_not: str = ""
    """The reason why nothing was run."""


class Proofs:
    """Proofs for one script; what it does as written is run once.

    Args:
        first: the script at its first training batch.
        look: what its loop was seen to do.
        seconds: that a proof may take.
    """

    def __init__(self, first: FirstBatch, look: FirstLook, seconds: float) -> None:
        self._seconds = seconds
        self._why_not = ""
        self._steps: _Steps | None = None
        size = first.sample.batch_size
        of_each = seconds_on_cpu(look.timeline, size) / (size * look.facts.batches_per_step)
        # As written and under the plan.
        possible = [samples for samples in SAMPLES if samples <= size and 2 * samples * of_each <= seconds]
        if not seconds:
            self._why_not = "--proof-seconds 0"
        elif first.proof_server is None:
            self._why_not = _("its model is too large to keep a copy of it")
        elif size < min(SAMPLES):
            self._why_not = _("its batch has {count} samples", count=size)
        elif not possible:
            self._why_not = _("it would take {seconds} s", seconds=f"{2 * min(SAMPLES) * of_each:.0f}")
        else:
            self._steps = _Steps(first.proof_server, ProofTask(possible[0], first.request, _backwards(look), True))

    def of(self, plan: LaunchPlan) -> Proof:
        """Compare a plan's step with the script's own."""

        def run(steps: _Steps, deadline: float) -> list[str]:
            changed = steps.run(deadline, {"plan": _small(plan, steps.samples)})
            return differences(steps.as_written(deadline).observed, changed[0])

        return self._compared(run)

    def of_halves(self) -> Proof:
        """Compare the script's step with the mean, or the sum, of its steps on both halves of the samples."""

        def run(steps: _Steps, deadline: float) -> list[str]:
            samples = steps.samples
            halves = steps.run(deadline, {"part": (0, samples // 2)}, {"part": (samples // 2, samples)})
            whole = steps.as_written(deadline).observed
            return min((differences(whole, added(halves, weight)) for weight in (0.5, 1.0)), key=len)

        return self._compared(run)

    def _compared(self, run: Callable[[_Steps, float], list[str]]) -> Proof:
        if self._steps is None:
            return Proof(why_not=self._why_not)
        try:
            found = run(self._steps, time.monotonic() + self._seconds)
        except _FailedStepError as error:
            found = [str(error)]
        except UnsupportedStepError as error:  # it took too long, or died, or does not run on the CPU as written
            return Proof(why_not=str(error))
        more = [_("and {count} more", count=len(found) - NAMED)] if len(found) > NAMED else []
        return Proof(self._steps.samples, "; ".join([*found[:NAMED], *more]))


class _FailedStepError(Exception):
    """A step failed which runs as written."""


class _Steps:
    """Steps of one script that are run for real, in copies."""

    def __init__(self, server: ForkServer, task: ProofTask) -> None:
        self._server = server
        self._task = task
        self._written: ProofStep | None = None

    @property
    def samples(self) -> int:
        """Number of samples that a step is run on."""
        return self._task.samples

    def as_written(self, deadline: float) -> ProofStep:
        """The script's own, run once: in double precision, or in single where the script asks for that by name."""
        while self._written is None:
            (step,) = self._answers(deadline, self._task)
            if isinstance(step, ProofStep):
                self._written, self._task = step, replace(self._task, draws=step.draws)
            elif self._task.precise:
                self._task = replace(self._task, precise=False)
            else:
                raise UnsupportedStepError(step.message)
        return self._written

    def run(self, deadline: float, *changes: dict[str, Any]) -> list[Observed]:
        """What comes out under changes of the task, each by itself."""
        self.as_written(deadline)
        steps = self._answers(deadline, *(replace(self._task, **change) for change in changes))
        for step in steps:
            if isinstance(step, DryRunFailure):
                raise _FailedStepError(step.message)
        return [step.observed for step in steps if isinstance(step, ProofStep)]

    def _answers(self, deadline: float, *tasks: ProofTask) -> list[ProofStep | DryRunFailure]:
        copies = [self._server.fork(task) for task in tasks]
        return [copy.answer(max(0.0, deadline - time.monotonic())) for copy in copies]


def _backwards(look: FirstLook) -> int:
    """Backward passes of the script for one batch."""
    profile = look.profile
    return max(1, len(profile.losses) // profile.batches_per_step) if profile.complete else 1


def _small(plan: LaunchPlan, samples: int) -> LaunchPlan:
    """The plan for a few samples: what it changes of the step's computation."""
    slices = samples if not plan.slices else 1 if plan.micro_batch_size == 1 else samples // 2
    return replace(
        plan,
        precision="",
        batch_size=samples,
        grown_batch_size=samples,
        micro_batch_size=slices,
        batch_option="",
        learning_rate_factor=1.0,
        resumes_grown=False,
        recipe=AS_WRITTEN.with_(checkpoint=plan.recipe.checkpoint),
    )
