"""Proof that a plan leaves what is learned as it was.

Micro-batches are proven by the form of the loss, which holds for every value, or are as the user said. One optimizer
step of a few samples is run besides, as written and under the plan: it may refuse, and proves nothing about them.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from vram_guard.apply.microbatch import Layout, probe_layout
from vram_guard.apply.normalisers import EveryLabel, Normaliser
from vram_guard.errors import UnsupportedStepError
from vram_guard.forks.fork import run_in_fork
from vram_guard.language import _
from vram_guard.limits import REHEARSED_SAMPLES
from vram_guard.plan.descriptions import sharding_words
from vram_guard.plan.techniques import FORMS
from vram_guard.proof._cost import memory_lacking, seconds_needed
from vram_guard.proof._reduction import reduction
from vram_guard.proof.differences import TOLERANCES, Difference, Kind, differences
from vram_guard.proof.effects import (
    but_for_statistics,
    compared_while_training,
    other_draws,
    other_draws_of_slices,
    unless_said,
)
from vram_guard.proof.evaluations import prove_evaluation
from vram_guard.proof.rehearsal import Rehearsal, Rehearsed
from vram_guard.proof.small_steps import SmallSteps, small_steps
from vram_guard.techniques.recipe import AS_WRITTEN, Recipe

if TYPE_CHECKING:
    from vram_guard.apply.loss_weight import LossWeight
    from vram_guard.guard.training import CapturedTraining
    from vram_guard.plan import Plan
    from vram_guard.plan.model import SmallerEvaluation
    from vram_guard.proof.loss_graph import LossGraph


@dataclass(frozen=True)
class Proof:
    """How it is known that the plan leaves what is learned as it was."""

    words: str
    """For a reader of the prediction; "" where nothing was to be proven."""
    loss_weight: LossWeight | None = None
    """Of micro-batches, where it was found out; None: as the user said."""
    notes: tuple[str, ...] = ()
    """What is other than as written all the same."""


@dataclass(frozen=True)
class Disproof:
    """Why a technique must not be used."""

    technique: str
    reason: str


class _NotRun(Exception):  # noqa: N818 - an outcome
    """The step as written cannot be rehearsed; says why."""


def prove(
    captured: CapturedTraining, plan: Plan, graph: LossGraph, loss_weight: LossWeight | None, seconds: float
) -> Proof | Disproof:
    """Proof that micro-batches, checkpointed blocks and what a plan keeps on the host leave what is learned as it was.

    Args:
        captured: the training, in a copy of its process.
        plan: that changes it.
        graph: of its loss.
        loss_weight: as the user said; None: to be found out.
        seconds: that a rehearsal may take; where it would take longer, there is none.
    """
    prover = _Prover(captured, plan, graph, loss_weight, seconds, splits=plan.splits > 1)
    return prover.verdict() if plan.evaluation is None else prover.with_evaluation(plan.evaluation)


def prove_cut(captured: CapturedTraining, plan: Plan, graph: LossGraph) -> tuple[LossWeight | None, str]:
    """The weight of the losses of micro-batches that may be needed later; None, and why, where there is none.

    Args:
        captured: the training, in a copy of its process.
        plan: that does not cut its batches.
        graph: of its loss, which alone decides.
    """
    return reduction(captured, graph, plan, _layout_of(captured))


def _layout_of(captured: CapturedTraining) -> Layout | None:
    """How batches are cut; None where they cannot be."""
    try:
        return probe_layout(captured.sample.make)
    except UnsupportedStepError:
        return None


def not_in_copy(change: str) -> str:
    """The words for a change of how the model is divided that no copy can run."""
    return _(
        "{change}: not run in a copy, which is one process; the same numbers are gathered and reduced, at another "
        "time or from another place",
        change=change,
    )


class _Prover:
    def __init__(
        self,
        captured: CapturedTraining,
        plan: Plan,
        graph: LossGraph,
        loss_weight: LossWeight | None,
        seconds: float,
        *,
        splits: bool,
    ) -> None:
        self._captured = captured
        self._graph = graph
        self._said = loss_weight
        self._seconds = seconds
        self._plan = plan
        self._splits = splits
        self._weight = loss_weight
        sharding = plan.recipe.sharding
        shown = sharding is not None and captured.rehearses(sharding)
        self._recipe = plan.recipe.with_(
            optimizer="as-written",
            parameters_on_host=(),
            sharding=sharding if shown else None,
            expandable_segments=False,
            activation_memory_budget=None,
        )
        self._unseen = None if shown else sharding

    def verdict(self) -> Proof | Disproof:
        proof = self._verdict()
        if isinstance(proof, Disproof):
            return proof
        notes = [*proof.notes]
        if self._recipe.checkpoint or self._recipe.slices is not None:
            notes.append(compared_while_training())
        if self._recipe.slices is not None and self._draws():
            notes.append(other_draws_of_slices())
        if self._unseen is not None:
            notes.append(not_in_copy(sharding_words(self._unseen)))
        return replace(proof, notes=tuple(notes))

    def with_evaluation(self, change: SmallerEvaluation) -> Proof | Disproof:
        """Of smaller batches of an evaluation first: most other changes are made beside them or not at all."""
        captured = self._captured

        def lacking(samples: int, double: bool) -> str:
            if not self._seconds:
                return _("proof_seconds is 0")
            needed = seconds_needed(self._captured, self._plan, samples)
            if needed > self._seconds:
                return _("running {count} samples would take {seconds} s", count=samples, seconds=f"{needed:.0f}")
            return memory_lacking(captured, self._plan, Rehearsal(samples, samples, None, double=double))

        samples, why = prove_evaluation(
            captured.rehearse_evaluation,
            change,
            captured.evaluated_samples,
            lacking=lacking,
            seconds=self._seconds,
        )
        if why:
            return Disproof("evaluation", why)
        proof = self.verdict()
        if isinstance(proof, Disproof):
            return proof
        said = _("{count} samples were run, and smaller batches log the same", count=samples)
        return replace(proof, notes=(*proof.notes, said))

    def _verdict(self) -> Proof | Disproof:
        optimizer = self._small_steps(AS_WRITTEN.with_(optimizer=self._plan.recipe.optimizer))
        if optimizer is None:
            return self._of_model()
        if optimizer.refutation:
            return Disproof(FORMS[self._plan.recipe.optimizer], optimizer.refutation)
        proof = self._of_model()
        return proof if isinstance(proof, Disproof) else replace(proof, notes=(*proof.notes, optimizer.words()))

    def _small_steps(self, recipe: Recipe) -> SmallSteps | None:
        """Of the recipe's optimizer; None where it is as written."""
        make = self._captured.step.optimizer
        if make is None:
            return None

        def as_written() -> torch.optim.Optimizer:
            with self._captured.symbolic_run():
                return make(self._captured.model.parameters())

        return small_steps(as_written, recipe)

    def _of_model(self) -> Proof | Disproof:
        if not self._splits and not self._recipe:
            return Proof("")
        if self._splits and self._said is None:
            self._weight, why = reduction(self._captured, self._graph, self._plan, _layout_of(self._captured))
            if self._weight is None:
                return Disproof("accumulate", unless_said(why))
        try:
            return self._by_running()
        except _NotRun as reason:
            return self._not_run(str(reason))

    # --- by running ------------------------------------------------------------------------------------------------

    def _by_running(self) -> Proof | Disproof:
        if not self._seconds:
            raise _NotRun(_("proof_seconds is 0"))
        if self._splits and self._short_batches() and self._plan.batch_size > REHEARSED_SAMPLES:
            with contextlib.suppress(_NotRun):  # a step may want an even number
                return self._run_on(REHEARSED_SAMPLES + 1)
        return self._run_on(min(self._plan.batch_size, REHEARSED_SAMPLES))

    def _short_batches(self) -> bool:
        """True where the last batch of an epoch may be cut into unequal parts."""
        sample = self._captured.sample
        return sample.dataset_size is None or sample.dataset_size % sample.batch_size != 0

    def _run_on(self, samples: int) -> Proof | Disproof:
        needed = seconds_needed(self._captured, self._plan, samples)
        if needed > self._seconds:
            raise _NotRun(_("running {count} samples would take {seconds} s", count=samples, seconds=f"{needed:.0f}"))
        whole, way = self._as_written(Rehearsal(samples, samples, _layout_of(self._captured)))
        if self._recipe.slices is not None and whole.random:
            raise _NotRun(_("it draws random numbers, others for each slice"))
        weight = self._weight or "mean"
        changed = way.with_(micro_batch_size=self._micro(samples), recipe=self._recipe, loss_weight=weight)
        found = self._differences(whole, changed)
        logged = tuple(one for one in found if one.kind is Kind.LOGGED) if self._splits else ()
        found = tuple(one for one in found if one not in logged)
        if found:
            return self._blamed(whole, way, found)
        notes = [other_draws()] if whole.random and self._splits else []
        notes += [_("in micro-batches, {difference}", difference=one.words()) for one in logged]
        return Proof(self._words(samples), None if self._said is not None else self._weight, tuple(notes))

    def _micro(self, samples: int) -> int:
        return -(-samples // 2) if self._splits else samples

    def _as_written(self, rehearsal: Rehearsal) -> tuple[Rehearsed, Rehearsal]:
        """The step as written, in double precision where that runs and in single precision elsewhere."""
        problem = ""
        for double in (True, False):
            way = rehearsal.with_(double=double)
            lacking = memory_lacking(self._captured, self._plan, way)
            if lacking:
                problem = problem or lacking
                continue
            try:
                whole = self._run(way)
            except Exception as error:  # noqa: BLE001 - the user's own code runs in it
                problem = problem or f"{type(error).__name__}: {error}"
                continue
            if not whole.observed.is_telling:
                raise _NotRun(_("the step on a few samples has no gradient to compare"))
            return whole, way.with_(draws=whole.draws)
        raise _NotRun(_("one step as written does not run on the CPU ({problem})", problem=problem))

    def _run(self, way: Rehearsal) -> Rehearsed:
        return run_in_fork(lambda _progress: self._captured.rehearse(way), most_seconds=self._most_seconds)

    @property
    def _most_seconds(self) -> float:
        return 10 * max(self._seconds, 1.0)

    def _differences(self, whole: Rehearsed, changed: Rehearsal) -> tuple[Difference, ...]:
        cut = changed.samples, changed.samples - changed.micro_batch_size or changed.samples

        def compared(_progress: object) -> tuple[Difference, ...]:
            """In the copy that ran: what it observed is as large as the model, and need not travel."""
            ran = self._captured.rehearse(changed)
            return _compared(whole, ran, double=changed.double, cut=cut)

        try:
            return run_in_fork(compared, most_seconds=self._most_seconds)
        except Exception as error:  # noqa: BLE001 - the user's own code runs in it
            return (Difference(Kind.HOOK, "", 1.0, None, f"{type(error).__name__}: {error}"),)

    def _blamed(self, whole: Rehearsed, way: Rehearsal, found: tuple[Difference, ...]) -> Proof | Disproof:
        """The technique that makes the difference; where the user said how the loss is weighed, a note of it."""
        parts = [(name, part) for name, part in self._parts() if part]
        technique = "accumulate" if self._splits else parts[-1][0]
        for name, part in parts if len(parts) + self._splits > 1 else ():
            alone = self._differences(whole, way.with_(recipe=part))
            if alone:
                technique, found = name, alone
                break
        words = _in_words(found, way.samples)
        if technique == "accumulate" and self._said is not None:
            return Proof(_("micro-batches as you said (loss_weight); {difference}", difference=words))
        return Disproof(technique, unless_said(words) if technique == "accumulate" else words)

    def _parts(self) -> tuple[tuple[str, Recipe], ...]:
        """The techniques of the recipe, each by itself."""
        divided = self._recipe.sharding
        named = "" if divided is None else max(divided.techniques)  # "shard" before "offload_parameters"
        return (
            (named, AS_WRITTEN.with_(sharding=divided)),
            ("offload_optimizer", AS_WRITTEN.with_(optimizer_on_host=self._recipe.optimizer_on_host)),
            ("offload_frozen", AS_WRITTEN.with_(frozen_on_host=self._recipe.frozen_on_host)),
            ("offload_activations", AS_WRITTEN.with_(offload_activations=self._recipe.offload_activations)),
            ("checkpoint", AS_WRITTEN.with_(checkpoint=self._recipe.checkpoint)),
            ("slices", AS_WRITTEN.with_(slices=self._recipe.slices)),
            ("selective_checkpoint", self._selective()),
            ("optimizer_in_backward", AS_WRITTEN.with_(optimizer_in_backward=self._recipe.optimizer_in_backward)),
            ("chunked_loss", AS_WRITTEN.with_(chunked_head=self._recipe.chunked_head)),
        )

    def _selective(self) -> Recipe:
        recipe = self._recipe
        if not recipe.checkpoint_keeps:
            return AS_WRITTEN
        return AS_WRITTEN.with_(checkpoint=recipe.checkpoint, checkpoint_keeps=recipe.checkpoint_keeps)

    def _words(self, samples: int) -> str:
        ran = _("{count} samples were run, and nothing that is learned differs", count=samples)
        if not self._splits:
            return ran
        return self._form(ran + (but_for_statistics() if self._plan.cuts_batch_norm else ""))

    def _form(self, ran: str) -> str:
        """How micro-batches are known to be exact, and what else was done or not done for it."""
        kind = self._weight
        if self._said is not None:
            return _("micro-batches as you said (loss_weight); {ran}", ran=ran)
        if isinstance(kind, Normaliser):
            return _("proven by the loss graph: the loss is divided by {count}; {ran}", count=kind.words(), ran=ran)
        if isinstance(kind, EveryLabel):
            return _(
                "proven by the loss graph: means over samples and over labels, which are the same where every label "
                "counts; {ran}",
                ran=ran,
            )
        return _("proven by the loss graph: a {kind} over the samples; {ran}", kind=kind, ran=ran)

    # --- where nothing is run --------------------------------------------------------------------------------------

    def _not_run(self, reason: str) -> Proof | Disproof:
        if self._recipe.sharding is not None:
            return Disproof(self._parts()[0][0], reason)
        if self._recipe.optimizer_in_backward or self._recipe.chunked_head:  # nothing but a run shows what reads them
            return Disproof("optimizer_in_backward" if self._recipe.optimizer_in_backward else "chunked_loss", reason)
        part = self._by_parts(reason)
        if not self._splits or isinstance(part, Disproof):
            return part
        beside = tuple(one for one in (part.words, *part.notes) if one)
        if self._said is not None:
            return Proof(_("micro-batches as you said (loss_weight)"), notes=beside)
        return Proof(self._form(reason), self._weight, (*beside, *self._not_compared()))

    def _draws(self) -> bool:
        try:
            with self._captured.symbolic_run():
                return self._graph.draws(self._plan.batch_size)
        except Exception:  # noqa: BLE001 - the user's own code runs in it; then it is not known
            return True

    def _not_compared(self) -> tuple[str, ...]:
        """Remarks on what a symbolic run hears of and cannot compare."""
        size = self._plan.batch_size
        with self._captured.symbolic_run():
            logged, random = self._graph.unknown_logs(size), self._graph.draws(size)
        remarks = [other_draws()] if random else []
        if logged:
            remarks.append(_("not compared this way: the logged values {names}", names=", ".join(logged)))
        return (*remarks, _("not compared this way: what the step does outside of the model"))

    def _by_parts(self, reason: str) -> Proof | Disproof:
        """What does not depend on how the batch is cut: the optimizer on the host, over small weights."""
        optimizer = self._small_steps(AS_WRITTEN.with_(optimizer_on_host=self._recipe.optimizer_on_host))
        if optimizer is None:
            # Recomputations are compared while training; what autograd saves comes back from the host as it was.
            return Proof("")
        if optimizer.refutation:
            return Disproof("offload_optimizer", optimizer.refutation)
        return Proof(_("no whole step was run ({reason})", reason=reason), notes=(optimizer.words(),))


def _compared(one: Rehearsed, other: Rehearsed, *, double: bool, cut: tuple[int, int]) -> tuple[Difference, ...]:
    tolerance = TOLERANCES[torch.float64 if double else torch.float32]
    return differences(one.observed, other.observed, tolerance=tolerance, cut=cut, read=one.read)


def _in_words(found: tuple[Difference, ...], samples: int) -> str:
    worst = found[0]
    if not worst.name:  # it did not run
        return _("one step of {count} samples fails under the plan: {problem}", count=samples, problem=worst.other)
    said = _("run on {count} samples, {difference}", count=samples, difference=worst.words())
    more = len(found) - 1
    return said + (_(" ({more} more differences)", more=more) if more else "")
