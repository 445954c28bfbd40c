"""The settings of the guard, as a config's ``vram_guard = dict(...)`` has them, checked before any work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vram_guard.errors import InvalidInputError
from vram_guard.guard.settings import GuardSettings, suggestion
from vram_guard.language import _

#: MMEngine's names of hook positions (``mmengine.runner.Priority``); numbers from 0 to 100 will do as well.
PRIORITIES = (
    *("HIGHEST", "VERY_HIGH", "HIGH", "ABOVE_NORMAL", "NORMAL"),
    *("BELOW_NORMAL", "LOW", "VERY_LOW", "LOWEST"),
)


@dataclass(frozen=True, kw_only=True)
class HookSettings(GuardSettings):
    """See :class:`vram_guard_mmengine.VramGuardHook`, whose arguments these are."""

    recover: bool = False
    priority: str | int = "VERY_HIGH"

    def __post_init__(self) -> None:
        super().__post_init__()
        checked_priority(self.priority)


def of_config_and_hook(config: Mapping[str, Any], hook: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a config's ``vram_guard`` and those of a hook in it, which may each have some.

    Raises:
        InvalidInputError: both have the same setting, with different values.
    """
    for name in hook:
        if name in config and config[name] != hook[name]:
            raise InvalidInputError(
                _(
                    "the config sets the guard's {name} twice: {first} in vram_guard, {second} in its VramGuardHook; "
                    "keep one of them",
                    name=name,
                    first=repr(config[name]),
                    second=repr(hook[name]),
                )
            )
    return {**config, **hook}


def checked_priority(priority: object) -> str | int:
    """A position among the hooks, as MMEngine takes it.

    Raises:
        InvalidInputError: an unknown name, or a number outside 0 to 100.
    """
    if isinstance(priority, str) and priority.upper() in PRIORITIES:
        return priority
    if isinstance(priority, int) and not isinstance(priority, bool) and 0 <= priority <= 100:
        return priority
    raise InvalidInputError(
        _(
            "priority must be one of {known} or a number from 0 to 100, not {value}",
            known=", ".join(PRIORITIES),
            value=repr(priority),
        )
        + suggestion(str(priority).upper(), PRIORITIES)
    )
