"""VramGuard: the callback."""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from vram_guard.errors import DoesNotFitError
from vram_guard.language import _
from vram_guard.plan.checks import Mode
from vram_guard.plan.techniques import DEFAULT_ALLOW
from vram_guard.settings import disabled, filled_from_settings
from vram_guard.watch.recovery import MicroBatchSchedule
from vram_guard_lightning import growth, metrics, namespaces, recovery
from vram_guard_lightning.apply import Applied, apply
from vram_guard_lightning.decide import Decision, decide
from vram_guard_lightning.metrics import Utilization
from vram_guard_lightning.settings import Settings

# ruff: noqa: ARG002 - Lightning decides what its hooks are given

if TYPE_CHECKING:
    from lightning.pytorch import Callback as CallbackBase
    from lightning.pytorch import LightningModule, Trainer

    from vram_guard.apply.microbatch import Splitter
    from vram_guard.budget import Budget
    from vram_guard.plan import Plan
    from vram_guard.watch.first_steps import FirstSteps
    from vram_guard_lightning.ranks import Failure, Outcome
    from vram_guard_lightning.recovery import Session
else:
    CallbackBase = namespaces.callback_base()

#: Where a checkpoint keeps what has to survive it. (A callback's ``state_dict`` would do, but Lightning then
#: refuses a Trainer that was given the callback twice, which a plugin may well do.)
CHECKPOINT_KEY = "vram_guard"


