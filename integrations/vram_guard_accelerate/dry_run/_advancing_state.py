"""State that a model moves on by itself in every training call: counters, queues, averages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from vram_guard.tensors import version_of
from vram_guard_accelerate.dry_run.first_batch import root_of


def state_of(models: Sequence[nn.Module]) -> dict[str, object]:
    """The attributes and buffers of models by name, as they can be compared without values; no running statistics."""
    found: dict[str, object] = {}
    for path, module in root_of(tuple(models)).named_modules():
        if not isinstance(module, nn.modules.batchnorm._NormBase):  # noqa: SLF001 - their common class is private
            for name, value in _of_module(module):
                found[f"{path}.{name}" if path else name] = value
    return found


def _of_module(module: nn.Module) -> Iterator[tuple[str, object]]:
    tensors = {**dict(module.named_buffers(recurse=False)), **vars(module)}
    for name, value in tensors.items():
        if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
            yield name, (id(value), version_of(value))
        elif name != "training" and isinstance(value, (bool, int, float, str)):
            yield name, value
        elif not name.startswith("_") and isinstance(value, (list, dict, set)):
            yield name, len(value)


def changed(before: dict[str, Any], after: dict[str, Any]) -> tuple[str, ...]:
    """The names of what is another state now."""
    return tuple(name for name, value in after.items() if before.get(name) != value)
