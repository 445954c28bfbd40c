"""A runner whose loops and optimizer are not built yet, as the guard sees it."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from mmengine.device import get_device
from mmengine.model import is_model_wrapper

from vram_guard import techniques
from vram_guard.apply import learning_rate, step_counts
from vram_guard.apply.loss_weight import LossWeight
from vram_guard.apply.saved_rates import divided_optimizer, divided_schedulers
from vram_guard.capture.loader import set_batch_size
from vram_guard.forks.fork import Progress
from vram_guard.guard.applied import Applied
from vram_guard.guard.decision import Decision
from vram_guard.guard.ranks import ProcessRanks
from vram_guard.language import _
from vram_guard.longest.planned_batch import LARGEST, PlannedBatch
from vram_guard.plan import Plan
from vram_guard.techniques import Recipe
from vram_guard.techniques.loss_graphs import LossGraphs
from vram_guard.techniques.placement import optimizer_for
from vram_guard.terminal import fitting_log, in_log
from vram_guard_mmengine import _layouts, _optim
from vram_guard_mmengine._capture import CapturedRun, by_epoch, capture
from vram_guard_mmengine._summary import CONFIG_KEY, summary

# ruff: noqa: SLF001 - the runner has no public names for what is not built yet


class RunnerTraining:
    """See :class:`vram_guard.guard.training.Training`."""

    def __init__(self, runner: Any, *, whole_job: bool = True, planned_batch: PlannedBatch = LARGEST) -> None:
        self.runner = runner
        self._whole_job = whole_job
        self._planned_batch = planned_batch
        self.ranks = ProcessRanks()

    @property
    def device(self) -> torch.device:
        """MMEngine's choice for this process."""
        device = torch.device(get_device())
        return torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else device

    @property
    def model(self) -> Any:
        """The runner's, within its wrapper."""
        model = self.runner.model
        return model.module if is_model_wrapper(model) else model

    @contextmanager
    def progress(self) -> Iterator[Progress]:
        """Nothing: the runner's log is for what came out."""
        yield lambda _line: None

    def capture(self) -> CapturedRun:
        """See :func:`vram_guard_mmengine._capture.capture`."""
        return capture(self.runner, whole_job=self._whole_job, planned_batch=self._planned_batch)

    def why_left_alone(self) -> str:
        """Nothing of MMEngine's keeps the guard from changing a training."""
        return ""

    def why_not_recovered(self, refused: Mapping[str, str]) -> str:
        """Batches that cannot be cut, and other processes, which would wait for one that repeats a batch."""
        if "accumulate" in refused or not self.runner.distributed:
            return refused.get("accumulate", "")
        return _("repeating a step under {strategy} is not known to be safe", strategy="torch.distributed")

    def apply(self, decision: Decision, _loss_weight: LossWeight, _graphs: LossGraphs | None, applied: Applied) -> None:
        """Precision, batch size and the optimizer's form: the runner builds its parts from them."""
        runner, plan = self.runner, decision.plan
        if plan.precision != plan.precision_before:
            device = str(get_device())
            runner.optim_wrapper = _optim.in_precision(runner.optim_wrapper, plan.precision, device)
            if device == "cpu":
                applied.notes.append(
                    _("this training runs on the CPU, where bfloat16 autocast stands in for AmpOptimWrapper")
                )
        if plan.batch_size != plan.batch_size_before:
            self._grow(plan, applied)
        if _layouts.layout_of(runner) is not None:
            _layouts.apply(runner.strategy, plan.recipe, applied)
        if plan.recipe.optimizer != "as-written":
            _change_optimizer(runner, plan.recipe, applied)

    def _grow(self, plan: Plan, applied: Applied) -> None:
        loader = self.runner._train_dataloader
        if isinstance(loader, dict):
            loader = self.runner._train_dataloader = copy.copy(loader)
            loader["batch_size"] = plan.batch_size
        else:
            set_batch_size(loader, plan.batch_size)
        applied.notes.append(
            _(
                "train_dataloader.batch_size: {before} -> {after}, as if the config said so",
                before=plan.batch_size_before,
                after=plan.batch_size,
            )
        )
        if not by_epoch(self.runner):
            applied.notes.append(
                _("max_iters, intervals and schedules count iterations of {size} samples", size=plan.batch_size)
            )
        elif counted := [*_schedules_by_iteration(self.runner), *_hooks_by_iteration(self.runner)]:
            applied.notes.append(
                _(
                    "counted in iterations of {factor} times as many samples: {counts}",
                    factor=plan.batch_size // plan.batch_size_before,
                    counts=", ".join(counted),
                )
            )
        if auto_scaled(self.runner):
            applied.notes.append(
                _("learning rates: auto_scale_lr follows the larger batch by itself; nothing is scaled twice")
            )

    def learning_rate_factor(self, plan: Plan) -> float:
        """The plan's, or by auto_scale_lr's own rule."""
        return plan.batch_size / plan.batch_size_before if auto_scaled(self.runner) else plan.learning_rate_factor

    def scale_learning_rates(self, factor: float) -> tuple[str, ...]:
        """Of the optimizer, and of the schedulers that drive them."""
        found = self.runner.param_schedulers or []
        schedulers = [one for many in found.values() for one in many] if isinstance(found, dict) else found
        driving = [scheduler for scheduler in schedulers if _drives_rates(scheduler)]
        return learning_rate.scale_learning_rates(self.runner.optim_wrapper, driving, factor)

    def report(self, plan: Plan, lines: list[str], *, applied: bool, verbose: bool) -> None:
        """In the runner's log, and in the config that it writes down."""
        from vram_guard.report.text import render

        log = self.runner.logger
        text = render(plan, verbose=verbose).rstrip()
        below = fitting_log("\n".join(lines), log)
        log.info("%s", in_log("\n".join(filter(None, ["vram_guard", text, below])), log))
        self.runner.cfg[CONFIG_KEY] = summary(plan, applied=applied)
        self.runner.dump_config()

    def tell(self, lines: Iterable[str]) -> None:
        """In the runner's log."""
        for line in lines:
            self.runner.logger.info("vram_guard: %s", in_log(line, self.runner.logger))

    def warn(self, message: str) -> None:
        """In the runner's log."""
        self.runner.logger.warning("vram_guard: %s", in_log(message, self.runner.logger))