class VramGuard(CallbackBase):
    """Says what a training step will take on the GPU before anything is built, and makes it fit.

    It steps in once the model is complete and before it is moved, wrapped or given an optimizer, runs the
    user's own training step symbolically on the CPU, and prints the prediction. Then, by ``mode``:

    - ``"fit"``: where the step does not fit, the cheapest change that makes it fit is applied: mixed
      precision, smaller micro-batches of the same loaded batch, activation checkpointing of as many blocks as
      needed, offload to host memory. Loaders, schedules, steps, intervals and the effective batch stay as they
      are. Where nothing that is allowed makes it fit, or the training cannot be predicted, a warning says so
      and the training is left unchanged.
    - ``"report"``: nothing is changed and nothing raised; the training is bit-identical to one without the
      guard.
    - ``"strict"``: nothing is changed; a step that does not fit as written, or cannot be predicted, raises.

    With ``fast_dev_run`` the plan is applied as in the real run, but the batch is not grown and nothing is
    logged.

    Args:
        budget: what PyTorch's allocator may reserve: "24GiB", bytes, or a ``vram_guard.Budget``.
        gpu: a whole card by name ("RTX 4090"). With neither, what is free on the Trainer's device.
        margin: the share of the budget to leave free, in [0, 1); None: the default.
        allow: what may be changed, see :data:`vram_guard.plan.techniques.TECHNIQUES`: "precision", "accumulate",
            "checkpoint", "offload" and so on.
        mode: see above.
        grow: where the step fits, enlarge the loader's batch up to ``target_utilization`` and scale the
            learning rates by ``lr_rule``.
        target_utilization: the share of the memory that growth may fill, in (0, 1].
        lr_rule: "linear", "sqrt" or "none".
        pin: parts of the plan that are fixed, see :class:`vram_guard.plan.Pins`.
        blocks: names of the modules that may be checkpointed or offloaded; None: repeated modules are found.
        host_budget: host memory that techniques may take: "64GiB" or bytes; None: what is free now.
        loss_weight: what the loss is over the samples of a batch. "mean": their mean, as torch's losses are;
            "sum": their sum; or a function ``batch -> count`` where it is the mean over something else,
            such as labels that are not ignored.
        recover: in mode "fit", go on after a real out-of-memory error: the broken batch is taken back and runs again
            in smaller micro-batches (see ``vram_guard_lightning.recovery``). Under DDP gradients are then
            averaged after backward, not during it, so that no rank waits for one that failed.
        max_recoveries: how many such errors a training is taken through before it stops.
        remember: keep how measured memory compares with the prediction, for this model on this GPU, and raise
            later predictions by it.
        monitor: seconds between two looks at the utilisation and memory of rank 0's GPU while training (through NVML);
            mean and peak are printed and logged at the end. None: it is not watched.

    What is not given comes from the environment (``VRAM_GUARD_MARGIN=0.1``) or from ``[tool.vram_guard]`` in the
    project's ``pyproject.toml``, see :mod:`vram_guard.settings`. ``VRAM_GUARD_DISABLE=1`` turns the callback off.

    Attributes:
        plan: the plan, on every rank; None before, and where there is none.

    Raises:
        InvalidInputError: a setting makes no sense.
    """

    @filled_from_settings
    def __init__(
        self,
        budget: Budget | str | int | None = None,
        gpu: str | None = None,
        margin: float | None = None,
        allow: Iterable[str] = DEFAULT_ALLOW,
        mode: Mode = "fit",
        grow: bool = False,
        target_utilization: float = 0.8,
        lr_rule: str = "linear",
        loss_weight: Literal["mean", "sum"] | Callable[[Any], Any] = "mean",
        *,
        pin: Mapping[str, Any] | None = None,
        blocks: Iterable[str] | None = None,
        host_budget: str | int | None = None,
        recover: bool = True,
        max_recoveries: int = 8,
        remember: bool = True,
        monitor: float | None = None,
    ) -> None:
        super().__init__()
        self.settings = Settings(
            budget=budget,
            gpu=gpu,
            margin=margin,
            allow=allow,
            mode=mode,
            grow=grow,
            target_utilization=target_utilization,
            lr_rule=lr_rule,
            loss_weight=loss_weight,
            pin=pin,
            blocks=blocks,
            host_budget=host_budget,
            recover=recover,
            max_recoveries=max_recoveries,
            remember=remember,
            monitor=monitor,
        )
        self.plan: Plan | None = None
        self._applied = Applied()
        self._applied_plan = Applied()
        self._logged = False
        self._session: Session | None = None
        """Recovery, while it is armed."""
        self._splitter: Splitter | None = None
        self._spare: Splitter | None = None
        self._watch: FirstSteps | None = None
        self._utilization: Utilization | None = None
        self._armed = False
        """Between setup and teardown: a callback that stands twice in a Trainer is called twice."""
        self._restored_factor = 1.0
        """What the checkpoint that was loaded had its learning rates multiplied by."""

    # --- Lightning's hooks ----------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Arrange to be called when the model is complete and its strategy is not yet set up."""
        if stage != "fit" or self is not _first_guard(trainer) or self._armed or disabled():
            return
        self.plan, self._restored_factor, self._armed = None, 1.0, True
        strategy = trainer.strategy
        lightnings_own = strategy.setup
        self._applied, self._applied_plan = Applied(), Applied()
        self._applied.on_undo(self._disarm)

        def guarded_setup(trainer: Trainer) -> None:
            may_recover = self._before_strategy_setup(trainer, pl_module)
            lightnings_own(trainer)
            self._applied_plan.finish()
            if may_recover:
                self._arm_recovery(trainer, pl_module)

        strategy.setup = guarded_setup  # type: ignore[method-assign]
        self._applied.on_undo(lambda: vars(strategy).pop("setup", None))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Scale learning rates, if the batch grew: after a checkpoint's were restored, and only once."""
        if self is not _first_guard(trainer) or not self._armed:
            return
        if self.settings.mode == "fit":
            self._scale_learning_rates(trainer)
        self._log(trainer)
        if self._watch is not None:
            self._watch.start()
        if self.settings.monitor is not None and trainer.is_global_zero and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._utilization = Utilization(trainer, self.settings.monitor)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say what the GPU did, where it was watched."""
        self._end_monitor(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Say once, after the first steps, what was measured beside what was predicted."""
        if self._utilization is not None:
            self._utilization.log(trainer)
        found = None if self._watch is None else metrics.after_batch(self._watch, trainer)
        if found is None:
            return
        if trainer.is_global_zero:
            _write(f"vram_guard: {found.words()}\n")
        for logger in trainer.loggers:
            measured = {f"vram_guard/{name}": value for name, value in found.metrics().items()}
            logger.log_metrics(measured, step=trainer.global_step)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Every rank validates with rank 0's buffers, as under DDP's wrapper."""
        if self._session is not None:
            self._session.recovery.ranks.share_buffers()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keep the factor that the saved learning rates contain."""
        if self.plan is not None and self._factor(trainer) != 1.0:
            state = {"learning_rate_factor": self._factor(trainer), "batch_size": self.plan.batch_size}
            checkpoint[CHECKPOINT_KEY] = state

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Remember what the learning rates that are about to be restored were multiplied by."""
        state = checkpoint.get(CHECKPOINT_KEY)
        if state and checkpoint.get("optimizer_states"):
            self._restored_factor = float(state["learning_rate_factor"])

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """The Trainer is given back as it came."""
        self._end_monitor(trainer)
        self._applied.undo()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """The same after an error, where Lightning calls no teardown hook."""
        self._end_monitor(trainer)
        self._applied.undo()

    # --- the guard's own way --------------------------------------------------------------------------------

    def _before_strategy_setup(self, trainer: Trainer, module: LightningModule) -> bool:
        """Decide, apply and report; whether an out-of-memory error is to be recovered from."""
        hands_off = _hands_off(trainer) if self.settings.mode == "fit" else ""
        acts = self.settings.mode == "fit" and not hands_off
        no_recovery = self._why_no_recovery(trainer, module) if acts else "-"
        outcome = decide(trainer, module, self.settings)
        if outcome.value is None:
            self._no_decision(trainer, outcome)
            return not no_recovery
        decision = outcome.value
        self.plan, self._spare = decision.plan, decision.spare
        no_recovery = no_recovery or _offloaded(decision.plan)
        if not hands_off:  # BatchSizeFinder trains at other sizes than the predicted one
            self._watch = metrics.begin(
                trainer, module, _as_trained(decision.plan, acts=acts), remember=self.settings.remember
            )
        if hands_off:
            decision = decision.with_notes(hands_off)
        if acts and decision.plan.fits and decision.plan.changed:
            applied = apply(trainer, decision, self.settings.loss_weight)
            self._applied.on_undo(applied.undo)
            self._applied_plan = applied
            self._splitter = decision.splitter
            decision = decision.with_notes(*applied.notes, *_about_learning_rates(trainer, decision))
        if acts and self.settings.recover and no_recovery:
            note = _("a real out-of-memory error would not be recovered from: {why}", why=no_recovery)
            decision = decision.with_notes(note)
        _print_report(trainer, decision, applied=acts and decision.plan.fits)
        self._verdict(trainer, decision)
        return not no_recovery

    def _end_monitor(self, trainer: Trainer) -> None:
        watched, self._utilization = self._utilization, None
        for line in () if watched is None else watched.finish(trainer):
            _write(f"vram_guard: {line}\n")

    def _why_no_recovery(self, trainer: Trainer, module: LightningModule) -> str:
        if not self.settings.recover:
            return "recover=False"
        if "accumulate" not in self.settings.allow:
            return "smaller micro-batches are not allowed"
        return recovery.why_not(trainer, module)

    def _arm_recovery(self, trainer: Trainer, module: LightningModule) -> None:
        plan = self.plan if self.plan is not None and self.plan.fits else None
        self._session = recovery.arm(
            trainer,
            module,
            splitter=self._spare,
            schedule=MicroBatchSchedule(
                None if self._splitter is None else self._splitter.micro_batch_size,
                None if plan is None else plan.batch_size,
            ),
            loss_weight=self.settings.loss_weight,
            most=self.settings.max_recoveries,
            log=lambda line: _warn(trainer, line),
            prediction_text=lambda: "" if self.plan is None else f"What was predicted:\n{self.plan.explain()}",
            on_failure=lambda _failure: self._watch.out_of_memory() if self._watch is not None else None,
        )
        self._applied.on_undo(self._session.undo)

    def _verdict(self, trainer: Trainer, decision: Decision) -> None:
        """Raise or warn, where the training does not fit."""
        plan = decision.plan
        as_written_fits = plan.fits and not _shrinks(plan)
        if self.settings.mode == "strict" and not as_written_fits:
            raise DoesNotFitError(_("the training does not fit as written.") + f"\n{plan.explain()}")
        if self.settings.mode == "fit" and not plan.fits:
            _warn(trainer, " ".join([_("this training is not known to fit."), *plan.reasons]))

    def _no_decision(self, trainer: Trainer, outcome: Outcome[Decision]) -> None:
        """No prediction: raise in strict mode, or where the user's own code failed; else warn."""
        failure: Failure = outcome.failure  # type: ignore[assignment]
        if self.settings.mode == "strict" or (self.settings.mode == "fit" and not failure.unsupported):
            outcome.unwrap()
        trace = "" if failure.unsupported or outcome.error is None else _traceback(outcome.error)
        said = _("no prediction for this training, which is left unchanged: {why}", why=failure.message)
        _warn(trainer, said + trace)

    def _scale_learning_rates(self, trainer: Trainer) -> None:
        """From what restored rates contain to what this run's are to be; a second call does nothing."""
        factor = self._factor(trainer)
        if factor != self._restored_factor:
            for left_out in growth.scale_learning_rates(trainer, factor / self._restored_factor):
                _warn(trainer, _("learning rate not scaled: {why}", why=left_out))
        self._restored_factor = factor

    def _factor(self, trainer: Trainer) -> float:
        """What the learning rates of this run are to be multiplied by, the guard's own plan being applied."""
        applied = self.plan is not None and self.settings.mode == "fit" and not _hands_off(trainer)
        if not applied or self.plan is None or _lr_finder(trainer):
            return 1.0
        return self.plan.learning_rate_factor

    def _disarm(self) -> None:
        self._armed = self._logged = False
        self._session = self._splitter = self._spare = self._watch = None

    def _log(self, trainer: Trainer) -> None:
        """The prediction, once, through the Trainer's own loggers."""
        if self.plan is None or self._logged or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        self._logged = True
        for logger in trainer.loggers:
            logger.log_metrics(_metrics(self.plan), step=trainer.global_step)


