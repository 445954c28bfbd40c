"""Trainings with and without the guard, in every mode that applies: none may differ in silence."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from typing import Any

LIGHTNING = ("losses", "state", "blocks", "hooks", "batches", "loaders", "trainers", "unseen", "later", "hidden")


def of_lightning(name: str) -> list[Any]:
    """The cases that a module registers."""
    from . import lightning

    return lightning.of(importlib.import_module(f"{__name__}.lightning_{name}"))


def suites() -> Iterator[tuple[Any, list[Any]]]:
    """Every framework's suites with their cases."""
    from . import bridge, lightning

    for name in LIGHTNING:
        yield lightning.SUITE, of_lightning(name)
    for name in ("mmengine", "accelerate") if hasattr(os, "fork") else ("mmengine",):
        framework = importlib.import_module(f"{__name__}.{name}")
        importlib.import_module(f"{__name__}.{name}_cases")
        yield framework.SUITE, framework.CASES
        yield framework.BRIDGED, list(map(framework.of_lightning, bridge.bridged()))
