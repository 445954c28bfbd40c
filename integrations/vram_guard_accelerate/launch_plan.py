"""The launch plan: what the processes of a launch change. Plain values, which travel in an environment variable."""

from __future__ import annotations

from dataclasses import dataclass

from vram_guard.techniques.recipe import AS_WRITTEN, Recipe

#: Where the processes of a launch find their plan, as :mod:`vram_guard.codec` writes it.
VARIABLE = "VRAM_GUARD_LAUNCH_PLAN"

#: Tells a dry run that it runs before the processes of its launch: what they read when they start may still be set.
BEFORE_START = "VRAM_GUARD_BEFORE_START"

#: Tells a dry run whether the launch will train on the CPU: ``ACCELERATE_USE_CPU`` as the launch has it.
ON_CPU = "VRAM_GUARD_ON_CPU"


@dataclass(frozen=True)
class LoaderPlace:
    """The training's loaders, by where the script makes them."""

    place: str = ""
    """The file and line."""
    number: int = 0
    """Of a loader among those made there for one training, from 0."""
    of: int = 1
    """Loaders that are made there for one training."""


@dataclass(frozen=True)
class LaunchPlan:
    """Changes to a script's processes, every rank the same.

    Attributes:
        precision: "fp16" or "bf16" in place of none; "" leaves the script's own.
        batch_size: samples that the training loader delivers, as the script makes it.
        grown_batch_size: the same under a larger batch; equal to ``batch_size`` where it stays.
        batch_option: the script's own option that is set to ``grown_batch_size``; "": the loader is made larger.
        loader: the training's loader, among those that the script makes.
        learning_rate_factor: what every learning rate is multiplied by.
        models: how many models the names in ``recipe`` speak of: of several, names begin with their number.
        recipe: the techniques beyond precision.
        by_itself: whether the script trains without Accelerate.
    """

    precision: str = ""
    batch_size: int = 1
    grown_batch_size: int = 1
    batch_option: str = ""
    loader: LoaderPlace = LoaderPlace()
    learning_rate_factor: float = 1.0
    models: int = 1
    recipe: Recipe = AS_WRITTEN
    by_itself: bool = False

    @property
    def within(self) -> bool:
        """True if something is changed inside the processes, not by their options alone."""
        recipe = self.recipe.with_(expandable_segments=False)
        return bool(recipe) or bool(self.precision)

    def script_arguments(self) -> list[str]:
        """Words for the script's own command line; the last of two equal options counts."""
        return option_words((self.batch_option, self.grown_batch_size))


def option_words(*options: tuple[str, object]) -> list[str]:
    """Options with their values as they are typed, without those that have no name."""
    return [word for option, value in options if option for word in (option, str(value))]
