"""Hooks of Lightning around backward: once per batch, as Lightning calls them, or micro-batches are refused."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from vram_guard.apply import backward_hooks
from vram_guard.language import _
from vram_guard.patching import replaced
from vram_guard_lightning._namespaces import is_lightnings

if TYPE_CHECKING:
    import torch
    from lightning.pytorch import LightningModule, Trainer

#: Hooks that Lightning calls after training_step, once for a loaded batch or an optimizer step.
AFTERWARDS = (
    *("on_train_batch_end", "on_before_zero_grad", "optimizer_zero_grad", "on_before_backward", "on_after_backward"),
    *("on_before_optimizer_step", "optimizer_step", "backward", "configure_gradient_clipping", "lr_scheduler_step"),
)


def read_afterwards(trainer: Trainer, module: LightningModule) -> bool:
    """True if user code runs after training_step, in hooks that may read what it has left.

    Args:
        trainer: the Trainer.
        module: that it trains.
    """
    return overridden(trainer, module, AFTERWARDS)


def overridden(trainer: Trainer, module: LightningModule, names: Iterable[str]) -> bool:
    """True if user code overrides one of these hooks: in the module, the data module or a callback.

    Args:
        trainer: the Trainer.
        module: that it trains.
        names: of hooks.
    """
    owners = [module, *trainer.callbacks, *([trainer.datamodule] if trainer.datamodule is not None else [])]  # type: ignore[attr-defined]
    users = [owner for owner in owners if type(owner).__module__.partition(".")[0] != "vram_guard_lightning"]
    return any(hasattr(type(owner), name) and not is_lightnings(type(owner), name) for owner in users for name in names)


def why_whole(trainer: Trainer, module: LightningModule) -> str:
    """The reason why this training's batches may not be cut; "" for none.

    Args:
        trainer: the Trainer.
        module: that it trains.
    """
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    for owner in (module, *callbacks):
        if not is_lightnings(owner, "on_before_backward"):
            return _(
                "on_before_backward of {kind} is called with the loss of the whole batch, which micro-batches do not "
                "have before their first backward",
                kind=type(owner).__name__,
            )
    classes = (type(trainer.strategy), type(trainer.strategy.precision_plugin))
    for owner, name in (
        (module, "backward"),
        *((kind, name) for kind in classes for name in ("pre_backward", "backward", "post_backward")),
    ):
        if not is_lightnings(owner, name):
            kind = owner if isinstance(owner, type) else type(owner)
            return _(
                "{name} of {kind} is overridden, and would get the loss of each micro-batch instead of the batch's",
                name=name,
                kind=kind.__name__,
            )
    return backward_hooks.why_whole(module)


class AfterBackward:
    """Calls ``on_after_backward`` once, when the gradients of the batch are complete.

    Lightning's precision plugin calls it in ``post_backward``, after each backward.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._plugin: Any = trainer.strategy.precision_plugin
        self._hooks: Callable[[], Any] | None = None

    @contextlib.contextmanager
    def held_back(self) -> Iterator[None]:
        """Inside the block the hooks are not called."""
        own = self._plugin.post_backward

        def post_backward(tensor: torch.Tensor, module: LightningModule) -> torch.Tensor:
            self._hooks = functools.partial(own, tensor.detach(), module)
            return tensor.detach()

        with replaced(self._plugin, {"post_backward": post_backward}):
            yield

    def call(self) -> None:
        """Call them, if there was a backward."""
        if self._hooks is not None:
            self._hooks()
