"""Compiled code followed in a trace: what Dynamo and Inductor compile runs there as it will run in the training."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo
import torch._dynamo.config
import torch._dynamo.convert_frame
import torch._dynamo.guards
import torch._dynamo.utils
import torch._functorch.config
import torch._inductor.compile_fx
from torch import nn
from torch._C._dynamo.eval_frame import _FrameAction as FrameAction
from torch._C._dynamo.eval_frame import _FrameExecStrategy as FrameExecStrategy
from torch._dynamo.types import ConvertFrameReturn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from vram_guard.errors import UnsupportedStepError
from vram_guard.language import Message, _
from vram_guard.patching import replaced
from vram_guard.simulate.compiler.fake_tensors import fake_tensors_on_cuda
from vram_guard.simulate.compiler.inductor import inductor_without_gpu, inputs_on_cuda
from vram_guard.simulate.compiler.optimizers import optimizers_in_trace
from vram_guard.timeline import CompiledCode, Note

if TYPE_CHECKING:
    from vram_guard.simulate.device.fake_cuda import FakeCudaState
    from vram_guard.timeline import Timeline

#: Batch sizes and shapes are those of the traced step: a second shape is compiled by itself, as the first was.
_DYNAMO = {
    "suppress_errors": False,
    "force_compile_during_fx_trace": False,
}


#: The folder of what a trace runs around the user's code.
_OWN = str(Path(__file__).parents[1]) + os.sep

#: Functions there, and in adapters, that call a module's forward, or what updates the weights.
_AROUND_MODULES = frozenset({"called", "marked", "call", "update", "clip"})


class Followed:
    """What was compiled in one trace, so far.

    Args:
        breaks: Dynamo's own list of why it ended graphs.
    """

    def __init__(self, breaks: Iterable[str]) -> None:
        self.graphs = 0
        self.redrawn: dict[str, None] = {}
        self.reads_changed = False
        self.uncompiled: dict[str, None] = {}
        """Functions of which Dynamo compiles no more variants, in words."""
        self._breaks = breaks

    @property
    def code(self) -> CompiledCode:
        """What a timeline says of it."""
        breaks = (str(reason).strip().partition("\n")[0] for reason in self._breaks)
        return CompiledCode(self.graphs, (*breaks, *self.uncompiled))

    def on(self, timeline: Timeline) -> Timeline:
        """The timeline with what was compiled, and notes of what computes other gradients than eager code."""
        notes = []
        # Without a budget, what draws is never computed again: a backward pass that draws then does so by itself.
        if self.redrawn and getattr(torch._functorch.config, "activation_memory_budget", 1) < 1:
            notes.append(
                Note(
                    Message(
                        "under the activation_memory_budget that is set, the compiled backward pass draws other random "
                        "numbers than the forward ({operators}): its gradients are wrong "
                        "(github.com/pytorch/pytorch/issues/190758)",
                        operators=", ".join(self.redrawn),
                    )
                )
            )
        if self.reads_changed:
            notes.append(
                Note(
                    Message(
                        "the compiled backward pass computes with buffers that the forward has changed by then: its "
                        "gradients may be wrong (github.com/pytorch/pytorch/pull/197039)"
                    )
                )
            )
        return replace(timeline, compiled=self.code, notes=(*timeline.notes, *notes))


class _LimitsReached(logging.Handler):
    """Dynamo says nowhere else that it gives a function up (``torch/_dynamo/convert_frame.py``)."""

    def __init__(self, followed: Followed) -> None:
        super().__init__(logging.WARNING)
        self._followed = followed

    def emit(self, record: logging.LogRecord) -> None:
        if "hit config." in str(record.msg) and isinstance(record.args, tuple) and len(record.args) > 2:
            limit, count, function = record.args[:3]
            said = _(
                "{limit} ({count}) is reached: other variants of {function} run uncompiled",
                limit=limit,
                count=count,
                function=function,
            )
            self._followed.uncompiled[said] = None


@contextlib.contextmanager
def _limits_noted(followed: Followed) -> Iterator[None]:
    log, handler = logging.getLogger(torch._dynamo.convert_frame.__name__), _LimitsReached(followed)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


def _looked_at_in(guard: Any, folders: tuple[str, ...]) -> bool:
    stack = guard.user_stack
    return bool(stack) and stack[-1].filename.startswith(folders)


def _drawn_in(graph: torch.fx.GraphModule) -> Iterator[str]:
    """Operators of a graph that draw random numbers."""
    for node in graph.graph.nodes:
        operator = node.target
        if not isinstance(operator, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in operator.tags:
            continue
        given = _by_name(operator, node.args, node.kwargs)
        # Attention is marked where it drops nothing too, and its backward, which is given what the forward has drawn.
        if given.get("dropout_p") != 0 and "philox_seed" not in given:
            yield str(operator)


def _by_name(operator: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, those that are left out included."""
    names = [one.name for one in operator._schema.arguments]
    defaults = {one.name: one.default_value for one in operator._schema.arguments if one.has_default_value()}
    return {**defaults, **dict(zip(names, args, strict=False)), **kwargs}


