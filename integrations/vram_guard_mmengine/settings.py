"""The settings of the guard, as a config's ``vram_guard = dict(...)`` has them, checked before any work."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any, Literal

from vram_guard.errors import InvalidInputError
from vram_guard.plan.checks import Mode, check_amounts, check_growth, check_loss_weight, check_mode, check_switches

#: MMEngine's names of hook positions (``mmengine.runner.Priority``); numbers from 0 to 100 will do as well.
PRIORITIES = (
    *("HIGHEST", "VERY_HIGH", "HIGH", "ABOVE_NORMAL", "NORMAL"),
    *("BELOW_NORMAL", "LOW", "VERY_LOW", "LOWEST"),
)
DEFAULT_PRIORITY = "VERY_HIGH"


@dataclass(frozen=True)
class Settings:
    """See :class:`vram_guard_mmengine.VramGuardHook`, whose arguments these are."""

    budget: str | int | None = None
    gpu: str | None = None
    margin: float | None = None
    allow: Iterable[str] | None = None
    """A frozenset after the check."""
    pin: Mapping[str, Any] | None = None
    blocks: Iterable[str] | None = None
    host_budget: str | int | None = None
    mode: Mode = "fit"
    grow: bool = False
    target_utilization: float = 0.8
    lr_rule: str = "linear"
    loss_weight: Literal["mean", "sum"] | Callable[[Any], Any] = "mean"
    recover: bool = False
    max_recoveries: int = 8
    remember: bool = True
    priority: str | int = DEFAULT_PRIORITY
    by_default: bool = field(default=True, init=False)
    """Whether the user left ``allow`` open."""

    def __post_init__(self) -> None:
        from vram_guard.plan.pins import Pins
        from vram_guard.step import checked_count

        object.__setattr__(self, "by_default", self.allow is None)
        object.__setattr__(self, "allow", _checked_allow(self.allow))
        check_amounts(self.budget, self.gpu, self.margin, self.host_budget)
        if self.blocks is not None:
            blocks = self.blocks
            object.__setattr__(self, "blocks", (blocks,) if isinstance(blocks, str) else tuple(blocks))
        Pins.of(self.pin)
        check_growth(self.target_utilization, self.lr_rule)
        check_mode(self.mode)
        check_loss_weight(self.loss_weight)
        check_switches(grow=self.grow, recover=self.recover, remember=self.remember)
        checked_count("max_recoveries", self.max_recoveries)
        checked_priority(self.priority)

    @classmethod
    def names(cls) -> list[str]:
        """What may be set."""
        return [one.name for one in fields(cls) if one.init]

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Settings:
        """Settings from the keys of a config.

        Raises:
            InvalidInputError: an unknown key (the message suggests the right one), or a value that makes no sense.
        """
        if not isinstance(given, Mapping):
            raise InvalidInputError(f"vram_guard must be a dict(...) in the config, not {given!r}")
        known = cls.names()
        for key in given:
            if key not in known:
                near = get_close_matches(str(key), known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise InvalidInputError(f"vram_guard: unknown key {key!r}, known are {', '.join(known)}{hint}")
        return cls(**given)


def _checked_allow(allow: Iterable[str] | None) -> frozenset[str]:
    from vram_guard.plan.techniques import DEFAULT_ALLOW, checked_techniques

    return checked_techniques(DEFAULT_ALLOW if allow is None else allow)


def checked_priority(priority: object) -> str | int:
    """A position among the hooks, as MMEngine takes it.

    Raises:
        InvalidInputError: an unknown name, or a number outside 0 to 100.
    """
    if isinstance(priority, str) and priority.upper() in PRIORITIES:
        return priority
    if isinstance(priority, int) and not isinstance(priority, bool) and 0 <= priority <= 100:
        return priority
    near = get_close_matches(str(priority).upper(), PRIORITIES, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise InvalidInputError(
        f"priority must be one of {', '.join(PRIORITIES)} or a number from 0 to 100, not {priority!r}{hint}"
    )
