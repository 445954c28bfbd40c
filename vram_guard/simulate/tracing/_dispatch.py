"""The dispatch mode: every operator of the step passes here, below autograd, and its results are recorded."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vram_guard.errors import UnsupportedOperatorError, UnsupportedTechniqueError
from vram_guard.forks import autograd_threads
from vram_guard.language import _
from vram_guard.simulate.cost.op_cost import CostMeter, network_of
from vram_guard.simulate.device import constants, ranges
from vram_guard.simulate.device.capability import Capability
from vram_guard.simulate.device.fake_cuda import FakeCudaState
from vram_guard.simulate.device.symbolic import any_symbolic, is_symbolic
from vram_guard.simulate.memory.recorder import PLACE, Place, Recorder
from vram_guard.simulate.memory.repeats import expanded
from vram_guard.simulate.operators import cudnn, foreach, meta_results, reductions
from vram_guard.simulate.operators.handlers import BY_VALUES, HANDLERS
from vram_guard.simulate.operators.kernels import (
    ARITHMETIC,
    RUNNING,
    Matmuls,
    in_place_of_formula,
    nothing_new,
    running,
)
from vram_guard.simulate.operators.library_kernels import kernel_of
from vram_guard.simulate.operators.products import copied_operands
from vram_guard.simulate.operators.stand_in import no_kernel, stand_in_result
from vram_guard.simulate.parallel import dtensors
from vram_guard.simulate.tracing import _collectives
from vram_guard.simulate.tracing._interrupts import Interrupts
from vram_guard.simulate.tracing._noting import OperatorNotes
from vram_guard.simulate.tracing._placement import Placement
from vram_guard.simulate.tracing._undo_log import UndoLog
from vram_guard.techniques.purity import PurityWatch
from vram_guard.tensors import is_dense, tensors_in
from vram_guard.timeline import Timeline

_META = torch.device("meta")
_add = torch.ops.aten.add.Tensor
_add_ = torch.ops.aten.add_.Tensor
_foreach = "aten::_foreach_"

Runner = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


class SymbolicMode(TorchDispatchMode):
    """Runs operators on symbolic tensors (shapes only) and tells the recorder what they allocate."""

    def __init__(
        self,
        recorder: Recorder,
        state: FakeCudaState,
        capability: Capability,
        interrupts: Interrupts,
        *,
        on_cpu: bool = False,
        building: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder = recorder
        self.state = state
        self.interrupts = interrupts
        self.undo_log = UndoLog()
        self.capability = capability
        self.matmuls = Matmuls(recorder, capability)
        self.meter = CostMeter(recorder)
        recorder.streams.counted = lambda: self.meter.counted
        self.placement = Placement(recorder, mixed=on_cpu or building)
        self._place: Place = "cuda"
        """Where the operator that runs has its tensors."""
        self._building = building
        """A model is being built, under ``torch.device("meta")``: what its constructor makes there lies on the host."""
        self.waiting: dict[int, str] = {}
        """Storages of weights that are kept on the host -> the module they belong to."""
        self._notes = OperatorNotes(recorder)
        self.purity = PurityWatch(self._notes)
        self._below_autograd = False
        """A kernel runs that is Python: composite operators, which autograd takes apart elsewhere, come here whole."""
        self._plans: dict[int, tuple[Runner, Any]] = {}
        """By the identity of an operator, which is kept for that: an operator's own hash is Python code."""
        self._names: dict[int, tuple[str, Any]] = {}
        self.operations = 0
        # How releases of torch count the handle that asks differs: measured on a tensor that is not shared.
        self._sole_user = _storage_users(torch.empty(1, device=_META))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # True (torch's default) wraps every call in torch._dynamo.disable, which costs more than the call itself.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if types and any(hasattr(kind, "__tensor_flatten__") for kind in types):
            if dtensors.goes_over_lists(func):
                return dtensors.on_parts(self.__torch_dispatch__, func, args, kwargs or {})
            return NotImplemented  # a wrapper around tensors (8-bit states): it calls again for what it wraps
        if self._below_autograd:
            with self:
                result = func.decompose(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        planned = self._plans.get(id(func))
        if planned is None:
            planned = self._plans[id(func)] = self._bounding(func, self._plan_for(func)), func
        self.operations += 1
        if self.interrupts.pending:
            self.interrupts.deliver()
        before = self.state.in_kernel, self._place
        self.state.in_kernel = True
        try:
            if self.state.shapes_only:
                return func(*args, **(kwargs or {}))
            if self.waiting:
                self._check_waiting(func, args)
            self._place, args = self.placement.of(func, args)
            if self._notes.open:
                self._notes.runs(func, args, kwargs or {})
            recorder = self.recorder
            blocks = recorder.blocks_so_far if recorder.larger else 0
            out = planned[0](func, args, kwargs or {})
            if recorder.larger and recorder.blocks_so_far > blocks:
                recorder.computed_of((*args, *(kwargs or {}).values()))
            if recorder.in_backward and recorder.borders is not None:
                recorder.read_by_backward(args)
            if self.waiting and func._schema.name == "aten::_to_copy":
                self._weights_arrive(args[0], out)
            if recorder.measured:
                self.meter.count(func, args, kwargs or {}, out)
            return out
        finally:
            self.state.in_kernel, self._place = before

    # --- how each operator is run, decided once --------------------------------------------------------------

    def _bounding(self, func: Any, runner: Runner) -> Runner:
        """The way to run it, after which whole numbers that it makes have their bounds."""
        if func._schema.name not in ranges.BOUNDED:
            return runner

        def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            out = runner(func, args, kwargs)
            ranges.derive(func, args, kwargs, out)
            return out

        return run

    def _plan_for(self, func: Any) -> Runner:
        name = func._schema.name
        if _collectives.is_collective(func):
            return self._collective
        if name in HANDLERS:
            handled = self._handled(HANDLERS[name], self._in_place if _writes(func) else self._generic)
            # Lengths of sequences are sorted before they are packed.
            return self._deriving(handled) if name in constants.COUNTING_LABELS or name == "aten::sort" else handled
        if func.namespace not in _TORCHS_OWN and (kernel := kernel_of(func)) is not None:
            return self._by_python(kernel)
        if name.startswith(_foreach):
            return self._foreach_in_place if name.endswith("_") else self._foreach_new
        if name in Matmuls.OPERATORS:
            return self._matmul
        if name in reductions.REDUCTIONS:
            return self._reduction
        if name in RUNNING:
            return self._running
        if func is _add:
            return self._add
        if name in ARITHMETIC:
            return self._arithmetic
        if name in _JOINS:
            return self._join
        if name in ("aten::resize_", "aten::set_", "aten::resize_as_"):
            return self._resize
        returns = func._schema.returns
        aliases = bool(returns) and all(r.alias_info is not None for r in returns)
        if _writes(func):
            return self._fill if name in _FILLED else self._in_place
        if aliases:
            return self._view
        return self._generic

    def _handled(self, handler: Callable[..., Any], otherwise: Runner) -> Runner:
        def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not any_symbolic(args):
                return otherwise(func, args, kwargs)
            if self._place == "cuda" or handler is nothing_new:  # torch has no kernels for some of those
                out = handler(self.recorder, func, args, kwargs)
            elif func._schema.name in BY_VALUES:
                aside = Recorder()  # temporaries of the host take nothing from the GPU
                aside.asked = self.recorder.asked
                out = handler(aside, func, args, kwargs)
                self.recorder.take_notes(aside)
            else:
                return self._generic(func, args, kwargs)
            self._track(func, out, self._place)
            return out

        return run

    def _deriving(self, runner: Runner) -> Runner:
        def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            out = runner(func, args, kwargs)
            constants.derive(func, args, kwargs, out)
            return out

        return run

    def _by_python(self, kernel: Callable[..., Any]) -> Runner:
        """A kernel that is Python: what it calls comes here again, and takes what it takes."""

        def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if self._place != "cuda" or not any_symbolic((*args, *kwargs.values())):
                return self._generic(func, args, kwargs)
            self.state.in_kernel = False  # put back by the caller
            before, self._below_autograd = self._below_autograd, True
            try:
                with self, torch.no_grad():
                    return kernel(*args, **kwargs)
            except (TypeError, NotImplementedError, RuntimeError) as error:  # compiled code beneath is given no data
                why = _("and its kernel for CUDA asks for data: {error}", error=error)
                raise UnsupportedOperatorError(no_kernel(self.recorder, str(func), why)) from error
            finally:
                self._below_autograd = before

        return run

    def _collective(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _collectives.answer(
            self.recorder, func, args, lambda: self._generic(func, args, kwargs), self.meter.counted
        )

    # --- the ways of running ---------------------------------------------------------------------------------

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return meta_results.result_of(func, args, kwargs)
        except NotImplementedError as error:
            if not any_symbolic(args):
                raise
            return stand_in_result(self.recorder, func, args, kwargs, self._place, error)
        except (RuntimeError, IndexError) as error:
            # Either the user's mistake, or torch's code for meta tensors cannot do what its real kernels can.
            if not any_symbolic(args):
                raise
            try:
                return stand_in_result(self.recorder, func, args, kwargs, self._place, error)
            except UnsupportedOperatorError:
                raise error from None

    def _generic(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        device = kwargs.get("device")
        place, pinned = self._place, False
        if device is not None:
            place = self._named_place(device, args)
            if device.type == "cuda":
                kwargs = {**kwargs, "device": _META}
            elif device.type == "cpu" and any_symbolic(args):
                kwargs = {**kwargs, "device": _META}
                # A copy that is not waited for goes to pinned memory (ATen/native/TensorConversions.cpp, `pin_out`).
                pinned = bool(kwargs.get("non_blocking")) and self._place != "cpu"
        if kwargs.get("pin_memory"):
            pinned = True
            kwargs = {**kwargs, "pin_memory": False}
        out = self._run(func, args, kwargs)
        if pinned and isinstance(out, torch.Tensor) and not is_symbolic(out):
            self.recorder.host.add_real(out, pinned=True)
        else:
            self._track(func, out, place, pinned)
        if isinstance(out, torch.Tensor) and is_symbolic(out):
            constants.derive(func, args, kwargs, out)
        return out

    def _named_place(self, device: torch.device, args: tuple[Any, ...]) -> Place:
        """The place that an argument names.

        torch's own code says "meta" where it makes a tensor like a symbolic one; the user's code says so in a factory,
        or in ``with torch.device("meta")``.
        """
        if device.type != "meta":
            return "cuda" if device.type == "cuda" else "cpu"
        if any_symbolic(args):
            return self._place
        if self._building:
            return "cpu"
        return "meta" if self.state.own_meta else "cuda"

    def _view(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = self._run(func, args, kwargs)
        constants.derive(func, args, kwargs, out)
        return out

    def _in_place(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        target = args[0] if args else None
        value = None
        if isinstance(target, torch.Tensor):
            if not is_symbolic(target):
                if any_symbolic(args[1:]):
                    self.recorder.host.add_real(target)
                    return target  # symbolic data arrives in host memory: nothing to write
                self.undo_log.before_write(target)
            else:
                value = None if kwargs else constants.written(func, args)
                self._forget(target)
        if kwargs and isinstance(kwargs.get("out"), torch.Tensor):
            self._forget(kwargs["out"])
        out = self._run(func, args, kwargs)
        if value is not None:
            constants.known(args[0], value)
        self._track(func, out)
        return out

    def _fill(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Initialisation in place: symbolic memory has nothing to fill."""
        if not is_symbolic(args[0]):
            return self._in_place(func, args, kwargs)
        self._forget(args[0])
        return args[0]

    def _forget(self, tensor: torch.Tensor) -> None:
        constants.forget(tensor)
        base = tensor._base
        if base is not None:
            constants.forget(base)

    def _resize(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = self._run(func, args, kwargs)
        if isinstance(out, torch.Tensor) and is_symbolic(out):
            self.recorder.resized(out, str(func))
        return out

    def _matmul(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = self._generic(func, args, kwargs)
        if self._place == "cuda" and any_symbolic(args):
            held = [self.recorder.hold(size, str(func)) for size in copied_operands(func, args, out)]
            self.matmuls.after(func, args, kwargs)
            self.recorder.release(held)
        return out

    def _running(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = self._generic(func, args, kwargs)
        if self._place == "cuda" and is_symbolic(args[0]):
            running(self.recorder, func, args[0], out)
        return out

    def _arithmetic(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.recorder.in_backward and self._place == "cuda" and in_place_of_formula(self.recorder, args):
            return args[0]
        return self._generic(func, args, kwargs)

    def _reduction(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = self._generic(func, args, kwargs)
        if self._place == "cuda" and is_symbolic(args[0]):
            reductions.reduction(self.recorder, func, args, kwargs, out)
        return out

    def _add(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Autograd's own sum of two gradients is done in place where nothing else holds the first one.

        With a dispatch mode on, torch takes every tensor for a subclass and makes a third one instead
        (``InputBuffer::accumulate``, ``can_accumulate_inplace``); undone here.
        """
        if self.recorder.in_backward and not kwargs and self._accumulates(args):
            return _add_(args[0], args[1])
        out = self._generic(func, args, kwargs)
        self.recorder.made_of(out, args)
        return out

    def _join(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Lists that a repeated round has added to are as long as they will be."""
        if self.recorder.repeated:
            args = (self.recorder.as_often(args[0]), *args[1:])
        out = self._generic(func, args, kwargs)
        self.recorder.made_of(out, args[0])
        return out

    def _accumulates(self, args: tuple[Any, ...]) -> bool:
        old, new = args[:2]
        if torch.is_grad_enabled() or not isinstance(new, torch.Tensor) or not is_symbolic(old):
            return False
        if old.shape != new.shape or old.dtype != new.dtype or not is_dense(old):
            return False
        # Holders of the tensor: the engine's buffer, this call's arguments (C++ and Python), the local name.
        if old._use_count() > _ENGINE_HOLDS or _storage_users(old) > self._sole_user:
            return False
        return _called_by_engine()

    def _foreach_in_place(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = args[0]
        if tensors and is_symbolic(tensors[0]):
            return None
        for tensor in tensors:
            self.undo_log.before_write(tensor)
        return func(*args, **kwargs)

    def _foreach_new(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        first = args[0]
        if not isinstance(first, (list, tuple)):
            first = args[1]
        if not first or not is_symbolic(first[0]):
            return func(*args, **kwargs)
        name = str(func)
        scalars = "norm" in name or "max" in func._schema.name.rsplit("_", 1)[-1]
        held = foreach.norm_parts(self.recorder, func, first)
        made = []
        for tensor in first:
            out = tensor.new_empty(()) if scalars and "maximum" not in name else meta_results.empty_like(tensor)
            self.recorder.put(out, self.recorder.place_of(tensor), operator=name)
            made.append(out)
        self.recorder.release(held)
        return made

    # --- the answer ------------------------------------------------------------------------------------------

    def timeline(self, batch_size: int, precision: str) -> Timeline:
        """Everything recorded so far; sizes are those of this batch size."""
        recorder = self.recorder
        traced = Timeline(
            blocks=recorder.blocks(),
            events=tuple(recorder.events),
            phases=tuple(recorder.phases),
            traced=(batch_size,),
            tier=recorder.tier,
            notes=tuple(recorder.notes),
            compute_capability=self.capability.label,
            precision=precision,
            work=self.meter.work(),
            host_blocks=recorder.host.blocks(),
            host_events=tuple(recorder.host.events),
            changes=self.purity.changes(),
            collectives=recorder.collectives(),
            deferred=recorder.deferred(),
            network=network_of(self.meter.work()),
            cudnn=cudnn.asked(),
            optimizer=recorder.optimizer,
            marks=recorder.marks,
        )
        return expanded(traced, recorder.repeats)

    # --- helpers ---------------------------------------------------------------------------------------------

    def _check_waiting(self, func: Any, args: tuple[Any, ...]) -> None:
        """Weights that are kept on the host meet no tensor on the GPU but in a copy: torch would raise here too."""
        if func._schema.name in _COPIES:
            return
        tensors = [tensor for tensor in tensors_in(args) if is_symbolic(tensor) and tensor.dim()]
        names = (self.waiting.get(tensor.untyped_storage()._cdata) for tensor in tensors)
        name = next(filter(None, names), None)
        if name is not None and not all(self.recorder.on_host(tensor) for tensor in tensors):
            raise UnsupportedTechniqueError(
                _(
                    "{name} cannot be kept on the host: {operator} at {line} uses its weights outside its "
                    "forward (another method of the module, or an average of weights). Take it out of "
                    "frozen_on_host",
                    name=name,
                    operator=func,
                    line=self.recorder.source() or _("an unknown line"),
                )
            )

    def _weights_arrive(self, source: torch.Tensor, copy: torch.Tensor) -> None:
        if is_symbolic(source) and source.untyped_storage()._cdata in self.waiting:
            self.recorder.classify([copy], "parameters")

    def _track(self, func: Any, out: Any, place: Place = "cuda", pinned: bool = False) -> None:
        if isinstance(out, torch.Tensor):
            if is_symbolic(out):
                if place == "cuda":
                    self.recorder.track(out, self._name(func))
                else:
                    self.recorder.put(out, place, pinned=pinned)
                if self._building:
                    setattr(out, PLACE, place)
        elif isinstance(out, (tuple, list)):
            for item in out:
                self._track(func, item, place, pinned)

    def _name(self, func: Any) -> str:
        known = self._names.get(id(func))
        if known is None:
            known = self._names[id(func)] = str(func), func
        return known[0]


#: Namespaces without operators of libraries: looked up no further.
_TORCHS_OWN = frozenset({"aten", "prim", "prims", "c10d", "_c10d_functional"})

#: Initialisation of weights that have no memory: nothing to do, nothing to check.
_FILLED = frozenset({"aten::normal_", "aten::uniform_", "aten::zero_", "aten::fill_", "aten::bernoulli_"})

#: Operators that may read one place and write another.
_COPIES = frozenset({"aten::copy_", "aten::_to_copy", "aten::_foreach_copy_"})

#: Operators that join lists of tensors.
_JOINS = frozenset({"aten::cat", "aten::stack"})

#: References to a gradient that only autograd's input buffer holds, as seen from inside ``__torch_dispatch__``.
_ENGINE_HOLDS = 4


def _writes(func: Any) -> bool:
    """True for an operator that changes one of its arguments."""
    return any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)


def _storage_users(tensor: torch.Tensor) -> int:
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count


def _called_by_engine() -> bool:
    """True if the innermost Python frame outside dispatching is the one that started the backward pass."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (frame.f_code.co_filename == __file__ or frame.f_code.co_name in _WRAPPERS):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == "_engine_run_backward"


#: Names of torch's own frames around ``__torch_dispatch__``.
_WRAPPERS = frozenset({"__torch_dispatch__", "inner", "_fn"})


@contextlib.contextmanager
def device_of_factories() -> Iterator[None]:
    """On a torch without CUDA, factories with ``device="cuda"`` get as far as the dispatch mode."""
    ensure = getattr(torch._C, "_ensureCUDADeviceGuardSet", None)
    if ensure is not None and not torch.cuda.is_initialized():
        if not getattr(torch._C, "_cuda_getDeviceCount", int)():
            autograd_threads.start_without_gpus()  # from torch 2.15 on, it would start threads for the pretended ones
        ensure()
    yield
