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
class LaunchPlan:
    """Changes to a script's processes, every rank the same.

    Attributes:
        models: how many models the names in ``recipe`` speak of: of several, names begin with their number.
        recipe: the techniques.
        by_itself: whether the script trains without Accelerate.
    """

    models: int = 1
    recipe: Recipe = AS_WRITTEN
    by_itself: bool = False

    @property
    def within(self) -> bool:
        """True if something is changed inside the processes, not by their environment alone."""
        return bool(self.recipe.with_(expandable_segments=False))
