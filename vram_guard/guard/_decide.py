"""One decision for all processes of a training: what is predicted, what is changed, and what may not be."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from vram_guard.apply.microbatch import probe_layout, splitter_of
from vram_guard.apply.normalisers import EveryLabel, Normaliser
from vram_guard.budget import Budget
from vram_guard.errors import DeviceQueryError, NoDeviceError, UnsupportedStepError, UnsupportedTechniqueError
from vram_guard.forks.fork import ForkRefusedError, Progress, run_in_fork
from vram_guard.guard import settling
from vram_guard.guard.collectives import collectives_of, left_out, repeated_in_parts
from vram_guard.guard.decision import Decision
from vram_guard.guard.expandable import why_not_expandable
from vram_guard.guard.ranks import Outcome, attempt, from_rank_zero, gather
from vram_guard.guard.refusals import Refusal, check_pins, splitting_notes, undone_later, unproven_later
from vram_guard.language import _
from vram_guard.limits import COPY_SECONDS, IDLE_SECONDS
from vram_guard.longest.choice import choose, peak_of
from vram_guard.plan import Pins, deep_source, import_planning
from vram_guard.proof.bodies import find_body
from vram_guard.proof.loss_graph import LossGraph
from vram_guard.proof.prove import Disproof, Proof, prove
from vram_guard.proof.reduction import reduction
from vram_guard.simulate import DEFAULT_CAPABILITY
from vram_guard.watch.corrections import Corrections, subject

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import torch

    from vram_guard.guard.settings import GuardSettings, PlanSettings
    from vram_guard.guard.training import CapturedTraining, Training
    from vram_guard.plan import Plan
    from vram_guard.plan.source import Source
    from vram_guard.watch.memory import MemoryReader

T = TypeVar("T")


def decide(training: Training, settings: GuardSettings, reader: MemoryReader | None) -> Outcome[Decision]:
    """The decision, the same on every rank.

    It is planned for the rank with the least memory, by rank 0.

    Args:
        training: to decide for, on every rank at the same point.
        settings: of the guard.
        reader: of the memory of the device that trains; None where PyTorch counts none.
    """
    ranks = training.ranks
    # Asked here, as a copy of this process could not ask CUDA, and first, as ranks that exchange values reserve memory.
    fixed_segments = why_not_expandable(training.device)
    budgets = least_budget(training, settings)
    if budgets.value is None:
        return Outcome(None, budgets.failure, budgets.error)
    least = budgets.value
    gpu = None if reader is None else reader.name()

    def work(progress: Progress) -> Decision:
        return decide_alone(training.capture(), settings, least, gpu, progress, fixed_segments)

    outcome = found_by_rank_zero(training, work, training.capture)
    if outcome.value is None:
        return Outcome(None, outcome.failure, outcome.error)
    own, said = outcome.value
    if own is not None and said:
        own = replace(own, notes=(*own.notes, said))
    if ranks.world_size == 1:
        return Outcome(own, None)
    # Timelines do not travel: rank 0 keeps them to draw.
    shared = from_rank_zero(ranks, own and replace(own, plan=replace(own.plan, timeline=None, timeline_before=None)))
    is_proven = settings.mode == "fit" and settings.said_loss_weight is None
    if is_proven and shared is not None and shared.plan.splits > 1:
        proven = attempt(ranks, lambda: _prove_own_loss(training, shared), 2 * COPY_SECONDS + IDLE_SECONDS)
        if proven.failure is not None:
            return Outcome(None, proven.failure, proven.error)
    return Outcome(own if ranks.rank == 0 else shared, None)


def _prove_own_loss(training: Training, found: Decision) -> None:
    """Look whether the loss of this rank, too, is what micro-batches are proven for: a step may ask for its rank.

    Raises:
        UnsupportedStepError: it is not.
    """

    def weight() -> tuple[object, str]:
        captured = training.capture()
        graph = LossGraph(captured.step, captured.loaded, captured.effects, read=captured.read_afterwards)
        return reduction(replace(captured, step=graph.step), found.plan, graph)

    if training.ranks.rank == 0:
        return
    try:
        own, why = run_in_fork(lambda _progress: weight())
    except ForkRefusedError:
        own, why = weight()
    if own != found.loss_weight:
        why = why or _("it is a {own} over the samples, and that of rank 0 a {other}", own=own, other=found.loss_weight)
        raise UnsupportedStepError(_("micro-batches are not proven for the loss of this rank: {why}", why=why))


def least_budget(training: Training, settings: PlanSettings) -> Outcome[Budget]:
    """The budget of the rank with the least memory, on every rank."""
    ranks = training.ranks
    own = attempt(ranks, lambda: budget_of(training.device, settings))
    if own.value is None:
        return own
    return Outcome(min(gather(ranks, own.value), key=lambda budget: budget.usable), None)


def found_by_rank_zero(
    training: Training, look: Callable[[Progress], T], read: Callable[[], object]
) -> Outcome[tuple[T | None, str]]:
    """What rank 0 finds in a copy of its process, so that nothing of the training is touched; None on other ranks.

    These only read the training, which fails on some where their files are others. Where rank 0 cannot be copied, all
    ranks look at the training in their own processes at the same time: what is drawn there is drawn on all of them.

    Args:
        training: on every rank at the same point.
        look: finds it.
        read: reads the training.

    Returns:
        What was found, and a note that says why there was no copy; "" where there was one.
    """
    ranks = training.ranks
    import_planning()

    def work(progress: Progress) -> T | None:
        if ranks.rank == 0:
            return look(progress)
        read()
        return None

    def in_copy() -> tuple[T | None, str]:
        with training.progress() as progress:
            try:
                return run_in_fork(work, progress), ""
            except ForkRefusedError as error:
                return None, str(error)

    def here() -> tuple[T | None, str]:
        with training.progress() as progress:
            return look(progress), said

    outcome = attempt(ranks, in_copy, 2 * COPY_SECONDS + IDLE_SECONDS)
    if outcome.value is None:
        return outcome
    why = from_rank_zero(ranks, outcome.value[1])
    if not why:
        return outcome
    said = _(
        "the training was looked at in its own process ({why}): the model and the generators of torch, NumPy "
        "and Python are as before, but what data sets, samplers and helper objects drew or counted is not put "
        "back",
        why=why,
    )
    return attempt(ranks, here)


def budget_of(device: torch.device, settings: PlanSettings) -> Budget:
    """The budget of this rank's device, with what is known of the device where an amount was given.

    Raises:
        NoDeviceError: there is no GPU here and neither a budget nor a GPU's name was given.
    """
    on_gpu = device.type == "cuda"
    budget = settings.resolved_budget(device if on_gpu else None)
    if on_gpu and budget.compute_capability is None:  # a copy of this process could not ask CUDA
        with contextlib.suppress(NoDeviceError, DeviceQueryError):
            found = Budget.resolve(device=device)
            budget = replace(
                budget,
                compute_capability=found.compute_capability,
                multiprocessors=found.multiprocessors,
                placement=found.placement,
            )
    return budget


def decide_alone(
    captured: CapturedTraining,
    settings: GuardSettings,
    budget: Budget,
    gpu: str | None,
    progress: Progress,
    fixed_segments: str = "",
) -> Decision:
    """The decision of one rank.

    Args:
        captured: the training.
        settings: of the guard.
        budget: to fit into.
        gpu: name of the device that trains; None where PyTorch counts no memory on it.
        progress: called with a line of text before each slow part.
        fixed_segments: the reason why the allocator's segments may not grow; "" where they may.

    Raises:
        UnsupportedStepError: the step cannot be predicted, or a pin asks for what cannot be done here.
    """
    captured = longest_batch_of(captured, settings, budget, progress)
    step, size, make = captured.step, captured.sample.batch_size, captured.sample.make
    graph = LossGraph(step, captured.loaded, captured.effects, read=captured.read_afterwards)
    captured = replace(captured, step=graph.step)
    about = None if gpu is None else subject(captured.model, step.precision, gpu)
    known = Corrections().factor(about) if settings.remember and about is not None else 1.0
    smaller = _("whether it computes the same in smaller batches is not known: make those of its loader smaller")
    refusals = (
        Refusal("accumulate", why_not_split(make)),
        Refusal("evaluation", smaller),
        Refusal("expandable_segments", fixed_segments),
        *captured.refusals(settings),
    )
    refused = {technique: reason for technique, reason in refusals if reason}
    try:
        plan, proof = _Captured(captured, settings, budget, known, graph, progress).settled(refused)
    except Exception as error:
        if captured.step.job is None:
            raise
        captured = _without_job(captured, error)
        plan, proof = _Captured(captured, settings, budget, known, graph, progress).settled(refused)
    asked_for = settings.asked_for | ({"grow"} if settings.grow else set())
    notes = [*captured.notes, *(Refusal(*one).words() for one in sorted(refused.items()) if one[0] in asked_for)]
    notes += [one for one in (proof.words, *proof.notes) if one]
    splitter = spare = None
    if "accumulate" not in refused:
        spare = splitter_of(make, plan.batch_size, plan.micro_batch_size)
    if plan.splits > 1:
        splitter = spare
        notes += splitting_notes(captured.model, settings.said_loss_weight or "sum", make, size)
    weight, unproven = proof.loss_weight, ""
    if splitter is None and spare is not None and settings.may_recover and settings.said_loss_weight is None:
        weight, unproven = reduction(captured, plan, graph)
    return Decision(
        plan,
        tuple(dict.fromkeys(notes)),
        splitter,
        spare,
        about,
        refused,
        loss_weight=weight,
        unproven=unproven,
    )


def longest_batch_of(
    captured: CapturedTraining, settings: PlanSettings, budget: Budget, progress: Progress
) -> CapturedTraining:
    """The training with the longest batch that its loader makes."""
    layout, peak = captured.step.layout, peak_of(captured.step, budget.compute_capability or DEFAULT_CAPABILITY)

    def in_symbolic_run(size: int) -> object:
        with captured.symbolic_run():
            return peak(size)

    chosen = choose(
        captured.sample,
        settings.planned_batch,
        ranks=1 if layout is None else layout.data_ranks,
        peak=in_symbolic_run,
        progress=progress,
    )
    notes = [one for one in captured.notes if one not in captured.sample.notes]
    return replace(captured, sample=chosen, notes=(*chosen.notes, *notes))


def _without_job(captured: CapturedTraining, error: Exception) -> CapturedTraining:
    """The training's first steps alone, where the rest of it cannot be followed, and a note that says so."""
    why = f"{type(error).__name__}: {error}"
    said = _("what the training does besides its first steps is not included in the prediction ({error})", error=why)
    return replace(captured, step=captured.step.with_(job=None), notes=(*captured.notes, said))


