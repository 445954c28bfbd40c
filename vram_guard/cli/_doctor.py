"""``vram-guard doctor``: what was found on this machine."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from vram_guard import __version__
from vram_guard.cli.exits import EXIT_DONE, EXIT_ENVIRONMENT
from vram_guard.cli.options import add_options
from vram_guard.cli.printing import in_words, print_columns, print_json
from vram_guard.errors import DeviceQueryError, InvalidInputError, NoDeviceError, VramGuardError
from vram_guard.language import _, language, marked

if TYPE_CHECKING:
    from collections.abc import Iterator
    from importlib.metadata import EntryPoint


def add(commands: Any) -> None:
    """The parser of ``doctor``."""
    parser = commands.add_parser(
        "doctor",
        help=_("what was found on this machine, and where each setting comes from"),
        description=_(
            "Report what was found on this machine: torch, the GPU and its free memory, host memory, "
            "settings and where each of them comes from, frameworks."
        ),
    )
    add_options(parser, "json")
    parser.set_defaults(run=_doctor)


#: What the facts are called; what is not here has its own name.
_LABELS = {
    "gpu": marked("GPU"),
    "gpu_unreadable": marked("GPU unreadable"),
    "host_memory": marked("host memory"),
    "allocator_settings": marked("allocator settings"),
    "language": marked("language"),
    "disabled": marked("vram_guard is off"),
    "settings_problem": marked("settings unreadable"),
}


def _doctor(options: argparse.Namespace) -> int:
    """Say what was found here: torch, the GPU and what is free on it, host memory, settings, frameworks."""
    facts = _diagnosis()
    if options.json:
        print_json(facts)
    else:
        print_columns(list(_rows(facts)), left=2)
    return EXIT_ENVIRONMENT if facts["gpu_unreadable"] else EXIT_DONE


def _rows(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in facts.items():
        if name == "settings":
            for setting, found in value.items():
                shown = ", ".join(found["value"]) if isinstance(found["value"], tuple) else in_words(found["value"])
                label = _("setting {name}", name=setting)
                yield label, _("{value} (from {source})", value=shown, source=found["source"])
            if not value:
                yield _("settings"), _("none set: everything at its default")
        elif name == "unknown_variables":
            for variable, near in value.items():
                meant = _("not a setting; did you mean {near}?", near=near) if near else _("not a setting")
                yield variable, meant
        elif name.startswith("integration "):
            yield _("integration {name}", name=name.partition(" ")[2]), _(value) if value == "ready" else value
        elif value or name not in ("settings_problem", "gpu_unreadable"):  # which say only what is wrong
            yield _(_LABELS[name]) if name in _LABELS else name.replace("_", " "), in_words(value)


def _diagnosis() -> dict[str, Any]:
    import platform
    from importlib.metadata import version

    from vram_guard.settings import disabled

    gpu, unreadable = _gpu_at_hand()
    return {
        "vram_guard": __version__,
        "python": platform.python_version(),
        "torch": version("torch"),  # importing it takes seconds
        "gpu": gpu,
        "gpu_unreadable": unreadable,
        "host_memory": _host_memory(),
        "allocator_settings": _allocator_settings(),
        "language": language(),
        "disabled": disabled(),
        **_settings(),
        **{f"integration {name}": state for name, state in sorted(_integrations().items())},
    }


#: Variables of ours that are not settings: where measurements are kept, and what ``launch`` hands to its script.
_OTHER_VARIABLES = ("VRAM_GUARD_CACHE", "VRAM_GUARD_LAUNCH_PLAN")


def _settings() -> dict[str, Any]:
    """Every setting with its source, what is wrong with them, and variables that mean nothing."""
    import os

    from vram_guard.settings import settings, unknown_variables

    try:
        found, problem = settings(), None
    except InvalidInputError as error:
        found, problem = {}, str(error)
    return {
        "settings": {name: {"value": one.value, "source": one.source} for name, one in sorted(found.items())},
        "settings_problem": problem,
        "unknown_variables": unknown_variables(os.environ, _OTHER_VARIABLES),
    }


def _gpu_at_hand() -> tuple[str, bool]:
    """Description of the budget here, and whether a GPU is there that cannot be read. No GPU is a normal case."""
    from vram_guard.budget import Budget

    try:
        return Budget.resolve().explain(), False
    except NoDeviceError as error:
        return error.problem or str(error), False
    except DeviceQueryError as error:
        return str(error), True


def _host_memory() -> str:
    from vram_guard.budget import host_memory
    from vram_guard.units import format_bytes

    try:
        host = host_memory()
    except DeviceQueryError as error:
        return str(error)
    free, total = format_bytes(host.available), format_bytes(host.total)
    return _("{free} free of {total} ({source})", free=free, total=total, source=_(host.limited_by))


def _allocator_settings() -> str:
    """The caching allocator's settings in the environment."""
    from vram_guard.allocator import AllocatorSettings

    try:
        settings = AllocatorSettings.from_environment()
    except VramGuardError as error:
        return str(error)
    return _("PyTorch's defaults") if settings == AllocatorSettings() else str(settings)


def _integrations() -> dict[str, str]:
    """Framework -> whether its adapter can be used, from the entry points of installed distributions."""
    from importlib.metadata import entry_points

    return {entry.name: _adapter_state(entry) for entry in entry_points(group="vram_guard.integrations")}


def _adapter_state(entry: EntryPoint) -> str:
    """Whether what the adapter needs is installed. It is looked for and not imported: that takes seconds."""
    from importlib.util import find_spec

    adapter = entry.load()
    if all(any(map(find_spec, names)) for names in adapter.NEEDS):
        return marked("ready")
    try:
        for name in adapter.__all__:
            getattr(adapter, name)
    except ImportError as error:  # which says what to install
        return str(error)
    return marked("ready")
