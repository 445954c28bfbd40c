"""Proof by execution: copies of the script train on a few samples, as written and under a plan, and are compared."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial

import torch

from vram_guard.errors import UnsupportedStepError
from vram_guard.language import _
from vram_guard.proof.differences import TOLERANCES, differences
from vram_guard.proof.observed import Observed
from vram_guard.techniques.recipe import AS_WRITTEN
from vram_guard.tensors import without_modes
from vram_guard_accelerate._launch_plan import LaunchPlan
from vram_guard_accelerate._sharding_change import AS_LAUNCHED
from vram_guard_accelerate.dry_run import forks
from vram_guard_accelerate.dry_run._cpu_time import seconds_on_cpu
from vram_guard_accelerate.dry_run._fork_server import ForkServer
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
    random: bool = False
    """True if the models draw random numbers."""

    @property
    def refutation(self) -> str:
        """The difference in a sentence; "" where none was found."""
        if not self.difference:
            return ""
        return _("{count} samples were run, and differed: {difference}", count=self.samples, difference=self.difference)


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
        whole = [size] if first.called_with else []  # no loader makes fewer
        wanted = dict.fromkeys((*whole, *SAMPLES))
        possible = [samples for samples in wanted if samples <= size and 2 * samples * of_each <= seconds]
        if not seconds:
            self._why_not = "--proof-seconds 0"
        elif first.fails_at_others:
            self._why_not = first.fails_at_others
        elif first.proof_server is None:
            self._why_not = _("its model is too large to keep a copy of it")
        elif size < min(SAMPLES):
            self._why_not = _("its batch has {count} samples", count=size)
        elif not possible:
            self._why_not = _("it would take {seconds} s", seconds=f"{2 * min(SAMPLES) * of_each:.0f}")
        else:
            task = ProofTask(possible[0], first.request, _backwards(look), True, called_with=first.called_with)
            self._steps = _Steps(first.proof_server, task)

    def of(self, plan: LaunchPlan) -> Proof:
        """Compare a plan's step with the script's own."""
        if self._steps is None:
            return Proof(why_not=self._why_not)
        deadline = time.monotonic() + self._seconds
        small = _small(plan, self._steps.samples)
        try:
            changed = self._steps.run(deadline, small)
            found = self._steps.differences(changed.observed, small.micro_batch_size)
        except _FailedStepError as error:
            found = [str(error)]
        except UnsupportedStepError as error:  # it took too long, or died, or does not run on the CPU as written
            return Proof(why_not=self._words(error, deadline))
        more = [_("and {count} more", count=len(found) - NAMED)] if len(found) > NAMED else []
        return Proof(self._steps.samples, "; ".join([*found[:NAMED], *more]), random=self._steps.random)

    def _words(self, error: UnsupportedStepError, deadline: float) -> str:
        late = time.monotonic() >= deadline
        return _("it took more than {seconds} s", seconds=self._seconds) if late else str(error)


class _FailedStepError(Exception):
    """A step failed which runs as written."""


class _Steps:
    """Steps of one script that are run for real, in copies."""

    def __init__(self, server: ForkServer, task: ProofTask) -> None:
        self._server = server
        self._task = task
        self._written: Observed | None = None
        self.random = False
        """True if the models draw random numbers in the step as written."""

    @property
    def samples(self) -> int:
        """Number of samples that a step is run on."""
        return self._task.samples

    def differences(self, changed: Observed, micro_batch_size: int) -> list[str]:
        """The differences between the step as written and another one, worst first."""
        written = self._written
        if written is None:
            return []
        types = {weight.dtype for weight in written.weights.values() if weight.dtype in TOLERANCES}
        tolerance = max((TOLERANCES[each] for each in types), default=TOLERANCES[torch.float32])
        with without_modes():
            found = differences(written, changed, tolerance=tolerance, cut=(self.samples, micro_batch_size))
        return [difference.words() for difference in found]

    def _run_as_written(self, deadline: float) -> None:
        """Once: in double precision, or as it is where the script asks for another one by name."""
        while self._written is None:
            step = self._answer(deadline, self._task)
            if isinstance(step, ProofStep):
                if not step.observed.is_telling:
                    raise UnsupportedStepError(_("its gradients are zero or not finite"))
                self._written, self._task = step.observed, replace(self._task, draws=step.draws)
                self.random = step.random
            elif self._task.precise:
                self._task = replace(self._task, precise=False)
            elif isinstance(step, DryRunFailure):
                raise UnsupportedStepError(step.message)

    def run(self, deadline: float, plan: LaunchPlan) -> ProofStep:
        """What comes out under a plan."""
        self._run_as_written(deadline)
        step = self._answer(deadline, replace(self._task, plan=plan))
        if isinstance(step, DryRunFailure):
            raise _FailedStepError(step.message)
        return step

    def _answer(self, deadline: float, task: ProofTask) -> ProofStep | DryRunFailure:
        what = _("the copy that would have run a few samples")
        with without_modes():
            found: ProofStep | DryRunFailure = forks.asked_twice(
                partial(self._server.fork, task), what, max(0.0, deadline - time.monotonic())
            )
        return found


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
        recipe=AS_WRITTEN.with_(
            checkpoint=plan.recipe.checkpoint,
            checkpoint_keeps=plan.recipe.checkpoint_keeps,
            offload_activations=plan.recipe.offload_activations,
            chunked_head=plan.recipe.chunked_head,
        ),
        sharding=AS_LAUNCHED,  # a copy that proves is alone
    )
