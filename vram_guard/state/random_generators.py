"""Random number generators of this process, saved and put back: torch's, NumPy's and Python's."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, TypeAlias

import torch

_Generator: TypeAlias = "tuple[Callable[[], Any], Callable[[Any], object]]"
"""Getter and setter of a generator's state."""


class RandomState:
    """The state of every process-wide generator at this moment, and of those that are handed in.

    Args:
        devices: those whose CUDA generators are saved too; other devices are ignored.
        generators: further generators of torch.
        of_torch: False leaves out torch's own generator for the CPU.
    """

    def __init__(
        self,
        devices: Iterable[torch.device] = (),
        generators: Iterable[torch.Generator] = (),
        *,
        of_torch: bool = True,
    ) -> None:
        self._generators = tuple(_generators(devices, generators, of_torch=of_torch))
        self._states = self._now()

    def is_current(self) -> bool:
        """True if nothing was drawn since."""
        return all(_comparable(a) == _comparable(b) for a, b in zip(self._states, self._now(), strict=True))

    def restore(self) -> None:
        """Put all generators back."""
        self._set(self._states)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Draw the same numbers once more inside the block; afterwards the generators go on where they were."""
        now = self._now()
        self.restore()
        try:
            yield
        finally:
            self._set(now)

    def _now(self) -> list[Any]:
        return [get() for get, _ in self._generators]

    def _set(self, states: list[Any]) -> None:
        for (_, put), state in zip(self._generators, states, strict=True):
            put(state)


@contextlib.contextmanager
def random_state_kept() -> Iterator[None]:
    """The generators of torch (CPU), NumPy and Python are afterwards what they were before."""
    before = RandomState()
    try:
        yield
    finally:
        before.restore()


def _comparable(state: Any) -> Any:
    """A state without arrays, which answer ``==`` element by element."""
    if isinstance(state, tuple):  # Python's is one of numbers, NumPy's has an array in it
        return tuple(part.tobytes() if hasattr(part, "tobytes") else part for part in state)
    return state.numpy().tobytes()


def _generators(
    devices: Iterable[torch.device], handed_in: Iterable[torch.Generator], *, of_torch: bool
) -> Iterator[_Generator]:
    if of_torch:
        yield torch.get_rng_state, torch.set_rng_state
    yield random.getstate, random.setstate
    if (numpy := sys.modules.get("numpy")) is not None:  # nobody draws from what is not imported
        yield numpy.random.get_state, numpy.random.set_state
    for device in devices:
        if device.type == "cuda":
            yield partial(torch.cuda.get_rng_state, device), partial(torch.cuda.set_rng_state, device=device)
    for generator in handed_in:
        yield generator.get_state, generator.set_state
