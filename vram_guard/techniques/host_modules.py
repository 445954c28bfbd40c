"""Modules whose parameters lie in host memory, whichever technique brings them to the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from vram_guard.patching import replace_attributes

if TYPE_CHECKING:
    import torch
    from torch import nn


def shared_parameter(model: nn.Module, name: str, paths: Sequence[tuple[str, nn.Parameter]] | None = None) -> str:
    """The path outside a module of a parameter that it shares with the rest of the model; "" where there is none.

    Args:
        model: the whole.
        name: of the module.
        paths: all parameters by every path, for those who ask about many modules; None: looked up.
    """
    own = {id(p) for p in model.get_submodule(name).parameters()}
    inside = name + "."
    for path, parameter in all_paths(model) if paths is None else paths:
        if id(parameter) in own and not path.startswith(inside):
            return path
    return ""


def all_paths(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters of a model by every path that leads to them."""
    return list(model.named_parameters(remove_duplicate=False))


def keep_parameters_in_place(module: nn.Module) -> Callable[[], None]:
    """From now on ``module.to(device)`` moves the buffers only; a change of dtype reaches the parameters.

    Returns:
        A function that takes this off again.
    """
    return replace_attributes(module, {"_apply": _BuffersOnly(module)})


class _BuffersOnly:
    """Stands in place of ``Module._apply``, where ``Module.to`` and its kin end; a deep copy has one of its own."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        from torch import nn

        def placed(tensor: torch.Tensor) -> torch.Tensor:
            return dtype_only(function, tensor) if isinstance(tensor, nn.Parameter) else function(tensor)

        moved: nn.Module = type(self.module)._apply(self.module, placed, recurse)  # noqa: SLF001 - as above
        return moved


def dtype_only(function: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in the dtype that ``function`` (a ``Module.to``) gives it, without moving it."""
    import torch

    return tensor.to(dtype=function(torch.empty(0, dtype=tensor.dtype)).dtype)
