"""A plan as plain values: for the dumped config, the checkpoint's meta and the logs."""

from __future__ import annotations

from typing import Any

from vram_guard.plan import Plan
from vram_guard.techniques.recipe import AS_WRITTEN

#: Where a dumped config and a checkpoint's meta keep the plan.
CONFIG_KEY, META_KEY = "vram_guard_plan", "vram_guard"


def summary(plan: Plan, *, applied: bool) -> dict[str, Any]:
    """The plan and its predictions; bytes are ints."""
    techniques = {name: value for name, value in vars(plan.recipe).items() if value != getattr(AS_WRITTEN, name)}
    return {
        "applied": applied,
        "fits": plan.fits,
        "precision": plan.precision,
        "batch_size": plan.batch_size,
        "micro_batch_size": plan.micro_batch_size,
        "splits": plan.splits,
        "effective_batch_size": plan.effective_batch_size,
        "learning_rate_factor": float(plan.learning_rate_factor),
        "predicted_peak_reserved": plan.estimate.peak_reserved,
        "predicted_peak_reserved_as_written": plan.before.peak_reserved,
        "usable": plan.budget.usable,
        "techniques": {name: list(v) if isinstance(v, tuple) else v for name, v in techniques.items()},
    }
