"""Proof by execution: copies of the script train on a few samples, as written and under a plan, and are compared."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

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
        self._halved: Proof | None = None
        self._by_items = look.profile.by_items
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

        def run(steps: _Steps, deadline: float) -> list[str]:
            small = _small(plan, steps.samples)
            (changed,) = steps.run(deadline, {"plan": small})
            return steps.differences(changed.observed, small.micro_batch_size)

        return self._compared(run)

    def of_halves(self) -> Proof:
        """Compare the script's step with its steps on both halves of the samples, once.

        These are added as they are or as a mean; where losses are divided by the number of items of a whole optimizer
        step, each half by its share of the items.
        """

        def run(steps: _Steps, deadline: float) -> list[str]:
            steps = steps.up_to_the_first_backward()
            half, samples = steps.samples // 2, steps.samples
            halves = steps.run(deadline, {"part": (0, half)}, {"part": (half, samples)})
            weights: list[tuple[float, ...]] = [(0.5, 0.5), (1.0, 1.0)]
            items = [step.items for step in halves]
            if self._by_items and steps.items and None not in items:
                weights = [tuple((one or 0.0) / steps.items for one in items)]
            return min((steps.differences(_added(halves, one), half) for one in weights), key=len)

        if self._halved is None:
            self._halved = self._compared(run)
        return self._halved

    def _compared(self, run: Callable[[_Steps, float], list[str]]) -> Proof:
        if self._steps is None:
            return Proof(why_not=self._why_not)
        deadline = time.monotonic() + self._seconds
        try:
            found = run(self._steps, deadline)
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
        self.items: float | None = None
        """Of the step as written, where a Trainer counts them; None: it has not been run, or counts none."""
        self.random = False
        """True if the models draw random numbers in the step as written."""

    @property
    def samples(self) -> int:
        """Number of samples that a step is run on."""
        return self._task.samples

    def up_to_the_first_backward(self) -> _Steps:
        """Shorter ones: what an optimizer does after the first backward pass depends on what is in the batch."""
        return self if self._task.backwards == 1 else _Steps(self._server, replace(self._task, backwards=1))

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
            (step,) = self._answers(deadline, self._task)
            if isinstance(step, ProofStep):
                if not step.observed.is_telling:
                    raise UnsupportedStepError(_("its gradients are zero or not finite"))
                self._written, self._task = step.observed, replace(self._task, draws=step.draws)
                self.items, self.random = step.items, step.random
            elif self._task.precise:
                self._task = replace(self._task, precise=False)
            elif isinstance(step, DryRunFailure):
                raise UnsupportedStepError(step.message)

    def run(self, deadline: float, *changes: dict[str, Any]) -> list[ProofStep]:
        """What comes out under changes of the task, each by itself."""
        self._run_as_written(deadline)
        steps = self._answers(deadline, *(replace(self._task, **change) for change in changes))
        for step in steps:
            if isinstance(step, DryRunFailure):
                raise _FailedStepError(step.message)
        return [step for step in steps if isinstance(step, ProofStep)]

    def _answers(self, deadline: float, *tasks: ProofTask) -> list[ProofStep | DryRunFailure]:
        what = _("the copy that would have run a few samples")
        copies = [(self._server.fork(task), partial(self._server.fork, task)) for task in tasks]
        with without_modes():
            return [
                forks.asked_twice(ask, what, max(0.0, deadline - time.monotonic()), begun=copy) for copy, ask in copies
            ]


def _added(steps: Sequence[ProofStep], weights: Sequence[float]) -> Observed:
    """Gradients and losses of several steps, added up with these weights; of the rest, the last one's."""
    parts = [step.observed for step in steps]
    last = parts[-1]
    with without_modes():
        gradients = {
            name: torch.stack([part.gradients[name] * one for part, one in zip(parts, weights, strict=True)]).sum(0)
            for name in last.gradients
            if all(name in part.gradients for part in parts)
        }
        loss = sum((part.loss or 0.0) * one for part, one in zip(parts, weights, strict=True))
        return replace(last, gradients=gradients, loss=loss)


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
