"""Lightning's precision plugins: for the device that really trains, and for the precision that a trace runs in."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import torch

from vram_guard.simulate.tracing.loop import TRUE_DTYPES
from vram_guard_lightning import _namespaces


def plugin(namespace: ModuleType, precision: str, device: str, **options: Any) -> Any:
    """Lightning's own plugin for a precision that is not "32-true"."""
    if precision.endswith("-true"):
        return _namespaces.part(namespace, "plugins.precision.HalfPrecision")(precision)
    return _namespaces.part(namespace, "plugins.precision.MixedPrecision")(precision, device, **options)


def plugin_of_trace(trainer: Any, region: AbstractContextManager[Any]) -> Any:
    """The plugin for whatever precision is being traced, on the simulated GPU.

    Args:
        trainer: whose precision may be another one.
        region: the one in which the step's forward runs.
    """
    given = trainer.precision_plugin
    if _namespaces.is_a(given, "plugins.precision.FSDPPrecision"):
        return given
    namespace = _namespaces.of(trainer)
    true = next((name for name, dtype in TRUE_DTYPES.items() if dtype == torch.get_default_dtype()), None)
    if true is not None:
        return plugin(namespace, true, "cuda")
    with region:
        mixed = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    if mixed is None:
        return _namespaces.part(namespace, "plugins.precision.Precision")()
    if mixed == torch.float16:  # of a scaler only its state is asked for: the trace scales the loss itself
        return plugin(namespace, "16-mixed", "cuda", scaler=torch.amp.GradScaler("cuda"))
    return plugin(namespace, "bf16-mixed", "cuda")
