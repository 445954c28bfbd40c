"""vram_guard for Accelerate: ``vram-guard launch script.py``, and ``guard`` for those who edit their script."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vram_guard_accelerate._script_guard import guard

__all__ = ["guard"]


def __getattr__(name: str) -> object:
    """Import Accelerate only when the guard is asked for (PEP 562)."""
    if name != "guard":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vram_guard_accelerate._script_guard import guard

    globals()[name] = guard
    return guard
