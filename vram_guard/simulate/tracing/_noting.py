"""What the operators of a trace write to and draw from, noted while a watched forward runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from vram_guard.simulate.memory.recorder import Recorder
from vram_guard.techniques.purity import Noted, number_of
from vram_guard.tensors import tensors_in


class OperatorNotes:
    """See :class:`vram_guard.techniques.purity.Operations`.

    Args:
        recorder: of the trace.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.open: list[tuple[int, set[int], Noted]] = []
        """Forwards that are running: blocks of the recorder and generators known when they began, and their notes."""
        self._generators: dict[int, torch.Generator] = {}
        self._written: dict[Any, tuple[tuple[int, ...], tuple[str, ...]]] = {}

    @property
    def measured(self) -> int:
        """The number of the optimizer step that is running, where it is looked at; else 0."""
        return self._recorder.measured

    @property
    def measured_step(self) -> int:
        """The step that counts."""
        return self._recorder.measured_step

    @contextlib.contextmanager
    def noted(self) -> Iterator[Noted]:
        """Note what operators do inside the block."""
        notes = Noted({}, {})
        self.open.append((self._recorder.blocks_so_far, set(self._generators), notes))
        try:
            yield notes
        finally:
            self.open.pop()

    def runs(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An operator is about to run."""
        generator = kwargs.get("generator")
        # Checkpointing puts torch's own back. An operator is handed another Python object for the same generator.
        if generator is not None and (key := number_of(generator)) != number_of(torch.default_generator):
            self._generators.setdefault(key, generator)
            for _, known, notes in self.open:
                notes.generators.setdefault(key, key in known)
        places = self._written.get(func)
        if places is None:
            places = self._written[func] = _written(func)
        positions, names = places
        if positions or names:
            targets = [*(args[at] for at in positions if at < len(args)), *map(kwargs.get, names)]
            for tensor in tensors_in(targets):
                self._writes(tensor)

    def _writes(self, tensor: torch.Tensor) -> None:
        if tensor.layout != torch.strided:
            return
        key = tensor.untyped_storage()._cdata
        block = self._recorder.block_of(key)
        for began, _, notes in self.open:
            if not notes.written.get(key):
                notes.written[key] = None if block is None else block < began


def _written(func: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The arguments that an operator writes to: positions, and names of those that go by keyword."""
    arguments = [(at, one) for at, one in enumerate(func._schema.arguments) if one.alias_info is not None]
    written = [(at, one) for at, one in arguments if one.alias_info.is_write]
    return (
        tuple(at for at, one in written if not one.kwarg_only),
        tuple(one.name for _, one in written if one.kwarg_only),
    )
