"""vram_guard for MMEngine: one line in a config's ``_base_``, or one ``--cfg-options``."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from vram_guard.language import _
from vram_guard.user_code import add_own_package

if TYPE_CHECKING:
    from vram_guard_mmengine._runner import GuardFlexibleRunner, GuardRunner
    from vram_guard_mmengine.hook import VramGuardHook

__all__ = ["GuardFlexibleRunner", "GuardRunner", "VramGuardHook"]

#: Packages that have to be there; of each group one.
NEEDS = (("mmengine",), ("pkg_resources",))

add_own_package(__file__)

_HOME = {"GuardFlexibleRunner": "_runner", "GuardRunner": "_runner", "VramGuardHook": "hook"}


def __getattr__(name: str) -> object:
    """Import MMEngine only when one of its classes is asked for (PEP 562).

    Raises:
        ImportError: MMEngine is not here, or cannot be imported; the message says what to install.
    """
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vram_guard.quiet import quiet_imports  # brings logging, which asking for help need not wait for

    try:
        with quiet_imports():
            import_module("mmengine.runner")
    except ModuleNotFoundError as error:
        if error.name == "pkg_resources":
            raise ImportError(
                _("mmengine needs pkg_resources, which setuptools 81 dropped: pip install 'setuptools<81'")
            ) from error
        raise ImportError(
            _("vram_guard_mmengine needs MMEngine, which is not installed: pip install mmengine 'setuptools<81'")
        ) from error
    value: object = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value
