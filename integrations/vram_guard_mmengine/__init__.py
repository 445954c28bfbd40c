"""vram_guard for MMEngine: one line in a config's ``_base_``, or one ``--cfg-options``."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vram_guard_mmengine.hook import VramGuardHook
    from vram_guard_mmengine.runner import GuardFlexibleRunner, GuardRunner

__all__ = ["GuardFlexibleRunner", "GuardRunner", "VramGuardHook"]

_HOME = {"GuardFlexibleRunner": "runner", "GuardRunner": "runner", "VramGuardHook": "hook"}


def __getattr__(name: str) -> object:
    """Import MMEngine only when one of its classes is asked for (PEP 562).

    Raises:
        ImportError: MMEngine is not here, or cannot be imported; the message says what to install.
    """
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import_module("mmengine.runner")
    except ModuleNotFoundError as error:
        if error.name == "pkg_resources":
            raise ImportError(
                "mmengine needs pkg_resources, which setuptools 81 dropped: pip install 'setuptools<81'"
            ) from error
        raise ImportError(
            "vram_guard_mmengine needs MMEngine, which is not here: pip install 'vram-guard[mmengine]'"
        ) from error
    value: object = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def add_commands(commands: Any) -> None:
    """What ``vram-guard`` offers for MMEngine; ``commands`` is argparse's collection of subcommands."""
    from vram_guard_mmengine.commands import add

    add(commands)