def _saves_what_it_changes(graph: torch.fx.GraphModule) -> bool:
    """True if a graph hands on one of its inputs into which it copies something else: it holds that by then."""
    nodes = graph.graph.nodes
    changed = {node.args[0] for node in nodes if node.target is torch.ops.aten.copy_.default}
    returned = {one for node in nodes if node.op == "output" for one in node.all_input_nodes}
    return any(node.op == "placeholder" for node in changed & returned)


def _skipped(beneath: FrameAction) -> ConvertFrameReturn:
    return ConvertFrameReturn(frame_exec_strategy=FrameExecStrategy(FrameAction.SKIP, beneath))


@contextlib.contextmanager
def compiler_followed(
    state: FakeCudaState,
    mode: TorchDispatchMode,
    capability: tuple[int, int],
    module_call: Callable[..., Any],
    adapter: str = _OWN,
) -> Iterator[Followed]:
    """Inside the block ``torch.compile`` compiles symbolic tensors for CUDA, and its code runs in the trace.

    What was compiled before in this process is forgotten, at the beginning and at the end: the block is for a copy of
    the process.

    Args:
        state: of the simulated device.
        mode: the trace's own.
        capability: of the GPU that is meant.
        module_call: ``nn.Module.__call__``, as torch has it.
        adapter: the folder of the adapter that observes the loop from within it, with a separator at its end.

    Raises:
        UnsupportedStepError: the code would run as CUDA graphs, whose memory pools are not modelled.
    """
    breaks = torch._dynamo.utils.counters["graph_break"]
    followed = Followed(breaks)
    convert_frame, compile_fx = torch._dynamo.convert_frame, torch._inductor.compile_fx
    compiled_frame = convert_frame.CatchErrorsWrapper.__call__
    compiled_graph = compile_fx._compile_fx_inner
    checks_made = torch._dynamo.guards.CheckFunctionManager.__init__

    @contextlib.contextmanager
    def outside_the_trace() -> Iterator[None]:
        before, state.in_kernel = state.in_kernel, True
        try:
            with (
                _disable_current_modes(),
                replaced(nn.Module, {"__call__": module_call}),
                fake_tensors_on_cuda(state),
            ):
                yield
        finally:
            state.in_kernel = before

    def compile_frame(self: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
        if frame.f_code.co_filename.startswith((_OWN, adapter)):
            # Between a break and the next graph Dynamo looks at all that runs. Of ours, modules alone lie around more.
            around = frame.f_code.co_name in _AROUND_MODULES
            return _skipped(FrameAction.DEFAULT if around else FrameAction.SKIP)
        with outside_the_trace():
            return compiled_frame(self, frame, *args, **kwargs)

    def compile_graph(graph: torch.fx.GraphModule, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("cudagraphs"):
            raise UnsupportedStepError(
                _(
                    'mode="reduce-overhead" runs the code as CUDA graphs, which keep their memory in pools of their '
                    "own: what these take is not modelled"
                )
            )
        followed.graphs += 1
        if kwargs.get("is_backward"):
            followed.redrawn.update(dict.fromkeys(_drawn_in(graph)))
        else:
            followed.reads_changed |= _saves_what_it_changes(graph)
        with outside_the_trace():
            inputs_on_cuda(graph, inputs)
            made = compiled_graph(graph, inputs, *args, **kwargs)
        # From torch 2.15 on, compiling leaves cycles that hold tensors of the step. In a training Python's collector
        # ends them, for compiling makes many objects; a trace has it switched off.
        gc.collect()
        return made

    def make_checks(self: Any, code: Any, output: Any, *args: Any, **kwargs: Any) -> None:
        """Guards remember dispatch keys: those of the trace, where the code runs; else each step compiles anew.

        And what functions of ours looked at as Dynamo followed them, which is otherwise while the code runs.
        """
        for guard in [one for one in output.guards if _looked_at_in(one, (_OWN, adapter))]:
            output.guards.inner.discard(guard)
        state.shapes_only += 1
        try:
            with mode:
                checks_made(self, code, output, *args, **kwargs)
        finally:
            state.shapes_only -= 1

    dynamo = {name: value for name, value in _DYNAMO.items() if hasattr(torch._dynamo.config, name)}
    torch._dynamo.reset()
    breaks.clear()
    try:
        with (
            inductor_without_gpu(state, type(mode), capability),
            _limits_noted(followed),
            replaced(convert_frame.CatchErrorsWrapper, {"__call__": compile_frame}),
            replaced(convert_frame, {"is_in_any_mode_without_ignore_compile_internals": lambda: False}),
            replaced(compile_fx, {"_compile_fx_inner": compile_graph}),
            replaced(torch._dynamo.guards.CheckFunctionManager, {"__init__": make_checks}),
            optimizers_in_trace(state, mode),
            torch._dynamo.config.patch(dynamo),
            torch.compiler.set_stance("default"),  # a framework's adapter has all else run uncompiled
        ):
            yield followed
    finally:
        torch._dynamo.reset()
