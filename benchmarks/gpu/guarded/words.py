"""Random words for GPT-2, the same in every run."""

from __future__ import annotations

import torch

LENGTH = 512
VOCABULARY = 50_257


class Words(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences of random words, each with itself as its labels."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}
