"""Scripts without Accelerate: the models that they train by themselves, found where their loop begins.

What such a script hands to nobody is looked for among all objects: where it calls a model that lies on the GPU, the
outermost modules there, and the optimizers of their parameters, are what another script would have prepared.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from vram_guard.patching import replaced
from vram_guard_accelerate._alive import alive
from vram_guard_accelerate._patching import wrap


class OwnLoop:
    """Stands for the Accelerator of a script that has none: what a plan asks of one.

    Args:
        made: every optimizer that the script has made.
    """

    ddp_handler = None

    def __init__(self, made: Iterable[torch.optim.Optimizer]) -> None:
        self._made = made
        self._models: list[nn.Module] = []
        self._scalers: list[torch.amp.GradScaler] | None = None
        self.state = SimpleNamespace(_mixed_precision="no", dynamo_plugin=None)

    def train(self, models: list[nn.Module]) -> None:
        """These are the models that it trains."""
        self._models = models

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The script's own, if it has one."""
        if self._scalers is None:
            self._scalers = alive(torch.amp.GradScaler)
        return next((one for one in self._scalers if one.is_enabled()), None)

    @property
    def _optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers of its models; none where the loop updates weights by itself."""
        return optimizers_of(self._models, self._made)


class OptimizersMade:
    """The optimizers of a script that are alive."""

    def __init__(self) -> None:
        self._all: list[weakref.ref[torch.optim.Optimizer]] = []

    def watch(self) -> None:
        """From now on."""
        wrap(torch.optim.Optimizer, "__init__", self._made)

    def _made(self, original: Callable[..., None], optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        original(optimizer, *args, **kwargs)
        self._all.append(weakref.ref(optimizer))

    def __iter__(self) -> Iterator[torch.optim.Optimizer]:
        return (optimizer for optimizer in [one() for one in self._all] if optimizer is not None)


class ModelCalls:
    """The calls of modules until one belongs to a model that is trained on the GPU.

    Args:
        is_on_gpu: whether a tensor lies there, or is meant to.
        waits: whether it is too early.
        begins: called with these models before the call.
    """

    def __init__(
        self,
        is_on_gpu: Callable[[torch.Tensor], bool],
        waits: Callable[[nn.Module], bool],
        begins: Callable[[list[nn.Module]], None],
    ) -> None:
        self._is_on_gpu = is_on_gpu
        self._waits = waits
        self._begins = begins
        self._stack = contextlib.ExitStack()

    def watch(self) -> None:
        """From now on."""
        original = nn.Module.__call__

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not self._waits(module) and _trains(module, self._is_on_gpu):
                models = models_on_gpu(self._is_on_gpu)
                if any(part is module for model in models for part in model.modules()):
                    self.end()
                    self._begins(models)
                    return nn.Module.__call__(module, *args, **kwargs)  # others may watch calls from here on
            return original(module, *args, **kwargs)

        self._stack.enter_context(replaced(nn.Module, {"__call__": call}))

    def end(self) -> None:
        """No more of it."""
        self._stack.close()


def optimizers_of(models: Iterable[nn.Module], made: Iterable[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    """Those of these optimizers that update parameters of these models."""
    own = {id(parameter) for model in models for parameter in model.parameters()}
    return [
        optimizer
        for optimizer in made
        if any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])
    ]


def models_on_gpu(is_on_gpu: Callable[[torch.Tensor], bool]) -> list[nn.Module]:
    """The outermost modules with parameters there that are trained, those that were made first at the beginning."""
    found = [module for module in alive(nn.Module) if "_parameters" in vars(module) and _trains(module, is_on_gpu)]
    inner = {id(part) for module in found for part in module.modules() if part is not module}
    return [module for module in found if id(module) not in inner]


def _trains(module: nn.Module, is_on_gpu: Callable[[torch.Tensor], bool]) -> bool:
    return any(one.requires_grad and is_on_gpu(one) for one in module.parameters())