def _schedules_by_iteration(runner: Any) -> Iterator[str]:
    """Configured schedulers that count iterations; those that are converted from epochs follow the larger batch."""
    found = runner.param_schedulers or []
    single = isinstance(found, dict) and "type" in found
    for one in [found] if single else found if isinstance(found, list) else ():
        if isinstance(one, dict) and not one.get("by_epoch", True):
            ends = f"{one.get('begin', 0)} - {one['end']}" if "end" in one else str(one.get("begin", 0))
            yield f"{one.get('type')} ({ends})"


def _hooks_by_iteration(runner: Any) -> Iterator[str]:
    for hook in runner.hooks:
        every = getattr(hook, "interval", None)
        if type(every) is int and every > 1 and not getattr(hook, "by_epoch", False):
            yield f"{type(hook).__name__}.interval = {every}"
    yield from step_counts.of_callbacks(runner.hooks)


def _drives_rates(scheduler: Any) -> bool:
    """Momentum has schedulers of its own, which are of the same classes."""
    return getattr(scheduler, "param_name", "lr") == "lr"


def save_as_written(runner: Any, checkpoint: dict[str, Any], factor: float) -> bool:
    """Divide the learning rates that a checkpoint is about to hold; False where a scheduler's cannot be found in it."""
    if "optimizer" not in checkpoint:
        return False
    schedulers, states = runner.param_schedulers or [], checkpoint.get("param_schedulers")
    if states is not None:
        if not isinstance(schedulers, list) or not isinstance(states, list):
            return False
        driving = [number for number, one in enumerate(schedulers) if _drives_rates(one)]
        made = divided_schedulers([schedulers[n] for n in driving], [states[n] for n in driving], factor)
        if made is None:
            return False
        checkpoint["param_schedulers"] = [*states]
        for number, state in zip(driving, made, strict=True):
            checkpoint["param_schedulers"][number] = state
    checkpoint["optimizer"] = divided_optimizer(checkpoint["optimizer"], factor)
    return True


def auto_scaled(runner: Any) -> bool:
    """True if MMEngine itself scales the learning rate with the loader's batch size (``auto_scale_lr``)."""
    settings = getattr(runner, "auto_scale_lr", None) or runner.cfg.get("auto_scale_lr") or {}
    return bool(settings.get("enable", False))


def _change_optimizer(runner: Any, recipe: Recipe, applied: Applied) -> None:
    """In the wrapper, as soon as it is built: before auto_scale_lr, schedulers and a checkpoint get hold of it."""
    builder = getattr(runner, "strategy", runner)
    as_written = builder.build_optim_wrapper
    done: list[Any] = []

    def build_optim_wrapper(*args: Any, **kwargs: Any) -> Any:
        wrapper = as_written(*args, **kwargs)
        if not any(wrapper is one for one in done):
            wrapper.optimizer = optimizer_for(wrapper.optimizer, recipe)
            done.append(wrapper)
        return wrapper

    applied.replace(builder, "build_optim_wrapper", build_optim_wrapper)


def install_techniques(runner: Any, recipe: Recipe, applied: Applied) -> None:
    """Checkpointed and offloaded blocks: on the model as it will run, once everything is built and loaded."""
    if _layouts.layout_of(runner) is None:
        model = runner.model.module if is_model_wrapper(runner.model) else runner.model
        applied.callback(techniques.install(model, recipe))
    if recipe.optimizer_in_backward:
        applied.callback(techniques.step_where([runner.optim_wrapper.optimizer], recipe))
