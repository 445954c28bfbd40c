"""Gradients of earlier batches, kept out of the way of a backward that may break.

Backward adds into ``.grad`` parameter by parameter. Where it stops half-way, sums are polluted, and the batches
they came from are gone. So, while recovery is armed, what is there before a batch's first backward is set aside;
the batch gathers its own gradients, and once they are complete they are added to what was set aside, with the
same single addition that autograd would have made. Without accumulation over batches there is nothing to
set aside, and nothing is done.

Cost: where batches are accumulated, a second set of gradients lives at the end of each backward but the first
(when most activations are gone). The other ways cost more: a copy on the host moves all gradients over the bus
and back once a batch, and replaying the earlier batches needs those batches.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch


class SetAside:
    """The gradients that one batch finds, from before its first backward until its own are complete."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._held: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        self._begun = False

    def begin(self) -> None:
        """Set aside what is there; a second call does nothing."""
        if self._begun:
            return
        self._begun = True
        for parameter in self._parameters:
            if parameter.grad is not None:
                self._held.append((parameter, parameter.grad))
                parameter.grad = None

    def put_back(self) -> None:
        """As before the batch: its own gradients, complete or not, are dropped."""
        if not self._begun:
            return
        for parameter in self._parameters:
            parameter.grad = None
        for parameter, held in self._held:
            parameter.grad = held
        self._forget()

    @torch.no_grad()
    def merge(self) -> None:
        """The batch's own gradients are complete: add them to what was set aside. Allocates nothing."""
        for parameter, held in self._held:
            if parameter.grad is None:
                parameter.grad = held
            elif held.is_sparse:  # as autograd: a sparse sum has another number of values
                parameter.grad = parameter.grad + held
            else:
                parameter.grad = held.add_(parameter.grad)
        self._forget()

    def _forget(self) -> None:
        self._held.clear()
        self._begun = False
