"""Few samples for a loop without a ``DataLoader``: the first ones of those that it calls its model with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from vram_guard.apply.microbatch import CannotSplitError, split
from vram_guard.apply.sliced_forward import by_name
from vram_guard.state.containers import leaves


def trains(model: nn.Module) -> bool:
    """True if a call of the model now is one of its training."""
    return model.training and torch.is_grad_enabled()


def first_rows(
    args: tuple[Any, ...], kwargs: dict[str, Any], of: int, samples: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with the first samples alone; as they are where they do not hold so many.

    Args:
        args: positional ones.
        kwargs: the others.
        of: samples that a batch has.
        samples: that are left.
    """
    if of == samples:
        return args, kwargs
    try:
        named = dict(split(by_name(args, kwargs), of, samples)[0].data)
    except CannotSplitError:
        return args, kwargs
    return tuple(named.pop(str(at)) for at in range(len(args))), named


def evaluate_once(model: nn.Module) -> None:
    """Of evaluations before the training, one call stands for all that look like it: nothing is learned from them."""
    original: Callable[..., Any] = model.forward
    known: dict[Any, Any] = {}

    def forward(*args: Any, **kwargs: Any) -> Any:
        if trains(model):
            return original(*args, **kwargs)
        called = leaves(by_name(args, kwargs))
        alike = tuple((one.shape, one.dtype) if isinstance(one, torch.Tensor) else type(one) for one in called)
        if alike not in known:
            known[alike] = original(*args, **kwargs)
        return known[alike]

    vars(model)["forward"] = forward
