"""A module that is imported for the first time while a step runs symbolically runs for real.

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

from vram_guard.patching import replaced


class Activity(Protocol):
    """A simulation that is on or off; it is turned off while a module is executed."""

    active: bool


@contextlib.contextmanager
def imports_run_for_real(
    simulation: Activity,
    excepted: Callable[[str], bool] = lambda _file: False,
    after: Callable[[], None] = lambda: None,
    around: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> Iterator[None]:
    """Inside the block, this thread's first imports of modules see neither the simulated device nor symbolic tensors.

    Python's own import machinery runs every module through one function, ``importlib._bootstrap._load_unlocked`` (from
    3.3 to 3.14); where a Python has another one, imports are left as they are.

    Args:
        simulation: is turned off meanwhile.
        excepted: true for the file of a module that sees the simulation all the same.
        after: called once a module is there, before the code goes on that asked for it.
        around: what the module is executed in.
    """
    machinery: Any = importlib._bootstrap
    load: Callable[[Any], Any] | None = getattr(machinery, "_load_unlocked", None)
    if load is None:
        yield
        return
    tracing = threading.get_ident()

    def load_for_real(spec: Any) -> Any:
        seen = excepted(str(getattr(spec, "origin", None)))
        if threading.get_ident() != tracing or not simulation.active or seen:
            return load(spec)
        simulation.active = False
        try:
            with around(), _disable_current_modes(), torch._C.DisableTorchFunction():
                return load(spec)
        finally:
            simulation.active = True
            after()

    with replaced(machinery, {"_load_unlocked": load_for_real}):
        yield
