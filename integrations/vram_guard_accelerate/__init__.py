"""vram_guard for Accelerate: ``vram-guard launch script.py``, and ``guard`` for those who edit their script."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vram_guard.language import _
from vram_guard.user_code import add_own_package

if TYPE_CHECKING:
    from vram_guard_accelerate._script_guard import guard

__all__ = ["guard"]

#: Packages that have to be there; of each group one.
NEEDS = (("accelerate",),)

add_own_package(__file__)


def __getattr__(name: str) -> object:
    """Import Accelerate only when the guard is asked for (PEP 562).

    Raises:
        ImportError: Accelerate is not here; the message says what to install.
    """
    if name != "guard":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from vram_guard_accelerate._script_guard import guard
    except ModuleNotFoundError as error:
        if error.name != "accelerate":
            raise
        raise ImportError(
            _("vram_guard_accelerate needs Accelerate, which is not installed: pip install accelerate")
        ) from error

    globals()[name] = guard
    return guard
