"""Learning rates under a larger batch: scaled once, after a checkpoint's were restored."""

from __future__ import annotations

from typing import Any

from vram_guard.apply.learning_rate import scale_learning_rates


def auto_scaled(runner: Any) -> bool:
    """Whether MMEngine itself scales the learning rate with the loader's batch size (``auto_scale_lr``)."""
    settings = getattr(runner, "auto_scale_lr", None) or runner.cfg.get("auto_scale_lr") or {}
    return bool(settings.get("enable", False))


def scale(runner: Any, factor: float) -> tuple[str, ...]:
    """Multiply every learning rate of this training; what could not be scaled, in words."""
    schedulers = runner.param_schedulers or []
    schedulers = [one for many in schedulers.values() for one in many] if isinstance(schedulers, dict) else schedulers
    # Momentum has schedulers of its own, which are of the same classes.
    driving = [scheduler for scheduler in schedulers if getattr(scheduler, "param_name", "lr") == "lr"]
    return scale_learning_rates(runner.optim_wrapper, driving, factor)
