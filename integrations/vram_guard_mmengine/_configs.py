"""Configs that cannot be built: those from before MMEngine, and types that nothing registered."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Final

from mmengine.registry import build_functions

from vram_guard.errors import InvalidInputError
from vram_guard.language import _

#: Keys of configs for the runners of mmcv 1.x, which MMEngine reads past without a word.
BEFORE_MMENGINE: Final = (
    "data",
    "runner",
    "fp16",
    "optimizer",
    "optimizer_config",
    "lr_config",
    "momentum_config",
    "checkpoint_config",
    "log_config",
    "total_epochs",
)


def refuse_before_mmengine(cfg: Mapping[str, Any]) -> None:
    """Refuse a config of mmcv 1.x.

    Raises:
        InvalidInputError: it is one; the message names its keys and what to use.
    """
    old = [key for key in BEFORE_MMENGINE if isinstance(cfg.get(key), dict)]
    trains = any(cfg.get(key) is not None for key in ("train_dataloader", "train_cfg", "optim_wrapper"))
    if trains or not {"data", "runner"} & set(old):
        return
    raise InvalidInputError(
        _(
            "This config is one for mmcv 1.x, from before MMEngine ({keys}), which would train nothing of it. Take the "
            "config of that name from a release on MMEngine (MMDetection 3, MMSegmentation 1 or MMPreTrain 1), "
            "or describe the training step in Python for vram-guard plan --step",
            keys=", ".join(f"{key}=" for key in old),
        )
    )


@contextlib.contextmanager
def unregistered_types_said() -> Iterator[None]:
    """Turn the registry's own error about a type that it does not know into a message without a traceback.

    Raises:
        InvalidInputError: a type of the config is not registered.
    """
    try:
        yield
    except KeyError as error:
        place = error.__traceback__
        while place is not None and place.tb_next is not None:
            place = place.tb_next
        if place is None or place.tb_frame.f_globals.get("__name__") != build_functions.__name__:
            raise
        raise InvalidInputError(
            _(
                "{problem} Run this where tools/train.py runs, and name the modules that register it: "
                'custom_imports = dict(imports=["mmdet.models"]) in the config, or default_scope = "mmdet"',
                problem=" ".join(str(error.args[0]).partition(" Please check")[0].split()),
            )
        ) from error
