"""The settings of VramGuard, checked before any work."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from vram_guard.plan.checks import Mode, check_amounts, check_growth, check_loss_weight, check_mode, check_switches

if TYPE_CHECKING:
    from vram_guard.budget import Budget
    from vram_guard.plan.pins import Pins


@dataclass(frozen=True)
class Settings:
    """See :class:`vram_guard_lightning.VramGuard`, whose arguments these are."""

    budget: Budget | str | int | None
    gpu: str | None
    margin: float | None
    allow: Iterable[str]
    """A frozenset after the check."""
    mode: Mode
    grow: bool
    target_utilization: float
    lr_rule: str
    loss_weight: Literal["mean", "sum"] | Callable[[Any], Any]
    pin: Mapping[str, Any] | Pins | None = None
    """Pins after the check."""
    blocks: Iterable[str] | None = None
    host_budget: str | int | None = None
    named: frozenset[str] = frozenset()
    """What ``allow`` names one by one: of those, a refusal is always told."""
    recover: bool = True
    max_recoveries: int = 8
    remember: bool = True
    monitor: float | None = None

    def __post_init__(self) -> None:
        from vram_guard.plan.pins import Pins
        from vram_guard.plan.techniques import checked_techniques
        from vram_guard.step import checked_count

        object.__setattr__(self, "pin", Pins.of(self.pin))
        if self.blocks is not None:
            object.__setattr__(self, "blocks", tuple(self.blocks))
        given = self.allow.split(",") if isinstance(self.allow, str) else tuple(self.allow)
        object.__setattr__(self, "allow", checked_techniques(given))
        object.__setattr__(self, "named", frozenset(name.strip() for name in given))
        check_amounts(self.budget, self.gpu, self.margin, self.host_budget)
        check_growth(self.target_utilization, self.lr_rule)
        check_mode(self.mode)
        check_loss_weight(self.loss_weight)
        check_switches(grow=self.grow, recover=self.recover, remember=self.remember)
        checked_count("max_recoveries", self.max_recoveries)
        if self.monitor is not None:
            from vram_guard.watch.monitor import checked_interval

            object.__setattr__(self, "monitor", checked_interval(self.monitor))
