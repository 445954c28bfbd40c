"""A module that is imported for the first time while a step runs symbolically is imported as always.

Libraries import lazily (diffusers and transformers read a model's file when its class is asked for), and what a module
computes on import stays for the rest of the process: a table must hold its numbers, and "is there a GPU?" has to be
answered with the truth.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import _disable_current_modes


class Switch(Protocol):
    """What is turned off while a module is executed."""

    active: bool


@contextlib.contextmanager
def imported_as_always(pretence: Switch) -> Iterator[None]:
    """Inside the block, this thread's first imports of modules see no pretence and no symbolic tensors.

    Python's own import machinery runs every module through one function, ``importlib._bootstrap._load_unlocked`` (from
    3.3 to 3.14); where a Python has another one, imports are left as they are.
    """
    machinery: Any = importlib._bootstrap
    load: Callable[[Any], Any] | None = getattr(machinery, "_load_unlocked", None)
    if load is None:
        yield
        return
    tracing = threading.get_ident()

    def load_as_always(spec: Any) -> Any:
        if threading.get_ident() != tracing or not pretence.active:
            return load(spec)
        pretence.active = False
        try:
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                return load(spec)
        finally:
            pretence.active = True

    machinery._load_unlocked = load_as_always
    try:
        yield
    finally:
        machinery._load_unlocked = load
