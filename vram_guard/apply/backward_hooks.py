"""The user's code that runs inside every backward pass, and so once per micro-batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vram_guard.language import _

if TYPE_CHECKING:
    from torch import nn

# ruff: noqa: SLF001 - torch has no public way to ask for hooks


def why_whole(model: nn.Module) -> str:
    """The reason why the batches of a model may not be cut; "" for none.

    A hook that edits gradients (clips, adds noise, masks by size) is no longer the same when it gets those of
    micro-batches one by one, and one that steps an optimizer steps several times.

    Example:
        >>> from torch import nn
        >>> model = nn.Linear(2, 2)
        >>> why_whole(model)
        ''
        >>> _ = model.bias.register_hook(lambda gradient: gradient.clamp(-1, 1))
        >>> why_whole(model)
        'bias has a hook that runs in every backward pass, which would be once per micro-batch'
    """
    found = next(_hooked(model), None)
    if found is None:
        return ""
    return _("{name} has a hook that runs in every backward pass, which would be once per micro-batch", name=found)


def _hooked(model: nn.Module) -> Iterator[str]:
    """The names of parameters and modules with hooks in backward."""
    for name, parameter in model.named_parameters():
        hooks = (parameter._backward_hooks, parameter._post_accumulate_grad_hooks)
        if any(not _engines(hook) for found in hooks if found for hook in found.values()):
            yield name
    for name, module in model.named_modules():
        if any(
            not _engines(hook)
            for found in (module._backward_hooks, module._backward_pre_hooks)
            for hook in found.values()
        ):
            yield name or type(module).__name__


def _engines(hook: Any) -> bool:
    """True for hooks of DeepSpeed's engine, by which it collects gradients and knows of micro-batches."""
    return str(getattr(hook, "__module__", "")).startswith("deepspeed.")


def of_package(owner: Any, method: str, *packages: str) -> bool:
    """True if ``owner`` has a method as one of the packages wrote it.

    Args:
        owner: an object or a class.
        method: its name.
        packages: where the method is not the user's.
    """
    module = getattr(getattr(owner, method), "__module__", None) or ""
    return any(module == package or module.startswith(f"{package}.") for package in packages)
