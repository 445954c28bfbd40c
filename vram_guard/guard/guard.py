"""The guard of one training: it decides, applies, judges, and follows what was applied while it trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from vram_guard.apply.loss_weight import bound_to
from vram_guard.apply.saved_rates import still_multiplied
from vram_guard.errors import RecoveryFailedError
from vram_guard.guard._decide import decide
from vram_guard.guard._verdict import judge, judge_failure
from vram_guard.guard.applied import Applied
from vram_guard.guard.expandable import expand_segments
from vram_guard.guard.ranks import gather
from vram_guard.language import _
from vram_guard.limits import FIRST_STEPS
from vram_guard.report.html import html_report, where_to_read_on
from vram_guard.report.text import render
from vram_guard.techniques.loss_graphs import LossGraphs
from vram_guard.units import format_bytes
from vram_guard.watch.batches import MicroBatches
from vram_guard.watch.first_steps import FirstSteps, Measured
from vram_guard.watch.memory import reader_for
from vram_guard.watch.oom import is_out_of_memory
from vram_guard.watch.recovery import MicroBatchSchedule, Recovery, plan_to_use
from vram_guard.watch.running import Running, running_here

if TYPE_CHECKING:
    from torch import nn

    from vram_guard.apply.loss_weight import LossWeight
    from vram_guard.guard.decision import Decision
    from vram_guard.guard.settings import GuardSettings
    from vram_guard.guard.training import Training
    from vram_guard.plan import Plan


class Guard:
    """One training under guard, whatever its framework.

    Attributes:
        training: as its adapter gives it.
        settings: of this guard.
        applied: what was changed; :meth:`Applied.close` takes it back.
        decision: None before :meth:`begin`, and where there is no prediction.
        first_steps: the measurement; None where nothing can be measured.
        running: what `vram-guard monitor` is told; None before the training starts.
        no_recovery: why the training is not taken through out-of-memory errors; "" where it is.
        rates_contain: the factor for a larger batch that the learning rates already contain: a checkpoint's, or the
            framework's own; see :meth:`restored`.
    """

    def __init__(self, training: Training, settings: GuardSettings) -> None:
        self.training = training
        self.settings = settings
        self.applied = Applied()
        self.decision: Decision | None = None
        self.first_steps: FirstSteps | None = None
        self.running: Running | None = None
        self.no_recovery = _("it has not begun")
        self.rates_contain = 1.0
        self._graphs: LossGraphs | None = None
        self._left_alone = training.why_left_alone() if settings.mode == "fit" else ""

    @property
    def loss_weight(self) -> LossWeight:
        """How losses of micro-batches are weighed, by what the model holds when they are."""
        found = None if self.decision is None else self.decision.loss_weight
        return bound_to(self.training.model, found or self.settings.said_loss_weight or "mean")

    @property
    def graphs(self) -> LossGraphs | None:
        """Those of the training's losses; None where the user has said what the loss is over the samples."""
        if self.settings.said_loss_weight is not None:
            return None
        model = self.training.model
        if self._graphs is None or self._graphs.model is not model:  # a config, until the framework has built it
            self._graphs = LossGraphs(model)
        return self._graphs

    @property
    def may_change(self) -> bool:
        """True if a plan may be applied."""
        return self.settings.mode == "fit" and not self._left_alone

    @property
    def plan(self) -> Plan | None:
        """The plan; None where there is no prediction."""
        return None if self.decision is None else self.decision.plan

    @property
    def changes(self) -> bool:
        """True if the training runs under a plan that is not as written."""
        return self.may_change and self.plan is not None and self.plan.fits and self.plan.changed

    @property
    def grown(self) -> bool:
        """True if the training runs with a larger batch."""
        plan = self.plan
        return self.changes and plan is not None and plan.batch_size != plan.batch_size_before

    def begin(self) -> None:
        """Decide, apply, report and judge; on every rank, once the model is complete and before it is placed.

        Raises:
            DoesNotFitError: in mode "strict".
            Exception: there is no prediction, and the mode does not let that pass.
        """
        training, settings = self.training, self.settings
        reader = reader_for(training.device)
        outcome = decide(training, settings, reader)
        if outcome.value is None:
            self.no_recovery = self._why_not_recovered()
            training.warn(judge_failure(outcome, settings.mode, verbose=settings.verbose))
            return
        decision = self.decision = outcome.value
        plan = decision.plan
        self.no_recovery = self._why_not_recovered()
        # With a changed training, another step runs than the predicted one.
        if reader is not None and decision.about is not None and not self._left_alone:
            estimate = plan.estimate if self.changes else plan.before
            self.first_steps = FirstSteps(reader, decision.about, estimate, remember=settings.remember)
        if self.changes and plan.recipe.expandable_segments:
            expand_segments(self.applied)
        if self.changes:
            training.apply(decision, self.loss_weight, self.graphs, self.applied)
        lines = self._report_lines(decision)
        if training.ranks.rank == 0 and not settings.verbose:
            lines.append(where_to_read_on(html_report(plan), "verbose=True"))
        training.report(plan, lines, applied=self.changes, verbose=settings.verbose)
        warning = judge(plan, settings.mode)
        if warning:
            training.warn(warning)

    def _report_lines(self, decision: Decision) -> list[str]:
        """The lines that follow the prediction."""
        notes = [*decision.notes, *([self._left_alone] if self._left_alone else ()), *self.applied.notes]
        if self.may_change and self.settings.recover and self.no_recovery:
            why = self.no_recovery
            notes.append(_("a real out-of-memory error would not be recovered from: {why}", why=why))
        lines = [f"  - {note}" for note in notes]
        if decision.plan.changed:
            applied = (
                _("vram_guard: this plan is applied.") if self.changes else _("vram_guard: this plan is not applied.")
            )
            return [applied, *lines]
        return [_("vram_guard: notes"), *lines] if lines else []

    def _why_not_recovered(self) -> str:
        if not self.may_change or not self.settings.recover:
            return _("it is switched off")
        if "accumulate" not in self.settings.techniques:
            return _("smaller micro-batches are not allowed")
        if self.training.ranks.world_size > 1:
            return _("the other processes would wait for one that repeats a batch")
        if self.settings.said_loss_weight is None and self.decision is None:
            return _("how the losses of micro-batches are to be weighted is not known; pass loss_weight")
        if self.decision is not None and self.decision.unproven:
            return _(
                "the loss is not known to be a mean or a sum over the samples ({why}); pass loss_weight",
                why=self.decision.unproven,
            )
        plan = self.plan
        if plan is not None and plan.fits and (plan.recipe.parameters_on_host or plan.recipe.optimizer_on_host):
            return _("weights or optimizer state on the host are changed while backward and the step still run")
        if plan is not None and plan.fits and plan.recipe.optimizer_in_backward:
            return _("weights have stepped already where memory runs out in the backward pass")
        return self.training.why_not_recovered({} if self.decision is None else self.decision.refused)

    def recover(
        self,
        put: Callable[[MicroBatches], Callable[[], None]],
        model: nn.Module,
        why_whole: Callable[[], str],
        *frameworks: str,
    ) -> None:
        """Have batches repeated in smaller parts where memory runs out, on this one rank.

        Args:
            put: has the framework train on its batches through these; returns the function that undoes it.
            model: as it trains.
            why_whole: see :class:`~vram_guard.watch.batches.MicroBatches`.
            *frameworks: packages whose objects a model holds without their being its state.
        """
        decision, plan, training = self.decision, self.plan, self.training
        recovery = Recovery(
            model,
            memory=reader_for(training.device),
            log=training.warn,
            prediction_text=self.prediction,
            on_failure=self.out_of_memory,
            frameworks=frameworks,
        )
        splitter = decision.splitter if decision is not None and self.changes else None
        full = None if plan is None else plan.batch_size if self.changes else plan.batch_size_before
        batches = MicroBatches(
            None if decision is None else decision.spare,
            self.loss_weight,
            graphs=self.graphs,
            recovery=recovery,
            schedule=MicroBatchSchedule(None if splitter is None else splitter.micro_batch_size, full),
            why_whole=why_whole,
        )
        self.applied.callback(put(batches))

    @contextmanager
    def stopping(self) -> Iterator[None]:
        """Around the training: an out-of-memory error that is not recovered from ends it with the plan to use.

        Raises:
            RecoveryFailedError: from the error, where recovery is wanted.
        """
        try:
            yield
        except Exception as error:
            if not (self.may_change and self.settings.recover and is_out_of_memory(error)):
                raise
            self.out_of_memory()
            raise RecoveryFailedError(self._stopped()) from error

    def _stopped(self) -> str:
        """The message of an out-of-memory error that was not recovered from."""
        decision, smaller = self.decision, 0
        if decision is not None and decision.spare is not None:
            size = decision.plan.batch_size
            smaller = MicroBatchSchedule(decision.spare.micro_batch_size, size).below(size)
        outside = _("it was raised outside a batch's forward and backward pass (in the optimizer step, or in a hook)")
        said = _(
            "out of memory, and no batch is repeated: {why}. Where the optimizer step raised it, the weights may be "
            "half-updated: go on from the last checkpoint. {plan}",
            why=self.no_recovery or outside,
            plan=plan_to_use(smaller),
        )
        return "\n".join(filter(None, [said, self.prediction()]))

    def prediction(self) -> str:
        """The last part of the message of an out-of-memory error."""
        return "" if self.plan is None else _("What was predicted:") + f"\n{render(self.plan, verbose=False)}"

    def training_starts(self) -> None:
        """Everything is built, and the first step comes next: say if memory is gone that the plan reckoned with."""
        missing = 0 if self.first_steps is None else self.first_steps.start()
        if self.first_steps is not None and self.plan is not None:
            estimate = self.plan.estimate if self.changes else self.plan.before
            self.running = running_here(estimate.peak_reserved, self.plan.budget.context)
            self.applied.callback(self.running.forget)
        if missing and self.plan is not None and self.plan.fits:
            self.training.warn(
                _(
                    "{missing} that this plan reckoned with are no longer free on the device: other processes have "
                    "taken memory since it was made, and this training may run out of it",
                    missing=format_bytes(missing),
                )
            )

    def out_of_memory(self, _failure: object = None) -> None:
        """Memory ran out on this rank."""
        if self.first_steps is not None:
            self.first_steps.out_of_memory()

    def measured(self, optimizer_steps: int) -> Measured | None:
        """Once, after the first optimizer steps, on all ranks alike: the worst rank's measurement."""
        steps, ranks = self.first_steps, self.training.ranks
        if steps is None or steps.done or optimizer_steps < FIRST_STEPS:
            return None
        return steps.finish(partial(gather, ranks), first_rank=ranks.rank == 0)

    @property
    def learning_rate_factor(self) -> float:
        """The factor that the learning rates of this run are multiplied by."""
        return self.training.learning_rate_factor(self.plan) if self.changes and self.plan is not None else 1.0

    @property
    def multiplied_by(self) -> float:
        """The factor that this guard has multiplied the rates by, which a checkpoint is to be rid of."""
        return self.rates_contain if self.settings.mode == "fit" else 1.0

    def restored(self, contained: float) -> None:
        """A checkpoint is being restored whose learning rates contain a factor for a larger batch."""
        self.rates_contain = contained
        if self.settings.mode != "fit" and contained != 1.0:
            self.training.warn(still_multiplied(contained))

    def scale_learning_rates(self) -> None:
        """From what the rates contain to what this run's are to be; a second call does nothing."""
        wanted = self.learning_rate_factor
        if self.settings.mode == "fit" and wanted != self.rates_contain:
            for left_out in self.training.scale_learning_rates(wanted / self.rates_contain):
                self.training.warn(_("learning rate not scaled: {why}", why=left_out))
            self.rates_contain = wanted
