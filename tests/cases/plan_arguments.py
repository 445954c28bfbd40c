"""Arguments of ``plan`` from a table's row: those that are options stand in a ``PlanOptions``."""

from __future__ import annotations

from typing import Any

from vram_guard.old_names import PLAN_OPTIONS
from vram_guard.plan import PlanOptions


def in_options(given: dict[str, Any]) -> dict[str, Any]:
    own = {name: value for name, value in given.items() if name in PLAN_OPTIONS}
    return {**{name: value for name, value in given.items() if name not in own}, "options": PlanOptions(**own)}
