"""Real tensors that a step writes to are put back: a trace changes nothing of the user's."""

from __future__ import annotations

import torch


class UndoLog:
    """The contents of real tensors (averages of weights, counters, metrics) before the traced step wrote to them."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def before_write(self, tensor: object) -> None:
        """Keep a copy of the tensor, once."""
        if isinstance(tensor, torch.Tensor) and id(tensor) not in self._before:
            self._before[id(tensor)] = (tensor, tensor.detach().clone())

    def restore(self) -> None:
        """Every tensor holds again what it held: the last write first, for views share memory."""
        with torch.no_grad():
            for tensor, content in reversed(self._before.values()):
                if tensor.shape == content.shape:
                    tensor.detach().copy_(content)
        self._before.clear()
