"""State that a model moves on by itself in every training call: counters, queues, averages."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from vram_guard.apply.sliced_forward import ITEMS_IN_BATCH
from vram_guard.proof.step_state import StepState, numbers_in
from vram_guard.tensors import version_of
from vram_guard_accelerate.dry_run._model_calls import single_samples
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


class ChangesInCalls:
    """What models hold otherwise after one of their own calls, also deep inside their attributes and weights.

    The first call of each is looked at, and the first one after an optimizer step: what is made on first use moves on
    in the second.
    """

    def __init__(self) -> None:
        self._before: dict[int, StepState] = {}
        self._compared: set[tuple[int, bool]] = set()
        self._names: dict[str, None] = {}
        self.numbers: set[tuple[str, str]] = set()
        """Numbers that the first call of each is given and finds, but for the count that its loss is divided by."""

    def begin(self, model: nn.Module, called: dict[str, Any], samples: int, *, stepped: bool) -> None:
        """Before a call.

        Args:
            model: that is called.
            called: its arguments by name.
            samples: of the training's batch.
            stepped: whether an optimizer has stepped.
        """
        if model.training and (id(model), stepped) not in self._compared:
            self._compared.add((id(model), stepped))
            state = self._before[id(model)] = StepState(model, None)
            if not stepped:
                parts = single_samples(called, samples) or ()
                # What is one number for each sample of a list is not of the whole batch.
                of_all = set.intersection(*map(_numbers_given, (called, *(part.data for part in parts[:1]))))
                self.numbers.update((*state.numbers(), *of_all))

    def end(self, model: nn.Module, written: Container[int]) -> None:
        """After it.

        Args:
            model: that was called.
            written: storages that were written in place in its first call.
        """
        state = self._before.pop(id(model), None)
        if state is not None:
            self._names.update(dict.fromkeys(state.written(written)))
            if (id(model), True) in self._compared:
                self._names.update(dict.fromkeys(name for name, _shape in state.changed()))
            self._names.update(dict.fromkeys(f"{name} ({kind})" for name, kind in state.beyond.items()))

    @property
    def names(self) -> tuple[str, ...]:
        """Of what has changed, and of what may have and cannot be looked into."""
        return tuple(self._names)


def _numbers_given(called: Mapping[str, Any]) -> set[tuple[str, str]]:
    return set(numbers_in({name: one for name, one in called.items() if name != ITEMS_IN_BATCH}, "batch"))
