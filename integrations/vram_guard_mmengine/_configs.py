"""Configs that cannot be built: those from before MMEngine, and types that nothing registered."""

from __future__ import annotations

import contextlib
import inspect
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
    """Turn the registry's own error about a type that it cannot build into a message without a traceback.

    Raises:
        InvalidInputError: a type of the config is not registered, or names a module in place of a class.
    """
    try:
        yield
    except TypeError as error:
        # A name with dots is imported, and "torch.nn" is found to be a module.
        values = _values_in_registry(error)
        if not inspect.ismodule(values.get("obj_cls")):
            raise
        name = values["obj_cls"].__name__
        raise InvalidInputError(
            _('type="{name}" in the config is a module: name a class in it, type="{name}.CLASS"', name=name)
        ) from error
    except KeyError as error:
        if not _values_in_registry(error):
            raise
        raise InvalidInputError(
            _(
                "{problem} Run this where tools/train.py runs, and name the modules that register it: "
                'custom_imports = dict(imports=["mmdet.models"]) in the config, or default_scope = "mmdet"',
                problem=" ".join(str(error.args[0]).partition(" Please check")[0].split()),
            )
        ) from error


def _values_in_registry(error: BaseException) -> Mapping[str, Any]:
    """The local values where the registry builds, if that is what raised the error; else none."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    inside = place is not None and place.tb_frame.f_globals.get("__name__") == build_functions.__name__
    return place.tb_frame.f_locals if inside and place is not None else {}
