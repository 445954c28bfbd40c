"""A launch plan in a process of the real launch: installed before the script starts, for all that it will prepare."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import io
import pickle
import sys
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from vram_guard.apply.saved_rates import divided_optimizer, divided_schedulers
from vram_guard.errors import InvalidInputError, UnsupportedStepError
from vram_guard.language import _
from vram_guard.patching import replaced
from vram_guard_accelerate._patching import made_by_script, wrap
from vram_guard_accelerate.apply import techniques
from vram_guard_accelerate.apply.loaders import LoaderMatcher

if TYPE_CHECKING:
    from torch import nn

    from vram_guard.techniques import Recipe
    from vram_guard_accelerate.launch_plan import LaunchPlan


class OtherModelError(UnsupportedStepError):
    """The script trains another model than the one that its plan was made for."""


class PlanInstaller:
    """The launch plan of one process, as it is carried out.

    Args:
        plan: what is changed.
    """

    def __init__(self, plan: LaunchPlan) -> None:
        self.plan = plan
        self._models: list[nn.Module] = []
        self._made_of: bytes | None = None
        """Of the first model, see :func:`_made_of`."""
        self._planned: list[nn.Module] = []
        """The models that a plan for one model is for."""
        self._training = LoaderMatcher(plan.loader)
        self._scaled: set[int] = set()
        self._schedulers: weakref.WeakSet[Any] = weakref.WeakSet()
        """Every scheduler of torch: a script need not hand its own to ``prepare``."""

    def install(self) -> None:
        """From now on whatever the script hands to ``Accelerator.prepare`` follows the plan."""
        from accelerate import Accelerator

        if self.plan.by_itself:
            self._watch_own_loop()
        wrap(Accelerator, "prepare", self.prepare)
        wrap(Accelerator, "prepare_model", self.prepare)
        if self.plan.grown_batch_size != self.plan.batch_size and not self.plan.batch_option:
            from torch.utils.data import DataLoader

            wrap(DataLoader, "__init__", self._larger_batches)
        if self.plan.learning_rate_factor != 1:
            from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

            for kind in (LRScheduler, ReduceLROnPlateau):  # the second does not call the first's
                wrap(kind, "__init__", self._remember_scheduler)
            wrap(Accelerator, "save_state", self._save_as_written)
            wrap(Accelerator, "load_state", self._load_as_written)

    def _watch_own_loop(self) -> None:
        """What a script without Accelerate trains follows the plan from where it calls it first in training."""
        import torch

        from vram_guard_accelerate.apply.own_loop import ModelCalls, OptimizersMade, OwnLoop

        made = OptimizersMade()
        made.watch()

        def begins(models: list[nn.Module]) -> None:
            loop = OwnLoop(made)
            loop.train(models)
            self.prepare(lambda *_args, **_kwargs: None, loop, *models)

        calls = ModelCalls(
            lambda tensor: tensor.is_cuda or not torch.cuda.is_available(),
            lambda module: not (module.training and torch.is_grad_enabled()),
            begins,
        )
        calls.watch()

    # --- prepare ----------------------------------------------------------------------------------------------

    def prepare(self, original: Any, accelerator: Any, *args: Any, **kwargs: Any) -> Any:
        """``Accelerator.prepare``, and what the plan puts on top of it."""
        import torch

        new = [
            thing
            for thing in args
            if isinstance(thing, torch.nn.Module) and not any(thing is known for known in self._models)
        ]
        self._models += new  # before: prepare itself calls prepare_model
        self._planned += [model for model in new if self._is_planned(model)]
        prepared = original(accelerator, *args, **kwargs)
        for model in new:
            self._treat(model)
        techniques.set_optimizers(accelerator, self.plan.recipe)
        self._scale(accelerator)
        return prepared

    def _treat(self, model: nn.Module) -> None:
        from vram_guard.techniques import install

        recipe = self._recipe_of(model)
        try:
            install(model, recipe)
        except InvalidInputError as error:
            raise OtherModelError(
                _(
                    "the script trains another model than in its dry run, which found a GPU: {error}. Where it builds "
                    "its model otherwise without a GPU (nn.DataParallel under a test for one), launch it where there "
                    "is one, or without a plan: accelerate launch",
                    error=error,
                )
            ) from error

    def _number_of(self, model: nn.Module) -> int:
        return next(at for at, known in enumerate(self._models) if known is model)

    def _is_planned(self, model: nn.Module) -> bool:
        """True for the first model, and for one that is made as it was: trainings one after the other (folds)."""
        if self.plan.models > 1:
            return False
        made_of = _made_of(model)
        if model is self._models[0]:
            self._made_of = made_of
            return True
        return made_of is not None and made_of == self._made_of

    def _recipe_of(self, model: nn.Module) -> Recipe:
        """Of several models, names begin with the model's number in the order of ``prepare``."""
        recipe = self.plan.recipe
        if self.plan.models == 1:
            nothing = recipe.with_(checkpoint=(), offload_activations=(), chunked_head="", slices=None)
            return recipe if any(model is one for one in self._planned) else nothing
        prefix = f"{self._number_of(model)}."
        names = {"checkpoint": recipe.checkpoint, "offload_activations": recipe.offload_activations}
        own = {
            key: tuple(name.removeprefix(prefix) for name in value if name.startswith(prefix))
            for key, value in names.items()
        }
        head = recipe.chunked_head if recipe.chunked_head.startswith(prefix) else ""
        slices = recipe.slices
        if slices is not None:
            name = f"{slices.body.name}."
            body = replace(slices.body, name=name.removeprefix(prefix).removesuffix("."))
            slices = replace(slices, body=body) if name.startswith(prefix) else None
        return recipe.with_(**own, chunked_head=head.removeprefix(prefix), slices=slices)

    # --- a larger batch ---------------------------------------------------------------------------------------

    def _larger_batches(self, original: Any, *args: Any, **kwargs: Any) -> None:
        """The training's loaders, identified by where the script makes them, deliver more at once."""
        given = inspect.signature(original).bind(*args, **kwargs)
        maker = sys._getframe(2)  # noqa: SLF001 - who makes it is the question
        its_size = given.arguments.get("batch_size") == self.plan.batch_size
        if made_by_script(maker) and self._training.matches(maker) and its_size:
            given.arguments["batch_size"] = self.plan.grown_batch_size
        original(*given.args, **given.kwargs)

    # --- learning rates ---------------------------------------------------------------------------------------

    def _scale(self, accelerator: Any) -> None:
        """Multiply the rates of what is prepared, once each."""
        from vram_guard.apply.learning_rate import scale_learning_rates

        wanted = self.plan.learning_rate_factor
        if wanted == 1:
            return
        schedulers = _distinct([*_prepared_schedulers(accelerator), *self._schedulers])
        for optimizer in _prepared_optimizers(accelerator):
            own = [one for one in schedulers if _optimizer_of(one) is optimizer]
            late = [one for one in own if id(one) not in self._scaled]
            fresh = id(optimizer) not in self._scaled
            self._scaled |= {id(optimizer), *(id(one) for one in own)}
            if fresh:
                scale_learning_rates(optimizer, late, wanted)
            elif late and not _made_after(optimizer, late, wanted):
                # In place of their optimizer, which is scaled already: one without parameter groups.
                no_groups: Any = SimpleNamespace(param_groups=[], defaults={})
                scale_learning_rates(no_groups, late, wanted)

    def _remember_scheduler(self, original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        original(scheduler, *args, **kwargs)
        self._schedulers.add(scheduler)

    def _in_checkpoint(self, accelerator: Any) -> list[tuple[Any, list[Any]]]:
        """The optimizers of a checkpoint whose rates are scaled, each with its schedulers there."""
        registered = [one for one in accelerator._custom_objects if one in self._schedulers]  # noqa: SLF001
        schedulers = _distinct([*_prepared_schedulers(accelerator), *registered])
        return [
            (optimizer, [one for one in schedulers if _optimizer_of(one) is optimizer])
            for optimizer in _prepared_optimizers(accelerator)
            if id(optimizer) in self._scaled
        ]

    def _save_as_written(self, original: Any, accelerator: Any, *args: Any, **kwargs: Any) -> Any:
        """A checkpoint holds rates as the script wrote them, so that it can be loaded without the guard too."""
        factor = self.plan.learning_rate_factor

        def divided(scheduler: Any, state: Any) -> Any:
            made = divided_schedulers([scheduler], [state], factor)
            return state if made is None else made[0]

        with contextlib.ExitStack() as stack:
            for optimizer, schedulers in self._in_checkpoint(accelerator):
                stack.enter_context(_state_as(optimizer, lambda _one, state: divided_optimizer(state, factor)))
                for scheduler in schedulers:
                    stack.enter_context(_state_as(scheduler, divided))
            return original(accelerator, *args, **kwargs)

    def _load_as_written(self, original: Any, accelerator: Any, *args: Any, **kwargs: Any) -> Any:
        from vram_guard.apply.learning_rate import scale_learning_rates

        loaded = original(accelerator, *args, **kwargs)
        for optimizer, schedulers in self._in_checkpoint(accelerator):
            scale_learning_rates(optimizer, schedulers, self.plan.learning_rate_factor)
        return loaded


def _prepared_optimizers(accelerator: Any) -> list[Any]:
    return [getattr(one, "optimizer", one) for one in accelerator._optimizers]  # noqa: SLF001


def _prepared_schedulers(accelerator: Any) -> list[Any]:
    return [getattr(one, "scheduler", one) for one in accelerator._schedulers]  # noqa: SLF001


def _optimizer_of(scheduler: Any) -> Any:
    """The optimizer itself, also of a scheduler that was made over a prepared one."""
    own = getattr(scheduler, "optimizer", None)
    return getattr(own, "optimizer", own)


def _distinct(things: Iterable[Any]) -> list[Any]:
    return list({id(one): one for one in things}.values())


def _state_as(thing: Any, changed: Callable[[Any, Any], Any]) -> contextlib.AbstractContextManager[None]:
    """Inside the block, ``state_dict()`` of this object is changed; the object is not."""
    own = thing.state_dict

    def state_dict(*args: Any, **kwargs: Any) -> Any:
        state = own(*args, **kwargs)
        if isinstance(state, dict):
            state.pop("state_dict", None)  # schedulers write down all of their attributes
        return changed(thing, state)

    return replaced(thing, {"state_dict": state_dict})


class _WithoutValues(pickle.Pickler):
    """Writes of tensors what they are, and not what they hold."""

    def persistent_id(self, obj: Any) -> Any:
        import torch

        if isinstance(obj, torch.Tensor):
            return type(obj).__name__, str(obj.dtype), tuple(obj.shape), obj.requires_grad
        return None


def _made_of(model: nn.Module) -> bytes | None:
    """A digest of everything that a model is made of but its tensors' values: classes, settings, functions, hooks.

    None where that cannot be written down (a class of a function's own, an open file): it is like no other then.
    """
    written = io.BytesIO()
    try:
        _WithoutValues(written, protocol=4).dump(model)
    except Exception:  # noqa: BLE001 - the user's own classes say how they are written
        return None
    return hashlib.sha256(written.getvalue()).digest()


def _made_after(optimizer: Any, schedulers: list[Any], factor: float) -> bool:
    """True if schedulers were made over rates that were scaled already: their base is the optimizer's own."""
    bases = [getattr(one, "base_lrs", None) for one in schedulers]
    rates = [group.get("initial_lr", group["lr"]) for group in optimizer.param_groups]
    return factor == 1 or all(base is None or list(base) == rates for base in bases)
