"""Lengths of packed sequences that a step has computed: cuDNN takes them from the host, as numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from vram_guard.language import Message
from vram_guard.patching import replaced
from vram_guard.simulate.device import constants
from vram_guard.simulate.device.symbolic import is_symbolic
from vram_guard.simulate.memory.recorder import Recorder


@contextlib.contextmanager
def lengths_known(recorder: Recorder) -> Iterator[None]:
    """Inside the block symbolic lengths are those of the batch, or the longest one where they are not known."""
    functions = torch._VF
    original = functions._pack_padded_sequence

    def packed(padded: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> tuple[torch.Tensor, torch.Tensor]:
        if is_symbolic(lengths):
            value = constants.compute(lengths)
            if value is None:
                recorder.note(
                    Message(
                        "the lengths of packed sequences are not known: all are taken to be as long as the longest"
                    ),
                    tier="partly symbolic",
                )
                value = torch.full(lengths.shape, padded.shape[int(batch_first)], dtype=torch.int64, device="cpu")
            lengths = value
        made: tuple[torch.Tensor, torch.Tensor] = original(padded, lengths, batch_first)
        return made

    with replaced(functions, {"_pack_padded_sequence": packed}):
        yield
