"""Lengths of packed sequences that a step brings from the GPU: those of the batch, or the longest, with a note."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from vram_guard.simulate import trace_at
from vram_guard.step import TrainingStep

LENGTHS = torch.tensor([30, 7, 21, 4])


class Packs(nn.Module):
    def __init__(self, lengths_from: str) -> None:
        super().__init__()
        self.words, self.recurrent = nn.Embedding(100, 64), nn.LSTM(64, 64, batch_first=True)
        self.lengths_from = lengths_from

    def forward(self, words: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        embedded = self.words(words)
        if self.lengths_from == "count":
            lengths = (words != 0).sum(1).cpu()
        elif self.lengths_from == "gpu":
            lengths = lengths.to("cuda").cpu()
        elif self.lengths_from == "weights":
            lengths = (embedded.detach().abs().sum((1, 2)) > 0).long().cpu() + 29
        packed = nn.utils.rnn.pack_padded_sequence(embedded, lengths, batch_first=True, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(self.recurrent(packed)[0], batch_first=True)[0]


def taken(lengths_from: str) -> Any:
    words = (torch.arange(30) < LENGTHS[:, None]).long()

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        made: torch.Tensor = model(batch[0], LENGTHS).square().mean()
        return made

    step = TrainingStep(Packs(lengths_from), lambda _size: (words,), loss, torch.optim.SGD)
    return trace_at(step, 4).at(4)


@pytest.mark.parametrize("lengths_from", ["gpu", "count"])
def test_lengths_that_follow_from_the_batch_are_known(lengths_from: str) -> None:
    assert taken(lengths_from).peak_allocated == taken("host").peak_allocated < taken("weights").peak_allocated


def test_lengths_that_nobody_knows_are_the_longest() -> None:
    assert taken("weights").tier == "partly symbolic"
    assert taken("gpu").tier == taken("host").tier
