"""VramGuard: the callback."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from vram_guard.apply.saved_rates import still_multiplied
from vram_guard.guard.evaluation import foresee
from vram_guard.guard.guard import Guard
from vram_guard.guard.settings import GuardSettings
from vram_guard.language import _
from vram_guard.plan.checks import Mode
from vram_guard.settings import disabled, filled
from vram_guard_lightning import _apply, _growth, _layouts, _namespaces, _recovery
from vram_guard_lightning._evaluation import KINDS, capture_evaluation, capture_later, comes_later
from vram_guard_lightning._training import LightningTraining, write

# ruff: noqa: ARG002 - Lightning decides what its hooks are given

if TYPE_CHECKING:
    from lightning.pytorch import Callback as CallbackBase
    from lightning.pytorch import LightningModule, Trainer

    from vram_guard.budget import Budget
    from vram_guard.guard.evaluation import CapturedEvaluation
    from vram_guard.plan import Plan
else:
    CallbackBase = _namespaces.callback_base()

#: Where a checkpoint keeps what has to survive it. (A callback's ``state_dict`` would do, but Lightning then
#: refuses a Trainer that was given the callback twice, which a plugin may well do.)
CHECKPOINT_KEY = "vram_guard"


class VramGuard(CallbackBase):
    """Reports how much GPU memory a training step will take before anything is built, and makes it fit.

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
        budget, gpu, margin, allow, mode, grow, pin, loss_weight, longest, recover, verbose: see
            :class:`vram_guard.guard.settings.GuardSettings`; None: its default.
        advanced: its other settings, by name.

    What is not given, or None, comes from the environment (``VRAM_GUARD_MARGIN=0.1``) or from ``[tool.vram_guard]`` in
    the project's ``pyproject.toml``, see :mod:`vram_guard.settings`. ``VRAM_GUARD_DISABLE=1`` turns the callback off.

    Attributes:
        plan: the plan, on every rank; None before, and where there is none.

    Raises:
        InvalidInputError: a setting makes no sense.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> guard = VramGuard(budget="1GiB", mode="report")
        >>> Trainer(callbacks=[guard], fast_dev_run=True, accelerator="cpu").fit(BoringModel())
        FITS ...
        >>> guard.plan.fits
        True
    """

    def __init__(
        self,
        budget: Budget | str | int | None = None,
        gpu: str | None = None,
        margin: float | None = None,
        allow: str | Iterable[str] | None = None,
        mode: Mode | None = None,
        grow: bool | None = None,
        *,
        pin: Mapping[str, Any] | None = None,
        loss_weight: Literal["auto", "mean", "sum"] | Callable[[Any], Any] | None = None,
        longest: str | None = None,
        recover: bool | None = None,
        verbose: bool | None = None,
        advanced: Mapping[str, Any] | None = None,
    ) -> None:
        arguments = locals()
        names = GuardSettings.names()
        given = {name: arguments[name] for name in (*names, "advanced") if arguments.get(name) is not None}
        super().__init__()
        self.settings = GuardSettings(**filled(GuardSettings.flat(given), names))
        self.plan: Plan | None = None
        self._guard: Guard | None = None
        """Between setup and teardown, and only in the callback that works."""
        self._logged = False
        self._told_of_fabric = False
        self._restored: Mapping[str, Any] | None = None
        """What the guard of a checkpoint that was restored kept in it, until the next batch."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Arrange to be called when the model is complete and its strategy is not yet set up."""
        # Of several guards in one Trainer, the first one works; one that stands twice in it is called twice.
        if self is not _first_guard(trainer) or self._guard is not None or disabled():
            return
        if stage in KINDS:
            self._before_evaluation(trainer, pl_module, str(getattr(stage, "value", stage)))
        if stage != "fit":
            return
        self.plan, self._logged = None, False
        planned_batch = self.settings.planned_batch
        training = LightningTraining(trainer, pl_module, whole_job=self.settings.whole_job, planned_batch=planned_batch)
        guard = self._guard = Guard(training, self.settings)
        lightnings_own, barrier = trainer.strategy.setup, trainer.strategy.barrier
        begins_early = _layouts.shards_in_configure_model(trainer)

        def begin() -> None:
            try:
                guard.begin()
            finally:
                self.plan = guard.plan
            for later in comes_later(trainer) if self.settings.whole_job else ():
                self._foresee(
                    training, later, functools.partial(capture_later, trainer, pl_module, later, planned_batch)
                )

        def barrier_after_setup(name: str | None = None, *args: Any, **kwargs: Any) -> None:
            barrier(name, *args, **kwargs)
            if name == "post_setup":  # configure_model comes next
                begin()

        def guarded_setup(trainer: Trainer) -> None:
            if not begins_early:
                begin()
            lightnings_own(trainer)
            if guard.changes and self.plan is not None and self.plan.recipe:
                _apply.after_setup(trainer, self.plan.recipe, guard.applied)
            if not guard.no_recovery:
                _recovery.arm(trainer, pl_module, guard)
            guard.applied.replace(trainer.fit_loop, "run", guard.stopping()(trainer.fit_loop.run))

        if begins_early:
            guard.applied.replace(trainer.strategy, "barrier", barrier_after_setup)
        guard.applied.replace(trainer.strategy, "setup", guarded_setup)

    def _before_evaluation(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        """Arrange that an evaluation that runs by itself is predicted at the same point; nothing of it is changed."""
        if not self.settings.whole_job or {"setup", "barrier"} & vars(trainer.strategy).keys():
            return
        training, strategy = LightningTraining(trainer, module), trainer.strategy
        # As in a training: configure_model, which may divide the model, comes after this barrier.
        point = "barrier" if _layouts.shards_in_configure_model(trainer) else "setup"
        own = getattr(strategy, point)

        def predicted(*args: Any, **kwargs: Any) -> Any:
            if point == "barrier" and "post_setup" not in (*args, *kwargs.values()):
                return own(*args, **kwargs)
            del vars(strategy)[point]
            self._foresee(
                training,
                stage,
                functools.partial(capture_evaluation, trainer, module, stage, self.settings.planned_batch),
            )
            return own(*args, **kwargs)

        vars(strategy)[point] = predicted

    def _foresee(self, training: LightningTraining, stage: str, capture: Callable[[], CapturedEvaluation]) -> None:
        what = f"trainer.{stage}"
        found = foresee(training, capture, self.settings, what)
        if found is not None and training.trainer.is_global_zero:
            lines = [found.words(what), *found.notes] if found.fits else found.notes
            write("".join(f"vram_guard: {line}\n" for line in lines))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Scale learning rates, if the batch grew: after a checkpoint's were restored, and only once."""
        if self._guard is None:
            return
        self._guard.scale_learning_rates()
        for line in self._schedule_notes(trainer, self._guard):
            write(f"vram_guard: {line}\n")
        # The prediction is logged once, however often a tuner trains.
        if self.plan is not None and not self._logged and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._logged = True
            _log_metrics(trainer, _predicted(self.plan))
        self._guard.training_starts()

    def _schedule_notes(self, trainer: Trainer, guard: Guard) -> Iterator[str]:
        plan = self.plan
        if plan is None or not trainer.is_global_zero:
            return
        restored = None
        if self._restored is not None:
            restored = int(self._restored.get("batch_size", plan.batch_size_before))
        size = plan.batch_size if guard.changes else plan.batch_size_before
        yield from _growth.schedule_notes(trainer, restored, size, plan.batch_size_before)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Say once, after the first steps, the measured peak and the predicted one."""
        found = None if self._guard is None else self._guard.measured(trainer.global_step)
        if found is None:
            return
        if trainer.is_global_zero:
            write(f"vram_guard: {found.words()}\n")
        _log_metrics(trainer, found.metrics())

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Save learning rates as they were written, and what is to be known of the larger batch."""
        guard, plan = self._guard, self.plan
        if guard is None or plan is None or "optimizer_states" not in checkpoint:
            return
        contained, factor = guard.rates_contain, guard.multiplied_by
        if contained == 1.0 and not guard.grown:
            return
        if factor != 1.0 and _growth.save_as_written(trainer, checkpoint, factor):
            contained = 1.0
        checkpoint[CHECKPOINT_KEY] = {
            "learning_rate_factor": contained,
            "multiplied_by": factor,
            "batch_size": plan.batch_size if guard.changes else plan.batch_size_before,
        }

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Remember what the learning rates that are about to be restored were multiplied by."""
        if trainer.state.fn != "fit" or self is not _first_guard(trainer) or not checkpoint.get("optimizer_states"):
            return
        self._restored = state = checkpoint.get(CHECKPOINT_KEY) or {}
        contained = float(state.get("learning_rate_factor", 1.0))
        if self._guard is not None:
            self._guard.restored(contained)
        elif contained != 1.0 and trainer.is_global_zero:
            warnings.warn(f"vram_guard: {still_multiplied(contained)}", stacklevel=2)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Multiply rates again that were restored while the training runs."""
        if self._restored is not None and self._guard is not None:
            self._guard.scale_learning_rates()
            self._restored = None

    def on_after_optimizer_step(self, strategy: Any, optimizer: Any) -> None:
        """Say once that Fabric, which alone calls this hook, is not guarded."""
        if not self._told_of_fabric:
            self._told_of_fabric = True
            warnings.warn(
                "vram_guard: "
                + _(
                    "VramGuard does nothing under Fabric, whose loop is the user's own: it guards a Trainer. Ask "
                    "vram_guard.plan about the step, or launch the script with vram-guard launch where it uses "
                    "Accelerate"
                ),
                stacklevel=2,
            )

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Restore the Trainer to its original state."""
        guard, self._guard = self._guard, None
        if guard is not None:
            guard.applied.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Restore it after an error too, where Lightning calls no teardown hook."""
        self.teardown(trainer, pl_module, "fit")


def _first_guard(trainer: Trainer) -> VramGuard | None:
    return next((callback for callback in trainer.callbacks if isinstance(callback, VramGuard)), None)  # type: ignore[attr-defined]


def _log_metrics(trainer: Trainer, values: Mapping[str, float]) -> None:
    """Log these values with the Trainer's own loggers, under the guard's name."""
    named = {f"vram_guard/{name}": float(value) for name, value in values.items()}
    for logger in trainer.loggers:
        logger.log_metrics(named, step=trainer.global_step)


def _predicted(plan: Plan) -> dict[str, float]:
    return {
        "predicted_peak_reserved_bytes": plan.estimate.peak_reserved,
        "predicted_peak_reserved_bytes_as_written": plan.before.peak_reserved,
        "usable_bytes": plan.budget.usable,
        "batch_size": plan.batch_size,
        "micro_batch_size": plan.micro_batch_size,
        "fits": plan.fits,
    }
