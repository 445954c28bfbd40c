"""Code under ``torch.compile`` runs uncompiled in a trace, and torch does not import its compiler for it.

torch imports its compiler (``torch._dynamo``, and sympy with it) at the first optimizer or meta kernel, to tell it
what not to compile. That takes as long as importing torch itself. Where nothing is compiled, nothing has to be told.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch._compile

from vram_guard.patching import replaced
from vram_guard.simulate.operators.flex_attention import flex_attention_followed
from vram_guard.simulate.tracing._dispatch import SymbolicMode

if TYPE_CHECKING:
    from vram_guard.simulate.device.fake_cuda import FakeCudaState

_COMPILER = "torch._dynamo"

#: Where the compiler keeps its results: importing it sets this variable, which processes of the user's would inherit.
_RESULTS = "TORCHINDUCTOR_CACHE_DIR"

#: The attribute of a function under which ``torch._compile`` keeps it as the compiler leaves it alone.
_LEFT_ALONE = "__dynamo_disable"


@contextlib.contextmanager
def uncompiled(device: FakeCudaState) -> Iterator[None]:
    """Compiled code runs uncompiled inside the block, also where it imports the compiler there.

    Args:
        device: on which the block runs; it tells of modules that are imported.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(flex_attention_followed(SymbolicMode))
        set_stance = getattr(torch.compiler, "set_stance", None)
        told = False

        def look() -> None:
            nonlocal told
            if not told and set_stance is not None and _imported():
                told = True
                stack.enter_context(set_stance("force_eager"))

        device.imported.append(look)
        stack.callback(device.imported.remove, look)
        look()
        yield


@contextlib.contextmanager
def compiler_not_imported() -> Iterator[None]:
    """Inside the block, torch imports its compiler where somebody uses it, not by itself.

    Example:
        >>> import sys, torch
        >>> before = "torch._dynamo.eval_frame" in sys.modules
        >>> with compiler_not_imported():
        ...     torch.optim.SGD([torch.zeros(1, requires_grad=True)]).step()
        >>> ("torch._dynamo.eval_frame" in sys.modules) == before
        True
    """
    before = os.environ.get(_RESULTS)
    with contextlib.ExitStack() as stack:
        if before is None:
            stack.callback(os.environ.pop, _RESULTS, None)
        if _COMPILER not in sys.modules:
            stack.enter_context(replaced(torch._compile, {"getattr": _attribute}))
            sys.modules[_COMPILER] = torch._dynamo = waiting = _WaitingCompiler(_COMPILER)
            stack.callback(waiting.make_way)
        yield


class _WaitingCompiler(ModuleType):
    """In place of ``torch._dynamo``: what optimizers ask of it. Whoever asks for more gets the compiler itself."""

    @staticmethod
    def graph_break(*_words: object) -> None:
        """Nothing is compiled that could be interrupted."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # who lists modules (inspect, warnings) uses none of them
            raise AttributeError(name)
        self.make_way()
        compiler = importlib.import_module(_COMPILER)
        # Errors that its modules catch hold the frames that asked for it, in cycles, and with them tensors of the step.
        gc.collect()
        return getattr(compiler, name)

    def make_way(self) -> None:
        """The place is free for the compiler."""
        if sys.modules.get(_COMPILER) is self:
            del sys.modules[_COMPILER]
            del torch._dynamo


def _imported() -> bool:
    return not isinstance(sys.modules.get(_COMPILER), _WaitingCompiler | None)


def _attribute(owner: Any, name: str, *default: Any) -> Any:
    """In place of ``getattr`` in ``torch._compile``: before there is a compiler, every function is left alone by it."""
    if name == _LEFT_ALONE and not _imported():
        return owner
    return getattr(owner, name, *default)
