"""The gradients of the slices of one batch, added up as they come."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class SummedGradients:
    """Gradients of a batch's inputs and of a model's parameters, from those of its slices.

    Args:
        given: the inputs whose gradient is asked for, whole; the parameters' gradients stand behind theirs.
    """

    def __init__(self, given: Sequence[torch.Tensor]) -> None:
        self._given = given
        self._sums: list[torch.Tensor | None] | None = None

    def take(self) -> list[torch.Tensor | None] | None:
        """The sums, once; None where nothing was added."""
        sums, self._sums = self._sums, None
        return sums

    def go_on_from(self, sums: list[torch.Tensor | None]) -> None:
        """Add to these sums from here on."""
        self._sums = sums

    def add(
        self, gradients: list[torch.Tensor | None], first: int, samples: int, others: set[int] | None = None
    ) -> None:
        """Add a slice's gradients: those of inputs to their rows, those of parameters to their sum.

        Args:
            gradients: of inputs and parameters; emptied.
            first: the slice's first sample.
            samples: of the slice.
            others: memory with another owner, see :func:`memory_of`.
        """
        others = set() if others is None else others
        if self._sums is None:
            self._sums = [None] * len(gradients)
        for at in range(len(gradients)):
            gradient, gradients[at] = gradients[at], None  # each dies as soon as it is added
            if gradient is None:
                continue
            if at < len(self._given) and gradient.dim() and len(gradient) == samples != len(self._given[at]):
                whole = self._sums[at]
                if whole is None:
                    whole = self._sums[at] = torch.zeros_like(self._given[at])
                whole[first : first + samples] += gradient
            elif self._sums[at] is None:
                # Where two parameters are added, autograd hands out one tensor as the gradient of both.
                shared = memory_of(gradient) in others or 0 in gradient.stride()
                others.add(memory_of(gradient))
                self._sums[at] = gradient.clone(memory_format=torch.contiguous_format) if shared else gradient
            else:
                self._sums[at].add_(gradient)  # type: ignore[union-attr]


def memory_of(tensor: torch.Tensor) -> int:
    """Equal for tensors that lie in the same memory, as long as they live."""
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - a storage has one key, and it is private
