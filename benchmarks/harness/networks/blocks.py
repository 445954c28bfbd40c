"""Modules in a row, with activation checkpointing on request."""

from __future__ import annotations

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Blocks(nn.Module):
    """Modules in a row, each of them checkpointed on request."""

    def __init__(self, *modules: nn.Module, checkpointing: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(modules)
        self.checkpointing = checkpointing

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        return x
