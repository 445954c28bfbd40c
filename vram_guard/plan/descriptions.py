"""Recipes in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vram_guard.language import _, marked

if TYPE_CHECKING:
    from vram_guard.techniques.recipe import Recipe

_FORMS = {
    "fused": marked("fused optimizer"),
    "for-loop": marked("optimizer without foreach"),
    "8bit": marked("8-bit optimizer states"),
}


#: Technique -> what it is called where it is refused.
_REFUSED = {
    "accumulate": "smaller micro-batches are",
    "precision": "mixed precision is",
    "grow": "a larger batch is",
    "fused": "a fused optimizer is",
    "offload_parameters": "parameters on the host are",
    "offload_optimizer": "an optimizer on the host is",
}


def not_possible(technique: str, why: str, *, where: str = " here") -> str:
    """One line for a technique that a training does not admit."""
    return f"{_REFUSED.get(technique, f'{technique} is')} not possible{where}: {why}"


def cheapest(factor: float) -> str:
    """The last reason of a plan that changes something: what the change costs, in step times as written."""
    return _(
        "The cheapest way that fits: {factor} times the step time as written, by a model of the GPU.",
        factor=f"{factor:.2f}",
    )


def recipe_words(recipe: Recipe) -> list[str]:
    """The techniques that are on, each in a few words."""
    words = []
    if recipe.checkpoint:
        words.append(_("{blocks} checkpointed", blocks=counted(recipe.checkpoint)))
    words += offload_words(recipe)
    if recipe.optimizer != "as-written":
        words.append(_(_FORMS[recipe.optimizer]))
    return words


def offload_words(recipe: Recipe) -> list[str]:
    """What waits in host memory."""
    words = []
    if recipe.offload_activations:
        words.append(_("activations of {blocks} on the host", blocks=counted(recipe.offload_activations)))
    if recipe.frozen_on_host:
        words.append(_("{modules} (frozen) on the host", modules=", ".join(recipe.frozen_on_host)))
    if recipe.optimizer_on_host:
        words.append(_("optimizer on the host"))
    if recipe.parameters_on_host:
        words.append(_("parameters on the host (FSDP2)"))
    return words


def optimizer_words(recipe: Recipe) -> str:
    """Which form of the optimizer runs, in a few words."""
    return _(_FORMS[recipe.optimizer]) if recipe.optimizer in _FORMS else _("as written")


def counted(modules: tuple[str, ...]) -> str:
    """The names where there are few, else how many, and which."""
    if modules == ("",):
        return _("the whole model")
    if len(modules) <= 3:
        return ", ".join(modules)
    return _("{count} blocks", count=len(modules))


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
