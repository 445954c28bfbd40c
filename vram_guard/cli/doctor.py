"""``vram-guard doctor``: what was found on this machine."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from vram_guard import __version__
from vram_guard.cli.exits import EXIT_DONE, EXIT_ENVIRONMENT
from vram_guard.cli.printing import in_words, print_columns, print_json
from vram_guard.errors import DeviceQueryError, NoDeviceError, VramGuardError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


def add(commands: Any) -> None:
    """The parser of ``doctor``."""
    parser = commands.add_parser("doctor", help="what was found on this machine", description=_doctor.__doc__)
    parser.add_argument("--json", action="store_true", help="answer as JSON")
    parser.set_defaults(run=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    """Say what was found here: torch, the GPU and what is free on it, host memory, settings, frameworks."""
    facts = _diagnosis()
    if options.json:
        print_json(facts)
    else:
        print_columns([(name.replace("_", " "), in_words(value)) for name, value in facts.items()], left=2)
    return EXIT_ENVIRONMENT if facts["gpu_unreadable"] else EXIT_DONE


def _diagnosis() -> dict[str, Any]:
    import platform

    import torch

    gpu, unreadable = _gpu_at_hand()
    return {
        "vram_guard": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gpu": gpu,
        "gpu_unreadable": unreadable,
        "host_memory": _host_memory(),
        "allocator_settings": _allocator_settings(),
        **{f"integration {name}": state for name, state in sorted(_integrations().items())},
    }


def _gpu_at_hand() -> tuple[str, bool]:
    """What there is to plan with here, and whether a GPU is there that cannot be read. No GPU is a normal case."""
    from vram_guard.budget import Budget

    try:
        return Budget.resolve().explain(), False
    except NoDeviceError as error:
        return str(error), False
    except DeviceQueryError as error:
        return str(error), True


def _host_memory() -> str:
    from vram_guard.budget import host_memory
    from vram_guard.units import format_bytes

    try:
        host = host_memory()
    except DeviceQueryError as error:
        return str(error)
    return f"{format_bytes(host.available)} free of {format_bytes(host.total)} ({host.limited_by})"


def _allocator_settings() -> str:
    """What the environment makes of the caching allocator's settings."""
    from vram_guard.allocator import AllocatorSettings

    try:
        settings = AllocatorSettings.from_environment()
    except VramGuardError as error:
        return str(error)
    return "PyTorch's defaults" if settings == AllocatorSettings() else str(settings)


def _integrations() -> dict[str, str]:
    """Framework -> whether its adapter can be used, from the entry points of installed distributions."""
    from importlib.metadata import entry_points

    return {entry.name: _adapter_state(entry) for entry in entry_points(group="vram_guard.integrations")}


def _adapter_state(entry: EntryPoint) -> str:
    try:
        adapter = entry.load()
        for name in adapter.__all__:
            getattr(adapter, name)
    except ImportError as error:
        return str(error)
    return "ready"
