"""What stands around operators: modes that see each of them, hooks that pack what they save, a compiler."""

# ruff: noqa: SLF001 - see simulate/private_api.py

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

#: Where torch wraps what is to be compiled.
_WRAPPERS = "torch._dynamo.eval_frame"


def dispatch_modes() -> list[str]:
    """The names of the user's modes that are given every operator now."""
    return [name for name in map(_name_of_mode, _get_current_dispatch_mode_stack()) if name]


def function_modes() -> list[str]:
    """The names of the user's modes that are given every function of torch now."""
    return [name for name in map(_name_of_mode, _get_current_function_mode_stack()) if name]


def packing_hook() -> str:
    """The name of the user's function that packs what operators save for the backward pass; "" where none is on.

    Example:
        >>> with torch.autograd.graph.saved_tensors_hooks(abs, abs):
        ...     packing_hook()
        'abs'
    """
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    if top is not None:
        hooks = top(False)
        return "" if hooks is None else name_of_packing(hooks[0])
    try:  # before torch 2.8 nothing tells whose they are
        with disable_saved_tensors_hooks(""):
            return ""
    except RuntimeError:
        return "saved_tensors_hooks"


def name_of_packing(pack: Callable[..., Any]) -> str:
    """The name of a function that packs saved tensors; "" for torch's and ours, which give back what they got."""
    while isinstance(pack, partial):
        pack = pack.func
    return "" if _is_known(pack) else str(getattr(pack, "__qualname__", type(pack).__qualname__))


def compiled_with_caller() -> bool:
    """True where something that ``torch.compile`` has wrapped has called this: they are compiled as one.

    Also where compiled code runs uncompiled, as in a trace.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        # Wrappers that keep the compiler off, as torch puts around optimizers' steps, have None in its place.
        if frame.f_globals.get("__name__") == _WRAPPERS and any(map(callable, _compilers(frame.f_locals))):
            return True
        frame = frame.f_back
    return False


def _compilers(wrapper: dict[str, Any]) -> Iterator[Any]:
    """What a wrapper of torch's hands code to, by the variables of its function."""
    yield wrapper.get("callback")
    yield getattr(wrapper.get("self"), "callback", None)


def _name_of_mode(mode: object) -> str:
    return "" if _is_known(type(mode)) else type(mode).__qualname__


def _is_known(thing: object) -> bool:
    """True for what is torch's, or ours."""
    package = (getattr(thing, "__module__", "") or "").partition(".")[0]
    return package == "torch" or package.startswith("vram_guard")
