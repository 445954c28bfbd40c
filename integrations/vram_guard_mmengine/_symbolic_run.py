"""While a trace runs the user's model, MMEngine's message hub and logger must notice nothing."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

from mmengine.logging import MessageHub, MMLogger

from vram_guard.proof.effects import StepEffects

_NAME = "vram_guard: a trace"


#: What a hub answers alike in every step.
_STANDS = ("loop_stage", "max_epochs", "max_iters")


@contextlib.contextmanager
def symbolic_run(max_epochs: int, max_iters: int, effects: StepEffects) -> Iterator[None]:
    """Inside the block, models find a message hub of a training that has just begun, and log nothing.

    Args:
        max_epochs: of the training.
        max_iters: of the training.
        effects: told of what is read from the hub.
    """
    hub = MessageHub.get_instance(_NAME)
    hub.update_info_dict({"loop_stage": "train", "epoch": 0, "iter": 0})
    hub.update_info_dict({"max_epochs": max_epochs, "max_iters": max_iters})
    hub.get_info = _told(hub.get_info, effects)
    hub.get_scalar = _told(hub.get_scalar, effects)
    loggers: list[Any] = [MMLogger.get_current_instance(), logging.getLogger("mmengine")]
    before = [logger.disabled for logger in loggers]
    try:
        for logger in loggers:
            logger.disabled = True
        yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled
        MessageHub._instance_dict.pop(_NAME, None)  # noqa: SLF001 - MMEngine has no way to give a hub up


def _told(original: Callable[..., Any], effects: StepEffects) -> Callable[..., Any]:
    def get(key: str, *default: Any, **named: Any) -> Any:
        if key not in _STANDS:
            effects.read(key)
        return original(key, *default, **named)

    return get
