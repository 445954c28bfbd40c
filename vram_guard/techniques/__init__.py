"""Techniques: each way to run a step in less memory, installed by the library that really does it."""

from __future__ import annotations

from vram_guard.techniques.recipe import AS_WRITTEN, OPTIMIZER_FORMS, OptimizerForm, Recipe

__all__ = ["AS_WRITTEN", "OPTIMIZER_FORMS", "OptimizerForm", "Recipe"]
