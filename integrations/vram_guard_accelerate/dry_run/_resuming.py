"""``Accelerator.load_state`` in a dry run: Accelerate's own loading, of weights and of optimizers' states.

Files are mapped, not read: the shapes in them count, and where Accelerate puts them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from vram_guard.language import _
from vram_guard.patching import replaced
from vram_guard.state.random_generators import random_state_kept


def load(load_state: Callable[..., Any], ranks: int, **given: Any) -> str:
    """Load a checkpoint into the prepared models and optimizers; why it could not be followed, or "".

    Args:
        load_state: Accelerate's own.
        ranks: processes of the real launch.
        **given: by the script, to ``load_state``.
    """
    from accelerate import checkpointing

    # Several processes load where they compute: the one that is followed here takes itself for alone.
    place = {"map_location": "on_device"} if ranks > 1 else {}
    original = torch.load

    def mapped(file: Any, map_location: Any = None, **more: Any) -> Any:
        by_name = {"mmap": True} if isinstance(file, (str, os.PathLike)) else {}
        return _placed(original(file, map_location="cpu", **{**more, **by_name}), map_location)

    def load_model(model: Any, file: Any, device: str = "cpu", **_more: Any) -> None:
        from safetensors.torch import load_file

        model.load_state_dict(_placed(load_file(file), device), strict=False)

    try:
        with (
            random_state_kept(),
            replaced(torch, {"load": mapped}),
            replaced(checkpointing, {"load_model": load_model}),
        ):
            load_state(**{**place, **given})
    except Exception as error:  # noqa: BLE001 - of a checkpoint that may be anything
        return _("{error} while it was loaded", error=f"{type(error).__name__}: {error}")
    return ""


def _placed(loaded: Any, place: Any) -> Any:
    if place is None or torch.device(place).type == "cpu":
        return loaded
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(place), loaded)
