"""VramGuardHook: the guard as one of MMEngine's hooks."""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import FlexibleRunner, Runner

from vram_guard.capture import ranks
from vram_guard.errors import DoesNotFitError
from vram_guard.language import _
from vram_guard.settings import disabled, filled
from vram_guard.watch.first_steps import FirstSteps
from vram_guard.watch.measured import STEPS
from vram_guard.watch.recovery import MicroBatchSchedule
from vram_guard_mmengine import apply, rates, recovery, split_step
from vram_guard_mmengine.checkpoints import resumable
from vram_guard_mmengine.decide import Decision, decide, reader_here
from vram_guard_mmengine.processes import Processes
from vram_guard_mmengine.settings import Settings, checked_priority
from vram_guard_mmengine.summary import CONFIG_KEY, META_KEY, summary

if TYPE_CHECKING:
    from vram_guard.capture.ranks import Failure, Outcome
    from vram_guard.plan import Plan


# ruff: noqa: ARG002, G003, G004 - MMEngine decides what hooks are given; what is logged here is logged once


@HOOKS.register_module()
class VramGuardHook(Hook):  # type: ignore[misc]
    """Says what a training step will take on the GPU before anything is built, and makes it fit.

    At the start of ``Runner.train``, before loops, optimizer and schedules are built, it runs the model's own
    ``train_step`` symbolically on the CPU and logs the prediction. Then, by ``mode``:

    - ``"fit"``: where the step does not fit, the least change that makes it fit is applied. Iterations, intervals,
      ``max_iters``, schedules and the effective batch stay as they are. Where nothing that is allowed makes it fit, or
      the training cannot be predicted, a warning says so and the training is left unchanged.
    - ``"report"``: nothing is changed and nothing raised.
    - ``"strict"``: nothing is changed; a step that does not fit as written, or cannot be predicted, raises.

    Args:
        budget: what PyTorch's allocator may reserve: "24GiB", or bytes.
        gpu: a whole card by name ("RTX 4090"). With neither, what is free on this process's device.
        margin: the share of the budget to leave free, in [0, 1); None: the default.
        allow: what may be changed, see :data:`vram_guard.plan.techniques.TECHNIQUES`; None: the default.
        pin: parts of the plan that are fixed, such as ``dict(precision="16-mixed")``, see
            :class:`vram_guard.plan.Pins`.
        blocks: names of the modules that may be checkpointed or offloaded; None: repeated modules are found.
        host_budget: host memory that techniques may take; None: what is free.
        mode: see above.
        grow: where the step fits, enlarge the batch up to ``target_utilization``, and scale learning rates by
            ``lr_rule``.
        target_utilization: the share of the memory that growth may fill, in (0, 1].
        lr_rule: "linear", "sqrt" or "none".
        loss_weight: what the loss is over the samples of a batch: "mean", "sum", or a function ``batch -> count``.
        recover: go on after a real out-of-memory error: the broken batch is taken back and runs again in smaller
            micro-batches. Off by default, for remembering what a batch may change costs one or two milliseconds an
            iteration. Under DDP gradients are then averaged after backward, not during it.
        max_recoveries: how many such errors a training is taken through before it stops.
        remember: keep how measured memory compares with the prediction, for this model on this GPU, and raise later
            predictions by it.
        priority: the hook's position among the others.

    Keys of the config's own ``vram_guard = dict(...)`` count where the hook is given none of that name.

    Attributes:
        plan: the plan, on every rank; None before, and where there is none.

    Raises:
        InvalidInputError: an unknown setting, or one that makes no sense.
    """

    def __init__(self, **settings: Any) -> None:
        self._given = settings
        self.settings = Settings.of(settings)
        self._priority = self.settings.priority
        self.plan: Plan | None = None
        self.active = False
        """Inside :meth:`guarding`."""
        self._decision: Decision | None = None
        self._acts = False
        self._contained = 1.0
        """What the learning rates contain of a factor for a larger batch."""
        self._applied = apply.Applied()
        self._watch: FirstSteps | None = None
        self._iterations = 0
        guard_class(Runner)
        guard_class(FlexibleRunner)

    @property
    def priority(self) -> str | int:
        """The hook's position among the others."""
        return self._priority

    @priority.setter
    def priority(self, value: str | int) -> None:
        self._priority = checked_priority(value)

    # --- around the training --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def guarding(self, runner: Any) -> Iterator[None]:
        """Around ``train``: decided and applied before anything is built, and taken away at the end."""
        if disabled():
            yield
            return
        self.active = True
        try:
            with resumable():
                self._before_building(runner)
                yield
        finally:
            self._applied.undo()
            self.active = False

    def _before_building(self, runner: Any) -> None:
        given = {**(runner.cfg.get("vram_guard") or {}), **self._given}
        self.settings = Settings.of(filled(given, Settings.names()))
        self.plan, self._decision, self._acts, self._watch, self._iterations = None, None, False, None, 0
        outcome = decide(runner, self.settings)
        if outcome.value is None:
            self._no_decision(runner, outcome)
            return
        decision = self._decision = outcome.value
        plan = self.plan = decision.plan
        self._acts = self.settings.mode == "fit" and plan.fits and plan.changed
        grown = plan.batch_size / plan.batch_size_before if self._acts else 1.0
        self._contained = grown if rates.auto_scaled(runner) else 1.0
        self._watch = FirstSteps.begin(
            reader_here(),
            runner.model,
            decision.precision,
            plan.estimate if self._acts else plan.before,
            remember=self.settings.remember,
        )
        if self._acts:
            self._applied = apply.before_building(runner, plan)
            decision = decision.with_notes(*self._applied.notes)
        _report(runner, decision, applied=self._acts)
        runner.cfg[CONFIG_KEY] = summary(plan, applied=self._acts)
        runner.dump_config()
        self._verdict(runner, plan)

    def _verdict(self, runner: Any, plan: Plan) -> None:
        """Raise or warn, where the training does not fit."""
        as_written_fits = plan.fits and (not plan.changed or plan.batch_size > plan.batch_size_before)
        if self.settings.mode == "strict" and not as_written_fits:
            raise DoesNotFitError(_("the training does not fit as written.") + f"\n{plan.explain()}")
        if self.settings.mode == "fit" and not plan.fits:
            words = " ".join([_("this training is not known to fit."), *plan.reasons])
            runner.logger.warning(f"vram_guard: {words}")

    def _no_decision(self, runner: Any, outcome: Outcome[Decision]) -> None:
        """No prediction: raise in strict mode, or where settings or the user's own code are wrong; else warn."""
        failure: Failure = outcome.failure  # type: ignore[assignment]
        if self.settings.mode == "strict" or (self.settings.mode == "fit" and not failure.unsupported):
            outcome.unwrap()
        trace = (
            ""
            if failure.unsupported or outcome.error is None
            else "\n" + "".join(traceback.format_exception(outcome.error))
        )
        said = _("no prediction for this training, which is left unchanged: {why}", why=failure.message)
        runner.logger.warning(f"vram_guard: {said}{trace}")

    # --- MMEngine's hooks -----------------------------------------------------------------------------------

    def before_train(self, runner: Any) -> None:
        """Everything is built and loaded: micro-batches, blocks, learning rates, and the prediction in the logs."""
        if self._decision is None or self.plan is None or not self.active:
            return
        if self._acts:
            apply.before_training(runner, self._decision, self._applied)
        self._arm(runner, self._decision)
        self._scale_learning_rates(runner)
        # MMEngine logs `memory`, the peak that torch counted, in MiB: this stands beside it, in text and JSON.
        predicted = self.plan.estimate if self._acts else self.plan.before
        runner.message_hub.update_scalar("train/predicted_memory", predicted.peak_allocated // 2**20, resumed=False)
        runner.message_hub.update_info(CONFIG_KEY, summary(self.plan, applied=self._acts), resumed=False)

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Say once, after the first optimizer steps, what was measured beside what was predicted."""
        watch = self._watch
        if watch is None or watch.done or not self.active or self.plan is None:
            return
        self._iterations += 1
        if self._iterations < STEPS * max(1, self.plan.accumulate // self.plan.splits):
            return
        processes = Processes()
        found = watch.finish(lambda own: ranks.gather(processes, own), first_rank=processes.rank == 0)
        if found is not None:
            runner.logger.info(f"vram_guard: {found.words()}")
            for name, value in found.metrics().items():
                runner.message_hub.update_info(f"vram_guard/{name}", value)

    def before_save_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        """Keep the plan, and the factor that the saved learning rates contain."""
        if self.plan is not None and self.active:
            kept = summary(self.plan, applied=self._acts)
            checkpoint["meta"][META_KEY] = {**kept, "learning_rates_contain": float(self._contained)}

    def after_load_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        """Remember what the learning rates that are about to be restored were multiplied by."""
        resumes = bool(getattr(runner, "_resume", False)) and "optimizer" in checkpoint
        if resumes and self.active:
            state = checkpoint.get("meta", {}).get(META_KEY) or {}
            self._contained = float(state.get("learning_rates_contain", 1.0))

    def _arm(self, runner: Any, decision: Decision) -> None:
        """Micro-batches as planned, and, where it is asked for, recovery from running out of memory."""
        splitter, plan = (decision.splitter if self._acts else None), decision.plan
        if self._watch is not None:
            self._watch.start()
        if decision.spare is None:
            if splitter is not None:
                self._applied.on_undo(split_step.install(runner.model, splitter, self.settings.loss_weight))
            return
        batch = plan.batch_size if self._acts else plan.batch_size_before
        undo = recovery.arm(
            runner,
            decision.spare,
            MicroBatchSchedule(None if splitter is None else splitter.micro_batch_size, batch),
            self.settings.loss_weight,
            most=self.settings.max_recoveries,
            prediction_text=lambda: f"What was predicted:\n{plan.explain()}",
            on_failure=lambda _failure: None if self._watch is None else self._watch.out_of_memory(),
        )
        self._applied.on_undo(undo)

    def _scale_learning_rates(self, runner: Any) -> None:
        """From what the rates contain to what this run's are to be; a second call does nothing."""
        wanted = self._wanted_factor(runner)
        if wanted != self._contained:
            for left_out in rates.scale(runner, wanted / self._contained):
                said = _("learning rate not scaled: {why}", why=left_out)
                runner.logger.warning(f"vram_guard: {said}")
            self._contained = wanted

    def _wanted_factor(self, runner: Any) -> float:
        if self.plan is None or not self._acts:
            return 1.0
        if rates.auto_scaled(runner):
            return self.plan.batch_size / self.plan.batch_size_before  # auto_scale_lr's own rule
        return float(self.plan.learning_rate_factor)


def first_hook(runner: Any) -> VramGuardHook | None:
    """Of several guards in one runner, the first one works and the others rest."""
    return next((hook for hook in runner.hooks if isinstance(hook, VramGuardHook)), None)


def guard_class(kind: Any) -> None:
    """From now on, ``kind.train`` asks the runner's own guard first; runners without one train as before.

    MMEngine calls hooks only when everything is built. That is too late to change a batch size or the precision.
    """
    as_written = kind.train
    if getattr(as_written, "asks_the_guard", False):
        return

    @functools.wraps(as_written)
    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        hook = first_hook(self)
        if hook is None or hook.active:
            return as_written(self, *args, **kwargs)
        with hook.guarding(self):
            return as_written(self, *args, **kwargs)

    train.asks_the_guard = True  # type: ignore[attr-defined]
    kind.train = train


def _report(runner: Any, decision: Decision, *, applied: bool) -> None:
    from vram_guard.report.text import render

    lines = [render(decision.plan, unicode=False).rstrip()]
    if decision.plan.changed:
        lines.append(_("vram_guard: this plan is applied.") if applied else _("vram_guard: this plan is not applied."))
    lines += [f"  - {note}" for note in decision.notes]
    runner.logger.info("vram_guard\n" + "\n".join(lines))