@dataclass
class _Captured:
    """A captured training, as it is decided for (:class:`~vram_guard.guard.settling.PlannedTraining`)."""

    captured: CapturedTraining
    settings: GuardSettings
    budget: Budget
    correction: float
    graph: LossGraph
    progress: Progress
    source: Source | None = None
    """Of the step, whose timelines all of its plans share."""

    def settled(self, refused: dict[str, str]) -> tuple[Plan, Proof]:
        """The plan that is taken, and its proof; techniques that are not possible are refused on the way."""
        try:
            return settling.settled(self, refused)
        finally:
            if self.source is not None:
                self.source.forget()

    def objections(self, plan: Plan) -> Iterable[Refusal | None]:
        return (
            self.captured.objection(plan),
            repeated_in_parts(collectives_of(plan.timeline_before)),
            undone_later(plan),
            unproven_later(plan) if self.settings.said_loss_weight is None else None,
        )

    def finds_body(self, refused: dict[str, str]) -> bool:
        captured = self.captured
        if captured.step.body is not None or "slices" not in self.settings.techniques or not captured.step.optimizer:
            return False
        try:
            with captured.symbolic_run():
                body = find_body(captured.step, captured.sample.batch_size, captured.effects.companions)
        except Exception as error:  # noqa: BLE001 - the user's own code runs in it
            known = isinstance(error, UnsupportedTechniqueError)
            refused["slices"] = str(error) if known else f"{type(error).__name__}: {error}"
            return False
        self.captured = replace(captured, step=captured.step.with_(body=body))
        self.source = None if self.source is None else replace(self.source, body=body)
        return True

    def prove(self, plan: Plan, refused: dict[str, str]) -> Proof | Disproof:
        if self.settings.mode != "fit":
            return Proof("")
        self.progress(_("proving that the plan leaves what is learned as it was"))
        proof = prove(self.captured, plan, self.graph, self.settings.said_loss_weight)
        divided = self.captured.step.parallel is not None or plan.recipe.sharding is not None
        counted = isinstance(proof, Proof) and isinstance(proof.loss_weight, Normaliser | EveryLabel)
        if divided and counted and plan.splits > 1:
            refused["accumulate"] = left_out()  # nothing is to be proposed to the user
            return Disproof("accumulate", left_out())
        return proof

    def plan(self, refused: Mapping[str, str]) -> Plan:
        captured, settings = self.captured, self.settings
        step, size = captured.step, captured.sample.batch_size
        check_pins(settings.pins, refused, precision=step.precision, batch_size=size)
        with captured.symbolic_run():
            if self.source is None:
                made = deep_source(step, self.budget, settings.blocks, Pins.of(settings.pins))
                self.source = replace(made, explored={})
            return settling.planned(
                self.source,
                size,
                self.budget,
                settings,
                refused=refused,
                blocks=settings.blocks,
                dataset_size=captured.epoch_samples,
                correction=self.correction,
                cudnn=settings.cudnn,
                pin=settings.pins,
                progress=self.progress,
            )


def why_not_split(make: Callable[[int], Any]) -> str:
    """The reason why the batches of a loader cannot be cut into micro-batches ("" where they can).

    Args:
        make: batch size -> a batch of the loader.
    """
    try:
        probe_layout(make)
    except UnsupportedStepError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - the user's own code makes the batches
        return _("the loader cannot make batches of other sizes ({error})", error=f"{type(error).__name__}: {error}")
    return ""
