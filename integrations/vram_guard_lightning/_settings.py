"""The settings of VramGuard, checked before any work."""

from __future__ import annotations

from dataclasses import dataclass

from vram_guard.guard.settings import GuardSettings
from vram_guard.watch.monitor import checked_interval


@dataclass(frozen=True, kw_only=True)
class CallbackSettings(GuardSettings):
    """See :class:`vram_guard_lightning.VramGuard`, whose arguments these are."""

    monitor: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.monitor is not None:
            self._keep("monitor", checked_interval(self.monitor))
