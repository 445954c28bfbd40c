"""Recipes in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vram_guard.techniques.recipe import Recipe

_FORMS = {"fused": "fused optimizer", "for-loop": "optimizer without foreach", "8bit": "8-bit optimizer states"}


def recipe_words(recipe: Recipe) -> list[str]:
    """The techniques that are on, each in a few words."""
    words = []
    if recipe.checkpoint:
        words.append(f"{counted(recipe.checkpoint)} checkpointed")
    words += offload_words(recipe)
    if recipe.optimizer != "as-written":
        words.append(_FORMS[recipe.optimizer])
    return words


def offload_words(recipe: Recipe) -> list[str]:
    """What waits in host memory."""
    words = []
    if recipe.offload_activations:
        words.append(f"activations of {counted(recipe.offload_activations)} on the host")
    if recipe.frozen_on_host:
        words.append(f"{', '.join(recipe.frozen_on_host)} (frozen) on the host")
    if recipe.optimizer_on_host:
        words.append("optimizer on the host")
    if recipe.parameters_on_host:
        words.append("parameters on the host (FSDP2)")
    return words


def counted(modules: tuple[str, ...]) -> str:
    """The names where there are few, else how many, and which."""
    if modules == ("",):
        return "the whole model"
    if len(modules) <= 3:
        return ", ".join(modules)
    return f"{len(modules)} blocks"


def ranges(modules: tuple[str, ...]) -> str:
    """The names, runs of numbers joined: "h.0-7, head"."""
    runs: list[tuple[str, int, int]] = []
    for name in modules:
        stem, _, last = name.rpartition(".")
        number = int(last) if last.isdigit() else -1
        if runs and number >= 0 and runs[-1][0] == stem and runs[-1][2] == number - 1:
            runs[-1] = (stem, runs[-1][1], number)
        elif number >= 0:
            runs.append((stem, number, number))
        else:
            runs.append((name, -1, -1))
    return ", ".join(_run(*run) for run in runs)


def _run(stem: str, first: int, last: int) -> str:
    if first < 0:
        return stem
    start = f"{stem}.{first}" if stem else str(first)
    return start if first == last else f"{start}-{last}"
