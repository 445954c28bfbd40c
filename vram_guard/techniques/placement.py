"""Places of weights and optimizer states: the techniques that a model and its optimizer are built with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

    from vram_guard.techniques.recipe import Recipe


def place(
    model: nn.Module,
    recipe: Recipe,
    device: torch.device | str = "cuda",
    precision: str = "32-true",
    mesh: Any = None,
) -> Callable[[], None]:
    """Leave on the host what the recipe keeps there. Call it before the model moves to the device.

    ``model.to(device)`` afterwards moves the rest, and the optimizer is built after both.

    Args:
        model: the whole model, in host memory.
        recipe: the techniques; only ``frozen_on_host`` and ``parameters_on_host`` matter here.
        device: where the model will train.
        precision: the step's, in Lightning's words.
        mesh: for ``parameters_on_host``: a device mesh of one process; None: made where it is needed.

    Returns:
        A function that takes the hooks of frozen modules away again. Sharded parameters stay what they are.

    Raises:
        InvalidInputError: the recipe names a module that the model does not have.
        UnsupportedTechniqueError: a module, or this torch, that the technique cannot be used with; nothing was changed.
        MissingLibraryError: the library that applies a technique is not installed.
    """
    undo: Callable[[], None] = _nothing
    if recipe.frozen_on_host:
        from vram_guard.techniques.frozen import keep_on_host

        undo = keep_on_host(model, recipe.frozen_on_host, device)
    if recipe.parameters_on_host:
        from vram_guard.techniques.sharding import offload_parameters

        offload_parameters(model, recipe.parameters_on_host, device, precision, mesh)
    return undo


def optimizer_for(optimizer: torch.optim.Optimizer, recipe: Recipe) -> torch.optim.Optimizer:
    """The optimizer as the recipe wants it: in another form, or on the host; the same object where neither is asked.

    Raises:
        UnsupportedTechniqueError: this optimizer does not exist in that form.
        MissingLibraryError: the library that has it is not installed.
    """
    if recipe.optimizer != "as-written":
        from vram_guard.techniques.optimizers import with_form

        optimizer = with_form(optimizer, recipe.optimizer)
    if recipe.optimizer_on_host:
        from vram_guard.techniques._optimizer_offload import on_host

        optimizer = on_host(optimizer)
    return optimizer


def step_where(optimizers: Iterable[torch.optim.Optimizer], recipe: Recipe) -> Callable[[], None]:
    """Let the finished optimizers step in the backward pass, where the recipe wants that.

    Returns:
        A function after which they step as before.

    Raises:
        UnsupportedTechniqueError: an optimizer that cannot; nothing was changed.
    """
    if not recipe.optimizer_in_backward:
        return _nothing
    from vram_guard.techniques._optimizer_in_backward import step_in_backward

    return step_in_backward(optimizers)


def import_libraries(recipe: Recipe) -> None:
    """Import what the recipe is applied by: such libraries ask for the GPU when they are imported.

    Raises:
        MissingLibraryError: one of them is not installed.
        UnsupportedTechniqueError: this torch does not have what a technique is applied by.
    """
    if recipe.frozen_on_host:
        from vram_guard.techniques.frozen import accelerate_hooks

        accelerate_hooks()
    if recipe.parameters_on_host:
        from vram_guard.techniques.sharding import check_torch

        check_torch()
    if recipe.optimizer == "8bit":
        from vram_guard.techniques.optimizers import eight_bit_classes

        eight_bit_classes()
    if recipe.optimizer_on_host:
        from vram_guard.techniques._optimizer_offload import host_optimizer

        host_optimizer()


def _nothing() -> None:
    """There is nothing to take away."""
