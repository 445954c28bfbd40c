"""Batch normalisation that does not depend on how a batch is cut: by the running statistics, in training too."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from vram_guard.patching import replaced

if TYPE_CHECKING:
    from typing_extensions import Self

_batch_norm = torch.batch_norm


class FixedStatistics:
    """A context in which batch normalisation uses its running statistics, and leaves its buffers as they are.

    Without running statistics: mean 0 and variance 1. That holds for every module and function of torch that normalises
    over the batch (``SyncBatchNorm`` talks to no other process then), also in a forward that activation checkpointing
    runs again; not for a compiled or scripted model, and not for a normalisation of the model's own making. Layer,
    group and instance normalisation work sample by sample and are left alone.

    Args:
        models: whose counters of batches (``num_batches_tracked``) are put back afterwards.

    Example:
        >>> model = torch.nn.BatchNorm1d(2)
        >>> with FixedStatistics(model):
        ...     out = model(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        >>> bool(torch.allclose(out, torch.tensor([[1.0, 2.0], [3.0, 4.0]]))), model.num_batches_tracked.item()
        (True, 0)
    """

    def __init__(self, *models: nn.Module) -> None:
        self._models = models

    def __enter__(self) -> Self:
        counters = [
            (module, counter, counter.clone())
            for model in self._models
            for module in model.modules()
            if isinstance(counter := getattr(module, "num_batches_tracked", None), Tensor)
        ]
        with ExitStack() as stack:
            # Functions and not a mode of torch: those are off where autograd runs a checkpointed forward again.
            stack.enter_context(replaced(torch, {"batch_norm": _fixed_batch_norm}))
            stack.enter_context(replaced(nn.functional, {"batch_norm": _fixed_functional}))
            stack.enter_context(replaced(nn.SyncBatchNorm, {"forward": _BatchNorm.forward}))
            stack.callback(_count_again, counters)
            self._undo = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._undo.close()


def _fixed_functional(
    input: Tensor,  # noqa: A002 - torch's own name
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """``torch.nn.functional.batch_norm`` without its check that a channel has more than one value to take a mean of."""
    return _fixed_batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps, False)


def _fixed_batch_norm(
    input: Tensor,  # noqa: A002 - torch's own name
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,  # noqa: ARG001
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    """``torch.batch_norm`` as in evaluation."""
    if running_mean is None or running_var is None:
        like = input if weight is None else weight
        running_mean, running_var = like.new_zeros(input.shape[1]), like.new_ones(input.shape[1])
    return _batch_norm(input, weight, bias, running_mean, running_var, False, momentum, eps, cudnn_enabled)


def _count_again(counters: list[tuple[nn.Module, Tensor, Tensor]]) -> None:
    for module, counter, value in counters:
        counter.copy_(value)
        module.num_batches_tracked = counter
