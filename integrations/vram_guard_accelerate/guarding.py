"""``guard``: the same plan for a script that is edited, around ``prepare``."""

from __future__ import annotations

from typing import Any

from vram_guard_accelerate.settings import Settings


def guard(**settings: Any) -> Settings:
    """The checked settings."""
    return Settings.of(settings)
