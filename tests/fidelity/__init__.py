"""Trainings with and without the guard, in every mode that applies: none may differ in silence."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

LIGHTNING = ("losses", "state", "blocks", "hooks", "batches", "loaders", "trainers", "unseen", "later", "hidden")


def suites() -> Iterator[tuple[Any, list[Any]]]:
    """Every framework's suite with its cases."""
    from . import lightning

    for name in LIGHTNING:
        yield lightning.SUITE, lightning.of(importlib.import_module(f"{__name__}.lightning_{name}"))
    from . import mmengine

    importlib.import_module(f"{__name__}.mmengine_cases")
    yield mmengine.SUITE, mmengine.CASES
