"""Code under ``torch.compile`` runs uncompiled in a trace, and torch does not import its compiler for it.

torch imports its compiler (``torch._dynamo``, and sympy with it) at the first optimizer or meta kernel, to tell it
what not to compile. That takes as long as importing torch itself. Where nothing is compiled, nothing has to be told.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ParamSpec, TypeVar

import torch
import torch._compile

from vram_guard.patching import replaced
from vram_guard.simulate.compiled import EAGER
from vram_guard.simulate.device.fake_cuda import FakeCudaState
from vram_guard.simulate.operators.flex_attention import FLEX_ATTENTION, flex_attention_followed
from vram_guard.simulate.tracing._dispatch import SymbolicMode

P = ParamSpec("P")
T = TypeVar("T")

_COMPILER = "torch._dynamo"

#: It tells the compiler to leave a hook alone, which it makes for each backward pass through a block.
_CHECKPOINTING = "torch.utils.checkpoint"

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
        told = False

        def look() -> None:
            nonlocal told
            if not told and _imported():
                told = True
                set_stance = getattr(torch.compiler, "set_stance", None)
                if set_stance is None:
                    stack.enter_context(_frames_left_alone(device))
                else:
                    stack.enter_context(set_stance("force_eager"))
                    stack.enter_context(_calls_noted(device))

        device.imported.append(look)
        stack.callback(device.imported.remove, look)
        look()
        yield


@contextlib.contextmanager
def _calls_noted(device: FakeCudaState) -> Iterator[None]:
    """Inside the block, calls of compiled functions that run uncompiled are noted.

    A loss, or an optimizer that compiles its own step (torchao's), is no part of a model in which it could be found.
    """
    frames = sys.modules[f"{_COMPILER}.eval_frame"]
    answer = getattr(frames, "_callback_from_stance", None)
    if answer is None:
        yield
        return

    def noted(callback: Any) -> Any:
        answered = answer(callback)
        if callback and answered is None:
            function = sys._getframe(1).f_locals.get("fn")
            # flex_attention is counted as its compiled kernels take it.
            if getattr(function, "__module__", None) != FLEX_ATTENTION[1]:
                device.recorder.note(EAGER, tier="partly symbolic")
        return answered

    with replaced(frames, {"_callback_from_stance": noted}):
        yield


@contextlib.contextmanager
def _frames_left_alone(device: FakeCudaState) -> Iterator[None]:
    """Inside the block, compiled functions run uncompiled, and are noted, where torch has no stances (before 2.6)."""
    frames = sys.modules[f"{_COMPILER}.eval_frame"]
    compile_with = frames.set_eval_frame

    def noted(callback: Any) -> Any:
        if not callable(callback):  # None and False: nothing is compiled
            return compile_with(callback)
        device.recorder.note(EAGER, tier="partly symbolic")
        return compile_with(None)

    with replaced(frames, {"set_eval_frame": noted}):
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

    eval_frame = SimpleNamespace(OptimizedModule=type("OptimizedModule", (), {}))
    """Nothing is an instance of a compiled module's class (accelerate asks, ``is_compiled_module``)."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # who lists modules (inspect, warnings) uses none of them
            raise AttributeError(name)
        if name == "config":  # torch 2.13's checkpointing asks for a setting (torch/utils/checkpoint.py)
            return _settings()
        if name == "disable" and sys._getframe(1).f_globals.get("__name__") == _CHECKPOINTING:
            return _as_it_is
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


def _as_it_is(function: Callable[P, T]) -> Callable[P, T]:
    """In place of ``torch._dynamo.disable``, for a function that is made anew wherever it is needed."""
    return function


def _settings() -> ModuleType:
    """The module of the compiler's settings, which needs nothing of the compiler."""
    name = f"{_COMPILER}.config"
    if name not in sys.modules:
        path = Path(torch.__file__).with_name("_dynamo") / "config.py"
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise AttributeError(name)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def _imported() -> bool:
    return not isinstance(sys.modules.get(_COMPILER), _WaitingCompiler | None)


def _attribute(owner: Any, name: str, *default: Any) -> Any:
    """In place of ``getattr`` in ``torch._compile``: before there is a compiler, every function is left alone by it."""
    if name == _LEFT_ALONE and not _imported():
        return owner
    return getattr(owner, name, *default)
