"""``Accelerator.load_state`` in a dry run: Accelerate's own, of weights and of optimizers' states.

Files are mapped, not read: the shapes in them count, and where Accelerate puts them. What they say of schedules,
samplers and random numbers is left as the script made it.
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
from vram_guard_accelerate.dry_run._followed_loop import FollowedLoop


def load(loop: FollowedLoop, ranks: int, original: Callable[..., None], *args: Any, **given: Any) -> str:
    """Load a checkpoint into the prepared models and optimizers; why it could not be followed, or "".

    Args:
        loop: that is followed, before it trains.
        ranks: processes of the real launch.
        original: Accelerate's ``load_state``.
        *args: of the script, to it.
        **given: the same.
    """
    from accelerate import accelerator, checkpointing

    if ranks > 1:  # they load where they compute: the one that is followed here takes itself for alone
        given.setdefault("map_location", "on_device")
    theirs, original_load = accelerator.load_accelerator_state, torch.load

    def weights_and_states(folder: Any, models: Any, optimizers: Any, *others: Any, **more: Any) -> Any:
        _schedulers, _loaders, process, _scaler, *rest = others
        return theirs(folder, models, optimizers, [], [], process, None, *rest, **more)

    def mapped(file: Any, map_location: Any = None, **more: Any) -> Any:
        by_name = {"mmap": True} if isinstance(file, (str, os.PathLike)) else {}
        return _placed(original_load(file, map_location="cpu", **{**more, **by_name}), map_location)

    def load_model(model: Any, file: Any, device: str = "cpu", **_more: Any) -> None:
        from safetensors.torch import load_file

        model.load_state_dict(_placed(load_file(file), device), strict=False)

    loop.tracer.recorder.phase("resuming", 0)
    try:
        with (
            random_state_kept(),
            replaced(torch, {"load": mapped}),
            replaced(checkpointing, {"load_model": load_model}),
            replaced(accelerator, {"load_accelerator_state": weights_and_states}),
        ):
            original(*args, **given)
    except Exception as error:  # noqa: BLE001 - of a checkpoint that may be anything
        return _("{error} while it was loaded", error=f"{type(error).__name__}: {error}")
    return ""


def _placed(loaded: Any, place: Any) -> Any:
    if place is None or torch.device(place).type == "cpu":
        return loaded
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(place), loaded)
