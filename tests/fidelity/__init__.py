"""Trainings with and without the guard, in every mode that applies: none may differ in silence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def SUITES() -> Iterator[tuple[Any, list[Any]]]:  # noqa: N802 - as a constant that imports frameworks late
    """Every framework's suite with its cases."""
    from . import lightning, lightning_losses

    for module in (lightning_losses,):
        yield lightning.SUITE, lightning.of(module)
