"""Proof by execution: copies of the script train on a few samples, as written and under a plan, and are compared."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from vram_guard.errors import UnsupportedStepError
from vram_guard.language import _
from vram_guard.techniques.recipe import AS_WRITTEN
from vram_guard_accelerate._launch_plan import LaunchPlan
from vram_guard_accelerate.dry_run._cpu_time import seconds_on_cpu
from vram_guard_accelerate.dry_run._fork_server import ForkServer
from vram_guard_accelerate.dry_run._observed import Observed, differences
from vram_guard_accelerate.dry_run._proving import ProofTask
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
        self._first = first
        self._look = look
        self._seconds = seconds
        self._precise = True
        self._written: Observed | None = None
        self._samples, self._why_not = self._possible(first.proof_server)

    def of(self, plan: LaunchPlan) -> Proof:
        """Compare a plan's step with the script's own."""
        server = self._first.proof_server
        if server is None or self._why_not:
            return Proof(why_not=self._why_not)
        small = replace(
            plan,
            precision="",
            batch_size=self._samples,
            grown_batch_size=self._samples,
            micro_batch_size=_micro_batch_size(plan, self._samples),
            batch_option="",
            learning_rate_factor=1.0,
            resumes_grown=False,
            recipe=AS_WRITTEN.with_(checkpoint=plan.recipe.checkpoint),
        )
        deadline = time.monotonic() + self._seconds
        try:
            return self._compared(server, small, deadline)
        except UnsupportedStepError as error:  # it took too long, or died
            return Proof(why_not=str(error))

    def _compared(self, server: ForkServer, plan: LaunchPlan, deadline: float) -> Proof:
        while True:
            tasks = [plan] if self._written is not None else [plan, None]
            copies = [server.fork(self._task(one)) for one in tasks]
            answers = [copy.answer(max(0.0, deadline - time.monotonic())) for copy in copies]
            written = self._written or answers[-1]
            if isinstance(written, Observed):
                break
            if not self._precise:
                raise UnsupportedStepError(written.message)
            self._precise = False  # the script asks for single precision by name
        self._written = written
        if isinstance(answers[0], DryRunFailure):
            return Proof(self._samples, answers[0].message)
        found = differences(written, answers[0])
        more = _("and {count} more", count=len(found) - NAMED)
        return Proof(self._samples, "; ".join([*found[:NAMED], *([more] if len(found) > NAMED else [])]))

    def _task(self, plan: LaunchPlan | None) -> ProofTask:
        profile = self._look.profile
        backwards = max(1, len(profile.losses) // profile.batches_per_step) if profile.complete else 1
        return ProofTask(plan, self._samples, self._first.request, backwards, self._precise)

    def _possible(self, server: ForkServer | None) -> tuple[int, str]:
        """The number of samples; 0, and the reason why, where nothing can be run."""
        if server is None:
            return 0, _("no copy of the script that could run for real was kept")
        size = self._first.sample.batch_size
        of_each = seconds_on_cpu(self._look.timeline, size) / (size * self._look.facts.batches_per_step)
        for samples in SAMPLES:
            # As written and under the plan.
            if samples <= size and 2 * samples * of_each <= self._seconds:
                return samples, ""
        if size < SAMPLES[-1]:
            return 0, _("its batch has {count} samples", count=size)
        return 0, _("it would take {seconds} s", seconds=f"{2 * SAMPLES[-1] * of_each:.0f}")


def _micro_batch_size(plan: LaunchPlan, samples: int) -> int:
    """Of a few samples: two slices, or one for each sample where the plan has it so."""
    if not plan.slices:
        return samples
    return 1 if plan.micro_batch_size == 1 else samples // 2
