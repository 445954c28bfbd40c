"""The settings of VramGuard, checked before any work."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from vram_guard.errors import InvalidInputError

if TYPE_CHECKING:
    from vram_guard.budget import Budget
    from vram_guard.plan.pins import Pins

Mode = Literal["fit", "report", "strict"]
MODES: tuple[str, ...] = get_args(Mode)


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
        from vram_guard.budget import Budget
        from vram_guard.budget.budget import checked_margin
        from vram_guard.plan.learning_rate import learning_rate_factor
        from vram_guard.plan.pins import Pins
        from vram_guard.plan.techniques import checked_techniques
        from vram_guard.step import checked_count
        from vram_guard.units import parse_bytes

        object.__setattr__(self, "pin", Pins.of(self.pin))
        if self.blocks is not None:
            object.__setattr__(self, "blocks", tuple(self.blocks))
        if self.host_budget is not None:
            parse_bytes(self.host_budget)
        given = self.allow.split(",") if isinstance(self.allow, str) else tuple(self.allow)
        object.__setattr__(self, "allow", checked_techniques(given))
        object.__setattr__(self, "named", frozenset(name.strip() for name in given))
        if self.margin is not None:
            checked_margin(self.margin)
        if self.budget is not None or self.gpu is not None:
            Budget.resolve(self.budget, self.gpu, self.margin)
        learning_rate_factor(self.lr_rule, 1, 1)
        target: object = self.target_utilization
        if isinstance(target, bool) or not isinstance(target, (int, float)) or not 0 < target <= 1:
            raise InvalidInputError(f"target_utilization must be above 0 and at most 1, such as 0.8, not {target!r}")
        if self.mode not in MODES:
            raise InvalidInputError(f"mode must be one of {', '.join(MODES)}, not {self.mode!r}")
        if not callable(self.loss_weight) and self.loss_weight not in ("mean", "sum"):
            raise InvalidInputError(
                f"loss_weight must be 'mean', 'sum' or a function of the batch, not {self.loss_weight!r}"
            )
        for name in ("grow", "recover", "remember"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidInputError(f"{name} must be True or False, not {getattr(self, name)!r}")
        checked_count("max_recoveries", self.max_recoveries)
        if self.monitor is not None:
            from vram_guard.watch.monitor import checked_interval

            object.__setattr__(self, "monitor", checked_interval(self.monitor))
