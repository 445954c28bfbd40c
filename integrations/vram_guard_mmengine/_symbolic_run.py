"""While a trace runs the user's model, MMEngine's message hub and logger must notice nothing."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

from mmengine.logging import MessageHub, MMLogger

_NAME = "vram_guard: a trace"


@contextlib.contextmanager
def symbolic_run(max_epochs: int, max_iters: int) -> Iterator[None]:
    """Inside the block, models find a message hub of a training that has just begun, and log nothing."""
    hub = MessageHub.get_instance(_NAME)
    hub.update_info_dict({"loop_stage": "train", "epoch": 0, "iter": 0})
    hub.update_info_dict({"max_epochs": max_epochs, "max_iters": max_iters})
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
