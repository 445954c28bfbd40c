"""Arguments of a guard from one table: those that are advanced stand in ``advanced={...}``."""

from __future__ import annotations

from typing import Any

from vram_guard.guard.settings import ADVANCED


def in_advanced(given: dict[str, Any]) -> dict[str, Any]:
    """The same settings, as a guard takes them."""
    advanced = {name: value for name, value in given.items() if name in ADVANCED}
    own = {name: value for name, value in given.items() if name not in advanced}
    return {**own, "advanced": {**own.get("advanced", {}), **advanced}} if advanced else own
