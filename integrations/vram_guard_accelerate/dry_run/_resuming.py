"""``Accelerator.load_state`` in a dry run: Accelerate's own loading, of weights and of optimizers' states.

Files are mapped, not read: the shapes in them count, and where Accelerate puts them. What they say of learning rates,
samplers and random numbers is left as the script made it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from vram_guard.language import _
from vram_guard.patching import replaced
from vram_guard.state.random_generators import random_state_kept
from vram_guard_accelerate.dry_run._followed_loop import FollowedLoop

# ruff: noqa: SLF001 - every private name of Accelerate used here stands in private_api


def load(loop: FollowedLoop, folder: Path, ranks: int, given: dict[str, Any]) -> str:
    """Load a checkpoint into the prepared models and optimizers; why it could not be followed, or "".

    Args:
        loop: that is followed, before it trains.
        folder: the checkpoint.
        ranks: processes of the real launch.
        given: by the script, to ``load_state``.
    """
    loop.tracer.recorder.phase("resuming", 0)
    rates = [[_without_parameters(group) for group in one.param_groups] for one in loop.accelerator._optimizers]
    try:
        with random_state_kept():
            _load(loop.accelerator, folder, ranks, dict(given))
    except Exception as error:  # noqa: BLE001 - of a checkpoint that may be anything
        return _("{error} while it was loaded", error=f"{type(error).__name__}: {error}")
    finally:
        for optimizer, groups in zip(loop.accelerator._optimizers, rates, strict=True):
            for group, before in zip(optimizer.param_groups, groups, strict=True):
                group.update(before)
    return ""


def _load(accelerator: Any, folder: Path, ranks: int, given: dict[str, Any]) -> None:
    """As ``Accelerator.load_state`` does it for models that are not divided."""
    from accelerate import checkpointing

    models, options = list(accelerator._models), given.pop("load_kwargs", None)
    for hook in accelerator._load_model_state_pre_hook.values():
        hook(models, str(folder))
    # Several processes load where they compute: the one that is followed here takes itself for alone.
    place = given.pop("map_location", None) or ("on_device" if ranks > 1 else "cpu")
    original = torch.load

    def mapped(file: Any, map_location: Any = None, **more: Any) -> Any:
        by_name = isinstance(file, (str, os.PathLike))
        return _placed(
            original(file, map_location="cpu", **{**more, **({"mmap": True} if by_name else {})}), map_location
        )

    def load_model(model: Any, file: Any, device: str = "cpu", **_more: Any) -> None:
        from safetensors.torch import load_file

        model.load_state_dict(_placed(load_file(file), device), strict=False)

    with replaced(torch, {"load": mapped}), replaced(checkpointing, {"load_model": load_model}):
        checkpointing.load_accelerator_state(
            str(folder), models, accelerator._optimizers, [], [], 0, None, place, options, **given
        )


def _placed(loaded: Any, place: Any) -> Any:
    if place is None or torch.device(place).type == "cpu":
        return loaded
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(place), loaded)


def _without_parameters(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}
