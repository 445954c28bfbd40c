"""A launch plan in a process of the real launch: installed before the script starts, for all that it will prepare."""

from __future__ import annotations

import hashlib
import io
import pickle
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vram_guard.errors import InvalidInputError, UnsupportedStepError
from vram_guard.language import _
from vram_guard_accelerate._patching import wrap

if TYPE_CHECKING:
    import torch
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

    def install(self) -> None:
        """From now on whatever the script hands to ``Accelerator.prepare`` follows the plan."""
        from accelerate import Accelerator

        if self.plan.by_itself:
            self._watch_own_loop()
        wrap(Accelerator, "prepare", self.prepare)
        wrap(Accelerator, "prepare_model", self.prepare)

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
        set_optimizers(accelerator, self.plan.recipe)
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


def set_optimizers(accelerator: Any, recipe: Recipe) -> None:
    """The prepared optimizers in the form that the recipe names (for-loop, fused): in place."""
    from vram_guard.techniques.placement import optimizer_for

    for optimizer in accelerator._optimizers:  # noqa: SLF001 - see private_api.py
        inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
        optimizer_for(inner, recipe)


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
