"""Scripts without Accelerate: the models that they train by themselves, found where their loop begins."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from vram_guard.apply.microbatch import CannotSplitError, batch_size
from vram_guard.capture.loader import Sample
from vram_guard.errors import UnsupportedStepError
from vram_guard.language import _
from vram_guard.simulate.tracing.batches import leaves_of


class OwnLoop:
    """Stands for the Accelerator of a script that has none: what a plan asks of one.

    Args:
        made: every optimizer that the script has made.
    """

    #: Names as the Accelerator has them.
    scaler = None
    ddp_handler = None

    def __init__(self, made: Iterable[torch.optim.Optimizer]) -> None:
        self._made = made
        self._models: list[nn.Module] = []
        self.state = SimpleNamespace(_mixed_precision="no", dynamo_plugin=None)

    def train(self, models: list[nn.Module]) -> None:
        """These are the models that it trains."""
        self._models = models

    @property
    def _optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers of its models; none where the loop updates weights by itself."""
        return optimizers_of(self._models, self._made)


class OptimizersMade:
    """The optimizers of a script that are alive."""

    def __init__(self) -> None:
        self._all: list[weakref.ref[torch.optim.Optimizer]] = []

    def add(self, original: Callable[..., None], optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        """Around ``Optimizer.__init__``."""
        original(optimizer, *args, **kwargs)
        self._all.append(weakref.ref(optimizer))

    def __iter__(self) -> Iterator[torch.optim.Optimizer]:
        return (optimizer for optimizer in [one() for one in self._all] if optimizer is not None)


def optimizers_of(
    models: Iterable[nn.Module], made: Iterable[torch.optim.Optimizer]
) -> list[torch.optim.Optimizer]:
    """Those of these optimizers that update parameters of these models."""
    own = {id(parameter) for model in models for parameter in model.parameters()}
    return [
        optimizer
        for optimizer in made
        if any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])
    ]


def models_on_gpu(is_on_gpu: Callable[[torch.Tensor], bool]) -> list[nn.Module]:
    """The outermost modules with parameters there that are trained, those that were made first at the beginning."""
    found = [
        thing
        for thing in gc.get_objects()
        if isinstance(type(thing), type)
        and issubclass(type(thing), nn.Module)
        and "_parameters" in vars(thing)
        and any(one.requires_grad and is_on_gpu(one) for one in thing.parameters())
    ]
    inner = {id(part) for module in found for part in module.modules() if part is not module}
    return [module for module in found if id(module) not in inner]


def without_loader(called: dict[str, Any], wanted: Callable[[int], bool]) -> Sample:
    """What stands for the samples of a loop that loads them without a ``DataLoader``.

    Args:
        called: the arguments of its first call of a model in training, by name.
        wanted: whether one of the script's own options says that a batch has so many samples.
    """
    sizes = [size for leaf in leaves_of(called) for size in getattr(leaf, "shape", ())]
    named = next((size for size in sizes if wanted(size)), None)
    try:
        size = batch_size(called) if named is None else named
    except CannotSplitError:
        size = 1

    def refuse(_size: int) -> Any:
        raise UnsupportedStepError(reason)

    reason = _("the script loads its batches without a DataLoader: other sizes of them cannot be made")
    return Sample(refuse, size, None, None, refuse, reason)
