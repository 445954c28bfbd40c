"""Proof by execution: copies of the script train on a few samples, as written and under a plan, and are compared."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial

import torch

from vram_guard.errors import UnsupportedStepError
from vram_guard.language import _
from vram_guard.limits import NAMED
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
from vram_guard_accelerate.dry_run.results import DryRunFailure, TraceResult

#: Samples that copies train on: as many as the time allows.
SAMPLES = (4, 2)


@dataclass(frozen=True)
class ScriptProof:
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
        trace: of its loop as written.
        seconds: that a proof may take.
    """

    def __init__(self, first: FirstBatch, trace: TraceResult, seconds: float) -> None:
        self._seconds = seconds
        self._server = first.proof_server
        self._why_not = ""
        self._task: ProofTask | None = None
        self._written: Observed | None = None
        self._random = False
        """True if the models draw random numbers in the step as written."""
        size = first.sample.batch_size
        of_each = seconds_on_cpu(trace.timeline, size) / (size * trace.facts.batches_per_step)
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
            self._task = ProofTask(possible[0], first.request, _backwards(trace), True, called_with=first.called_with)

    def of(self, plan: LaunchPlan) -> ScriptProof:
        """Compare a plan's step with the script's own."""
        if self._task is None:
            return ScriptProof(why_not=self._why_not)
        deadline = time.monotonic() + self._seconds
        try:
            found = self._differences(self._task, plan, deadline)
        except UnsupportedStepError as error:  # it took too long, or died, or does not run on the CPU as written
            late = time.monotonic() >= deadline
            why = _("it took more than {seconds} s", seconds=self._seconds) if late else str(error)
            return ScriptProof(why_not=why)
        more = [_("and {count} more", count=len(found) - NAMED)] if len(found) > NAMED else []
        return ScriptProof(self._task.samples, "; ".join([*found[:NAMED], *more]), random=self._random)

    def _differences(self, task: ProofTask, plan: LaunchPlan, deadline: float) -> list[str]:
        """The differences between the step as written and under a plan, worst first."""
        if self._written is None:
            task = self._task = self._run_as_written(task, deadline)
        small = _small(plan, task.samples)
        changed, written = self._answer(replace(task, plan=small), deadline), self._written
        if isinstance(changed, DryRunFailure):
            return [changed.message]
        if written is None:
            return []
        types = {weight.dtype for weight in written.weights.values() if weight.dtype in TOLERANCES}
        tolerance = max((TOLERANCES[each] for each in types), default=TOLERANCES[torch.float32])
        with without_modes():
            cut = (task.samples, small.micro_batch_size)
            found = differences(written, changed.observed, tolerance=tolerance, cut=cut)
        return [difference.words() for difference in found]

    def _run_as_written(self, task: ProofTask, deadline: float) -> ProofTask:
        """In double precision, or as it is where the script asks for another one by name; the task of what is compared.

        Raises:
            UnsupportedStepError: it does not run, or shows nothing.
        """
        step = self._answer(task, deadline)
        if isinstance(step, DryRunFailure):
            if not task.precise:
                raise UnsupportedStepError(step.message)
            return self._run_as_written(replace(task, precise=False), deadline)
        if not step.observed.is_telling:
            raise UnsupportedStepError(_("its gradients are zero or not finite"))
        self._written, self._random = step.observed, step.random
        return replace(task, draws=step.draws)

    def _answer(self, task: ProofTask, deadline: float) -> ProofStep | DryRunFailure:
        server: ForkServer | None = self._server
        if server is None:
            raise UnsupportedStepError(self._why_not)
        what = _("the copy that would have run a few samples")
        with without_modes():
            left = max(0.0, deadline - time.monotonic())
            found: ProofStep | DryRunFailure = forks.answer_of(partial(server.fork, task), what, left)
        return found


def _backwards(trace: TraceResult) -> int:
    """Backward passes of the script for one batch."""
    profile = trace.profile
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
