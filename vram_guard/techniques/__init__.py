"""Techniques: each way to run a step in less memory, installed by the library that really does it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from vram_guard.techniques.blocks import ModelBlock, find_blocks, named_blocks
from vram_guard.techniques.compatibility import incompatible
from vram_guard.techniques.placement import optimizer_for, place, step_where
from vram_guard.techniques.recipe import AS_WRITTEN, OPTIMIZER_FORMS, Body, OptimizerForm, Recipe, Sharding, Slices

if TYPE_CHECKING:
    from torch import nn

__all__ = [
    "AS_WRITTEN",
    "OPTIMIZER_FORMS",
    "Body",
    "ModelBlock",
    "OptimizerForm",
    "Recipe",
    "Sharding",
    "Slices",
    "find_blocks",
    "incompatible",
    "install",
    "named_blocks",
    "optimizer_for",
    "place",
    "step_where",
]


def install(model: nn.Module, recipe: Recipe) -> Callable[[], None]:
    """Switch on what the recipe asks of the model itself; all of it, or nothing.

    Where weights and optimizer states lie is decided before the model moves: :func:`place`, :func:`optimizer_for`.

    Returns:
        A function that takes everything off again.

    Raises:
        InvalidInputError: the recipe names a module that the model does not have.
        UnsupportedTechniqueError: this torch has no budget for what compiled code saves.
    """
    undo: list[Callable[[], None]] = []

    def take_off() -> None:
        while undo:
            undo.pop()()

    try:
        if recipe.checkpoint:
            from vram_guard.techniques._checkpointing import checkpoint_modules

            undo.append(checkpoint_modules(model, recipe.checkpoint, recipe.checkpoint_keeps))
        if recipe.offload_activations:
            from vram_guard.techniques._activation_offload import offload_activations

            undo.append(offload_activations(model, recipe.offload_activations))
        if recipe.slices is not None:
            from vram_guard.techniques._sliced import slice_module

            undo.append(slice_module(model, recipe.slices))
        if recipe.chunked_head:
            from vram_guard.techniques._chunked_loss import chunk_loss

            undo.append(chunk_loss(model, recipe.chunked_head))
    except BaseException:
        take_off()
        raise
    return take_off
