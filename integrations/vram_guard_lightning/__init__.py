"""vram_guard for Lightning: ``Trainer(callbacks=[VramGuard()])``, in both of Lightning's namespaces."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vram_guard.user_code import add_own_package

if TYPE_CHECKING:
    from vram_guard_lightning._callback import VramGuard

__all__ = ["VramGuard"]

#: Packages that have to be there; of each group one.
NEEDS = (("lightning", "pytorch_lightning"),)

add_own_package(__file__)


def __getattr__(name: str) -> object:
    """Import Lightning only when the callback is asked for (PEP 562)."""
    if name != "VramGuard":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vram_guard_lightning._callback import VramGuard

    globals()[name] = VramGuard
    return VramGuard