def _first_guard(trainer: Trainer) -> VramGuard | None:
    """Of several guards in one Trainer, the first one works and the others rest."""
    guards = [callback for callback in trainer.callbacks if isinstance(callback, VramGuard)]  # type: ignore[attr-defined]
    return guards[0] if guards else None


def _hands_off(trainer: Trainer) -> str:
    """Why another callback's work forbids changing anything ("" where none does)."""
    if _has(trainer, "callbacks.BatchSizeFinder"):
        return "nothing is changed: BatchSizeFinder tries batch sizes out, and the two would mislead each other"
    return ""


def _offloaded(plan: Plan) -> str:
    """Why a plan's own techniques forbid recovery ("" where they do not)."""
    if plan.fits and (plan.recipe.parameters_on_host or plan.recipe.optimizer_on_host):
        return "weights or optimizer state on the host are changed while backward and the step still run"
    return ""


def _as_trained(plan: Plan, *, acts: bool) -> Plan:
    """With the estimate of what will really run."""
    return plan if acts and plan.fits else replace(plan, estimate=plan.before)


def _lr_finder(trainer: Trainer) -> bool:
    return _has(trainer, "callbacks.LearningRateFinder")


def _has(trainer: Trainer, callback: str) -> bool:
    """Whether a callback of this class (its path below the namespace) is in the Trainer."""
    return any(namespaces.is_a(found, callback) for found in trainer.callbacks)  # type: ignore[attr-defined]


