"""Arguments of ``plan`` from a table's row: those that are options stand in a ``PlanOptions``."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from vram_guard.plan import PlanOptions


def in_options(given: dict[str, Any]) -> dict[str, Any]:
    own = {name: value for name, value in given.items() if name in {one.name for one in fields(PlanOptions)}}
    return {**{name: value for name, value in given.items() if name not in own}, "options": PlanOptions(**own)}
