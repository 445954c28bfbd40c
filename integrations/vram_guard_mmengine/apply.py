"""Puts a decision into a runner whose loops and optimizer are not built yet, and takes it out again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mmengine.device import get_device
from mmengine.model import is_model_wrapper

from vram_guard import techniques
from vram_guard.capture.loader import set_batch_size
from vram_guard.techniques.optimizers import with_form
from vram_guard.techniques.placement import optimizer_for
from vram_guard_mmengine import optim

if TYPE_CHECKING:
    from vram_guard.plan import Plan
    from vram_guard_mmengine.decide import Decision

# ruff: noqa: SLF001 - the runner has no public names for what is not built yet


@dataclass
class Applied:
    """What was changed in a runner, and how to change it back."""

    notes: list[str] = field(default_factory=list)
    _undo: list[Callable[[], None]] = field(default_factory=list)

    def on_undo(self, action: Callable[[], None]) -> None:
        """``action`` is called by :meth:`undo`, the latest first."""
        self._undo.append(action)

    def undo(self) -> None:
        """The runner is as the user made it; calling it again does nothing."""
        while self._undo:
            self._undo.pop()()


def before_building(runner: Any, plan: Plan) -> Applied:
    """Precision, batch size and the optimizer's form: what has to be there when the runner builds its parts."""
    applied = Applied()
    if plan.precision != plan.precision_before:
        device = str(get_device())
        runner.optim_wrapper = optim.in_precision(runner.optim_wrapper, plan.precision, device)
        if device == "cpu":
            applied.notes.append("this training runs on the CPU, where bfloat16 autocast stands in for AmpOptimWrapper")
    if plan.batch_size != plan.batch_size_before:
        _set_batch_size(runner, plan.batch_size)
    recipe = plan.recipe
    if recipe.optimizer != "as-written":
        _change_optimizer(runner, plan, applied)
    return applied


def _set_batch_size(runner: Any, size: int) -> None:
    loader = runner._train_dataloader
    if isinstance(loader, dict):
        runner._train_dataloader = copy.copy(loader)
        runner._train_dataloader["batch_size"] = size
    else:
        set_batch_size(loader, size)


def _change_optimizer(runner: Any, plan: Plan, applied: Applied) -> None:
    """In the wrapper, as soon as it is built: before auto_scale_lr, schedulers and a checkpoint get hold of it."""
    builder = getattr(runner, "strategy", runner)
    as_written = builder.build_optim_wrapper
    done: list[Any] = []

    def build_optim_wrapper(*args: Any, **kwargs: Any) -> Any:
        wrapper = as_written(*args, **kwargs)
        if not any(wrapper is one for one in done):
            wrapper.optimizer = optimizer_for(wrapper.optimizer, plan.recipe)
            done.append(wrapper)
        return wrapper

    vars(builder)["build_optim_wrapper"] = build_optim_wrapper
    applied.on_undo(lambda: vars(builder).pop("build_optim_wrapper", None))


def before_training(runner: Any, decision: Decision, applied: Applied) -> None:
    """Checkpointed and offloaded blocks: on the model as it will run."""
    if decision.plan.recipe.optimizer in ("fused", "for-loop"):
        with_form(runner.optim_wrapper.optimizer, decision.plan.recipe.optimizer)  # a checkpoint brings its own flags
    model = runner.model.module if is_model_wrapper(runner.model) else runner.model
    applied.on_undo(techniques.install(model, decision.plan.recipe))