def _about_learning_rates(trainer: Trainer, decision: Decision) -> list[str]:
    if decision.plan.learning_rate_factor != 1.0 and _lr_finder(trainer):
        return ["learning rates are not scaled: LearningRateFinder finds them for the larger batch"]
    return []


def _shrinks(plan: Plan) -> bool:
    smaller = plan.micro_batch_size < plan.batch_size_before
    return plan.precision != plan.precision_before or smaller or bool(plan.recipe)


def _metrics(plan: Plan) -> dict[str, float]:
    return {
        "vram_guard/predicted_peak_reserved_bytes": float(plan.estimate.peak_reserved),
        "vram_guard/predicted_peak_reserved_bytes_as_written": float(plan.before.peak_reserved),
        "vram_guard/usable_bytes": float(plan.budget.usable),
        "vram_guard/batch_size": float(plan.batch_size),
        "vram_guard/micro_batch_size": float(plan.micro_batch_size),
        "vram_guard/fits": float(plan.fits),
    }


def _print_report(trainer: Trainer, decision: Decision, *, applied: bool) -> None:
    """On rank zero, once."""
    if not trainer.is_global_zero:
        return
    from vram_guard.report.text import show

    if not show(decision.plan):
        return
    lines = [f"  - {note}" for note in decision.notes]
    if decision.plan.changed:
        lines.insert(
            0, _("vram_guard: this plan is applied.") if applied else _("vram_guard: this plan is not applied.")
        )
    elif lines:
        lines.insert(0, _("vram_guard: notes"))
    if lines:
        _write("\n".join(lines) + "\n")


def _write(text: str) -> None:
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
        sys.stdout.flush()
    except (BrokenPipeError, ValueError):  # nobody reads any more; the training goes on
        return


def _warn(trainer: Trainer, message: str) -> None:
    """On rank zero, once."""
    if trainer.is_global_zero:
        warnings.warn(f"vram_guard: {message}", stacklevel=2)


def _traceback(error: BaseException) -> str:
    return "\n" + "".join(traceback.format_exception(error))
