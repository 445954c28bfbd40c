"""What a case adds to its network: a technique of the planner's, the compiler, or a layout over pretended ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn

from vram_guard import Parallel
from vram_guard.techniques import AS_WRITTEN, Recipe, find_blocks

#: "blocks": each repeated module by itself, as PyTorch calls regional compilation.
Compiled = Literal["", "model", "blocks"]


def blocks_of(model: nn.Module) -> tuple[str, ...]:
    """Names of the repeated modules."""
    return tuple(block.name for block in find_blocks(model))


def compile_in_place(model: nn.Module, compiled: Compiled) -> nn.Module:
    """The model, told to compile itself or its blocks when they are first called."""
    if compiled == "model":
        model.compile()
    elif compiled == "blocks":
        for name in blocks_of(model):
            model.get_submodule(name).compile()
    return model


#: Techniques by the names that cases use; each is given the model, on the meta device, to find its modules in.
TECHNIQUES: dict[str, Callable[[nn.Module], Recipe]] = {
    "checkpoint": lambda model: Recipe(checkpoint=blocks_of(model)),
    "checkpoint half": lambda model: Recipe(checkpoint=blocks_of(model)[::2]),
    "keep attention": lambda model: Recipe(checkpoint=blocks_of(model), checkpoint_keeps=("attention",)),
    "keep products": lambda model: Recipe(checkpoint=blocks_of(model), checkpoint_keeps=("attention", "addmm", "mm")),
    "keep convolutions": lambda model: Recipe(checkpoint=blocks_of(model), checkpoint_keeps=("convolution",)),
    "activations on host": lambda _: Recipe(offload_activations=("",)),
    "half of activations on host": lambda model: Recipe(offload_activations=blocks_of(model)[::2]),
    "states on host": lambda _: Recipe(optimizer_on_host=True),
    "parameters on host": lambda model: Recipe(parameters_on_host=blocks_of(model)),
    "8-bit states": lambda _: Recipe(optimizer="8bit"),
    "for-loop optimizer": lambda _: Recipe(optimizer="for-loop"),
    "optimizer in backward": lambda _: Recipe(optimizer_in_backward=True),
    "chunked loss": lambda _: Recipe(chunked_head="lm_head"),
}


def recipe_of(technique: str, build: Callable[[], nn.Module]) -> Recipe:
    """The recipe of a technique for the model that ``build`` makes; as written for ""."""
    if not technique:
        return AS_WRITTEN
    with torch.device("meta"):
        return TECHNIQUES[technique](build())


_HALF: dict[str, Any] = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}

#: Layouts by the names that cases use. The other ranks are pretended: what they would send arrives at once.
LAYOUTS: dict[str, Parallel] = {
    "ddp x8": Parallel(8, kind="ddp"),
    "zero1 x8": Parallel(8, kind="zero1"),
    "fsdp1 x8": Parallel(8, kind="fsdp1", init="cpu"),
    "fsdp2 x8": Parallel(8, kind="fsdp2"),
    "fsdp2 x8 bf16": Parallel(8, kind="fsdp2", **_HALF),
    "fsdp2 x8 bf16 kept": Parallel(8, kind="fsdp2", reshard=False, **_HALF),
    "fsdp2 x8 bf16 on host": Parallel(8, kind="fsdp2", offload=True, **_HALF),
    "hsdp 2x8 bf16": Parallel(16, node=8, kind="hsdp", replicate=2, **_HALF),
    "fsdp2 x64 bf16": Parallel(64, kind="fsdp2", **_HALF),
    "fsdp2 x4 tensor 2 bf16": Parallel(8, kind="fsdp2", tensor=2, **_HALF),
}
