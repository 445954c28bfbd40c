"""VramGuardHook: the guard as one of MMEngine's hooks."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, Literal

from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import FlexibleRunner, Runner

from vram_guard.apply.saved_rates import still_multiplied
from vram_guard.guard.evaluation import foresee
from vram_guard.guard.guard import Guard
from vram_guard.plan import Plan
from vram_guard.settings import disabled, filled
from vram_guard.terminal import in_log
from vram_guard_mmengine import _dividing, _split_step
from vram_guard_mmengine._capture import evaluation
from vram_guard_mmengine._checkpoints import resumable
from vram_guard_mmengine._settings import HookSettings, checked_priority, of_config_and_hook
from vram_guard_mmengine._summary import CONFIG_KEY, META_KEY, summary
from vram_guard_mmengine._training import RunnerTraining, auto_scaled, install_techniques, save_as_written

# ruff: noqa: ARG002 - MMEngine decides what hooks are given


@HOOKS.register_module()
class VramGuardHook(Hook):  # type: ignore[misc]
    """Reports how much GPU memory a training step will take before anything is built, and makes it fit.

    At the start of ``Runner.train``, before loops, optimizer and schedules are built, it runs the model's own
    ``train_step`` symbolically on the CPU and logs the prediction. Then, by ``mode``:

    - ``"fit"``: where the step does not fit, the least change that makes it fit is applied. Iterations, intervals,
      ``max_iters``, schedules and the effective batch stay as they are. Where nothing that is allowed makes it fit, or
      the training cannot be predicted, a warning says so and the training is left unchanged.
    - ``"report"``: nothing is changed and nothing raised.
    - ``"strict"``: nothing is changed; a step that does not fit as written, or cannot be predicted, raises.

    Args:
        **settings: budget, gpu, margin, mode, allow, pin, grow, loss_weight, longest, recover and verbose, see
            :class:`vram_guard.guard.settings.GuardSettings`; and ``advanced={...}`` for its other settings and the
            ``priority`` of the hook among the others. ``recover`` is off by default here: remembering what a batch may
            change costs about three milliseconds an iteration for 160 modules.

    Keys of the config's own ``vram_guard = dict(...)`` count where the hook is given none of that name.

    Attributes:
        plan: the plan, on every rank; None before, and where there is none.

    Raises:
        InvalidInputError: an unknown setting, or one that makes no sense.

    Example:
        >>> VramGuardHook(budget="24GiB", allow=["accumulate"]).settings.mode
        'fit'
        >>> VramGuardHook(budgit="24GiB")
        Traceback (most recent call last):
        vram_guard.errors.InvalidInputError: ...'budgit'...
    """

    def __init__(self, **settings: Any) -> None:
        self._given = HookSettings.flat(settings)
        self.settings = HookSettings(**self._given)
        self._priority = self.settings.priority
        self.plan: Plan | None = None
        self._guard: Guard | None = None
        """Inside :meth:`guarding`."""
        self._iterations = 0
        self._put_together: Callable[[], None] = _nothing
        guard_class(Runner)
        guard_class(FlexibleRunner)

    @property
    def active(self) -> bool:
        """Inside :meth:`guarding`."""
        return self._guard is not None

    @property
    def priority(self) -> str | int:
        """The hook's position among the others."""
        return self._priority

    @priority.setter
    def priority(self, value: str | int) -> None:
        self._priority = checked_priority(value)

    @contextlib.contextmanager
    def guarding(self, runner: Any) -> Iterator[None]:
        """Around ``train``: decided and applied before anything is built, and taken away at the end."""
        if disabled():
            yield
            return
        self._read_settings(runner)
        self.plan, self._iterations = None, 0
        settings = self.settings
        training = RunnerTraining(runner, whole_job=settings.whole_job, planned_batch=settings.planned_batch)
        guard = self._guard = Guard(training, settings)
        try:
            with guard.applied, resumable():
                try:
                    guard.begin()
                finally:
                    self.plan = guard.plan
                if auto_scaled(runner):
                    guard.rates_contain = guard.learning_rate_factor
                with guard.stopping():
                    yield
                self._put_together()
        finally:
            self._guard, self._put_together = None, _nothing

    def before_evaluation(self, runner: Any, kind: Literal["val", "test"]) -> None:
        """At the beginning of ``Runner.val`` or ``Runner.test``: what it takes is said, and nothing changed."""
        if self.active or disabled() or getattr(runner, f"_{kind}_loop", None) is None:
            return
        self._read_settings(runner)
        if not self.settings.whole_job:
            return
        training, what = RunnerTraining(runner), f"Runner.{kind}"
        found = foresee(training, lambda: evaluation(runner, kind, self.settings.planned_batch), self.settings, what)
        if found is not None:
            training.tell([found.words(what), *found.notes] if found.fits else found.notes)

    def _read_settings(self, runner: Any) -> None:
        given = of_config_and_hook(HookSettings.flat(runner.cfg.get("vram_guard") or {}), self._given)
        self.settings = HookSettings(**filled(given, HookSettings.names()))

    # --- MMEngine's hooks -----------------------------------------------------------------------------------

    def before_train(self, runner: Any) -> None:
        """Everything is built and loaded: micro-batches, blocks, learning rates, and the prediction in the logs."""
        guard, plan = self._guard, self.plan
        if guard is None or plan is None:
            return
        if guard.changes:
            install_techniques(runner, plan.recipe, guard.applied)
            if plan.recipe.sharding is not None and plan.recipe.sharding.fsdp2:
                device = guard.training.device
                self._put_together = _dividing.divide(runner, plan.recipe.sharding, guard.applied, device)
        _arm(runner, guard)
        guard.scale_learning_rates()
        # MMEngine logs `memory`, the peak that torch counted, in MiB: this stands next to it, in text and JSON.
        predicted = plan.estimate if guard.changes else plan.before
        runner.message_hub.update_scalar("train/predicted_memory", predicted.peak_allocated // 2**20, resumed=False)
        runner.message_hub.update_info(CONFIG_KEY, summary(plan, applied=guard.changes), resumed=False)

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Say once, after the first optimizer steps, the measured peak and the predicted one."""
        if self._guard is None or self.plan is None:
            return
        self._iterations += 1
        found = self._guard.measured(self._iterations // max(1, self.plan.accumulate // self.plan.splits))
        if found is not None:
            runner.logger.info("vram_guard: %s", in_log(found.words(), runner.logger))
            for name, value in found.metrics().items():
                runner.message_hub.update_info(f"vram_guard/{name}", value)

    def before_save_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        """Keep the plan, and save learning rates as they were written."""
        guard = self._guard
        if guard is None or self.plan is None:
            return
        contained, factor = guard.rates_contain, guard.multiplied_by
        if factor != 1.0 and save_as_written(runner, checkpoint, factor):
            contained = 1.0
        kept = summary(self.plan, applied=guard.changes)
        checkpoint["meta"][META_KEY] = {**kept, "learning_rates_contain": float(contained)}

    def after_load_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        """Remember what the learning rates that are about to be restored were multiplied by."""
        if not getattr(runner, "_resume", False) or "optimizer" not in checkpoint or self is not first_hook(runner):
            return
        state = checkpoint.get("meta", {}).get(META_KEY) or {}
        contained = float(state.get("learning_rates_contain", 1.0))
        if self._guard is not None:
            self._guard.restored(contained)
        elif contained != 1.0:
            runner.logger.warning("vram_guard: %s", in_log(still_multiplied(contained), runner.logger))


def _nothing() -> None:
    """Nothing was divided."""


def _arm(runner: Any, guard: Guard) -> None:
    """Micro-batches as planned, and, where it is asked for, recovery from running out of memory."""
    decision = guard.decision
    guard.training_starts()
    if decision is not None and decision.spare is not None and not guard.no_recovery:
        _split_step.arm(runner.model, guard)
    elif decision is not None and decision.splitter is not None and guard.changes:
        _split_step.install(runner.model, decision.splitter, guard)


def first_hook(runner: Any) -> VramGuardHook | None:
    """Of several guards in one runner, the first one works and the others rest."""
    return next((hook for hook in runner.hooks if isinstance(hook, VramGuardHook)), None)


def guard_class(kind: Any) -> None:
    """From now on, ``train``, ``val`` and ``test`` ask the runner's own guard first; runners without one do as before.

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
    for name in ("val", "test"):
        setattr(kind, name, _told_first(name, getattr(kind, name)))


def _told_first(name: Literal["val", "test"], as_written: Callable[..., Any]) -> Callable[..., Any]:
    """An evaluation of a runner whose guard says before it what it takes."""

    @functools.wraps(as_written)
    def evaluated(self: Any, *args: Any, **kwargs: Any) -> Any:
        hook = first_hook(self)
        if hook is not None:
            hook.before_evaluation(self, name)
        return as_written(self, *args, **kwargs)

    return evaluated
