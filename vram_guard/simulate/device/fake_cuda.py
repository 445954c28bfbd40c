"""The simulated CUDA device: while a trace runs, symbolic tensors and ``torch.cuda`` answer as a CUDA device would.

Symbolic tensors are plain meta tensors: torch runs their shape arithmetic and autograd on any machine, with or
without CUDA. What gives them away is what user code can see: ``tensor.device``, ``tensor.to("cuda")``,
``torch.cuda.is_available()``. :func:`simulated_cuda` puts CUDA's answers there and takes them away again. The list of
what is replaced is :data:`TENSOR_ATTRIBUTES` and :func:`.cuda_module.cuda_answers`; nothing else of torch is touched.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch.overrides import _get_current_function_mode_stack, handle_torch_function
from torch.utils._device import DeviceContext

from vram_guard.patching import replace_attributes, replaced
from vram_guard.simulate.device import constants
from vram_guard.simulate.device.capability import Capability
from vram_guard.simulate.device.compiled_kernels import CompiledKernels
from vram_guard.simulate.device.cuda_module import (
    ASSUMED_MEMORY,
    CUDA,
    GENERATOR_ANSWERS,
    TOOLS,
    cuda_answers,
    while_active,
)
from vram_guard.simulate.device.cuda_streams import current_stream, number_of, streams_noted
from vram_guard.simulate.device.data_dependent import ScalarQueries
from vram_guard.simulate.device.import_guard import imports_run_for_real
from vram_guard.simulate.device.managed_memory import ManagedMemory
from vram_guard.simulate.device.packed_sequences import lengths_known
from vram_guard.simulate.device.symbolic import is_symbolic
from vram_guard.simulate.device.tensor_types import CUDA_TYPES, default_type_setter, meaning_of, type_on_gpu
from vram_guard.simulate.device.triton_launches import TritonLaunches
from vram_guard.simulate.memory.recorder import Recorder

_META = torch.device("meta")
_SETTER = "set_default_tensor_type"

_base = torch._C.TensorBase
_real_device: Callable[[torch.Tensor], torch.device] = _base.device.__get__
_real_is_cpu: Callable[[torch.Tensor], bool] = _base.is_cpu.__get__  # type: ignore[attr-defined]


class FakeCudaState:
    """The simulated device of one trace: whether it is on right now, and who answers for its tensors."""

    def __init__(self, recorder: Recorder, total_memory: int = ASSUMED_MEMORY) -> None:
        self.total_memory = total_memory
        """Bytes of the device, for code that asks for them."""
        self.active = False
        """A module imported during a trace may keep what it found in ``torch.cuda``: that must end with the trace."""
        self.in_kernel = False
        """Set while torch's own code for meta tensors runs: that must see the truth."""
        self.shapes_only = 0
        """Above 0 while torch derives the shapes of results: operators that run then take no memory."""
        self.own_meta = False
        """Set while the user's own code makes a tensor on the meta device."""
        self.building = False
        """Set while a model's constructor runs, under ``torch.device("meta")``."""
        self.imported: list[Callable[[], None]] = []
        """Called when a module has been imported during the trace."""
        self.recorder = recorder
        self.queries = ScalarQueries(recorder)

    def place(self, tensor: torch.Tensor) -> torch.device:
        """The device that a symbolic tensor claims to be on."""
        return _DEVICES[self.recorder.place_of(tensor)]

    def on_host(self, tensor: torch.Tensor) -> bool:
        """True if this symbolic tensor lies in host memory."""
        return self.recorder.place_of(tensor) == "cpu"

    def pinned(self, tensor: torch.Tensor) -> bool:
        """True if this symbolic tensor lies in pinned host memory."""
        return self.recorder.host.pinned(tensor)


_DEVICES = {"cuda": CUDA, "cpu": torch.device("cpu"), "meta": _META}


def _tensor_attributes(state: FakeCudaState) -> dict[str, Any]:
    """The attributes that ``torch.Tensor`` gets for the time of a trace."""

    def simulated(tensor: torch.Tensor) -> bool:
        return not state.in_kernel and is_symbolic(tensor)

    def device(self: torch.Tensor) -> torch.device:
        if simulated(self):
            return state.place(self)
        return _real_device(self)

    def is_cuda(self: torch.Tensor) -> bool:
        return simulated(self) and state.place(self) is CUDA

    def is_cpu(self: torch.Tensor) -> bool:
        return state.on_host(self) if simulated(self) else _real_is_cpu(self)

    def is_meta(self: torch.Tensor) -> bool:
        return is_symbolic(self) and (state.in_kernel or state.place(self) is _META)

    def get_device(self: torch.Tensor) -> int:
        return 0 if is_cuda(self) else _base.get_device(self)

    def wait_for_value(tensor: torch.Tensor) -> None:
        if is_cuda(tensor):
            current_stream().synchronize()  # the value is copied on this stream, and waited for

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not state.in_kernel:
            # A wrapper comes here twice, by way of ``__torch_function__``: then our own meta device is named already.
            to_meta = not hasattr(self, "__tensor_flatten__") and _names_meta(args, kwargs, state)
            args, kwargs = _on_meta(self, args, kwargs, state)
            place = state.place(self) if is_symbolic(self) else None
            target = _target(args, kwargs)
            if place is CUDA and target is not None and target.type == "cpu" and not kwargs.get("non_blocking"):
                wait_for_value(self)
            if to_meta and place is not _META:
                return _to_own_meta(self, args, kwargs, state)
            if place is not None and place.type == "cpu":
                return _from_host(self, args, kwargs)
            if place is _META and not to_meta and _target(args, kwargs) is not None:
                # c10's own words
                raise NotImplementedError("Cannot copy out of meta tensor; no data!")
        if _has_own_functions(type(self)):  # torch would hand it this replacement, which no table of its own knows
            own: torch.Tensor = type(self).__torch_function__(_base.to, (type(self),), (self, *args), kwargs)
            return own
        return _base.to(self, *args, **kwargs)

    def type_as(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return to(self, other) if is_symbolic(self) else _base.type_as(self, other)

    def of_type(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            return type_on_gpu(self.dtype) if is_cuda(self) else _base.type(self, *args, **kwargs)
        meant = meaning_of(dtype)
        if meant is None or not (meant.device == "cuda" or is_symbolic(self)):
            return _base.type(self, dtype, *args, **kwargs)
        return to(self, meant.device, meant.dtype, *args, **kwargs)

    def cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return to(self, "cuda")

    def cpu(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return to(self, "cpu")

    def pin_memory(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if is_symbolic(self) and state.on_host(self) and not state.pinned(self):
            return torch.empty_like(self, device="cpu", pin_memory=True)  # a copy, as for real
        return self

    def is_pinned(self: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
        return is_symbolic(self) and state.on_host(self) and state.pinned(self)

    def numpy(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return _stand_in(self).numpy() if is_symbolic(self) else _base.numpy(self, *args, **kwargs)

    def tolist(self: torch.Tensor) -> Any:
        wait_for_value(self)
        return state.queries.tolist(self) if is_symbolic(self) else _base.tolist(self)

    def item(self: torch.Tensor) -> Any:
        wait_for_value(self)
        return state.queries.item(self) if simulated(self) else _base.item(self)

    def record_stream(self: torch.Tensor, stream: Any) -> None:
        if is_cuda(self):
            state.recorder.record_stream(self, number_of(stream))

    def truth(self: torch.Tensor) -> bool:
        wait_for_value(self)
        return state.queries.truth(self) if simulated(self) else _base.__bool__(self)

    def array(self: torch.Tensor, dtype: Any = None, copy: Any = None) -> Any:
        if not is_symbolic(self):
            return _real_array(self) if dtype is None else _real_array(self, dtype)
        made = _stand_in(self).numpy()
        return made if dtype is None else made.astype(dtype)

    def representation(self: torch.Tensor, **kwargs: Any) -> str:
        if is_symbolic(self):
            return f"tensor(..., device='{device(self)}', size={tuple(self.shape)}, dtype={self.dtype})"
        return _real_repr(self, **kwargs)

    def make_wrapper_subclass(cls: Any, size: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        # A wrapper around symbolic tensors is symbolic too, or torch would look for a GPU to guard.
        named = as_device(kwargs.get("device"))
        if named is not None and named.type == "cuda":
            kwargs["device"] = _META
        made: torch.Tensor = _base._make_wrapper_subclass(cls, size, *args, **kwargs)
        return made

    properties: dict[str, Callable[..., Any]]
    properties = {"device": device, "is_cuda": is_cuda, "is_cpu": is_cpu, "is_meta": is_meta}
    methods: dict[str, Callable[..., Any]] = {
        "get_device": get_device,
        "to": to,
        "type_as": type_as,
        "type": of_type,
        "cuda": cuda,
        "cpu": cpu,
        "pin_memory": pin_memory,
        "is_pinned": is_pinned,
        "numpy": numpy,
        "tolist": tolist,
        "item": item,
        "record_stream": record_stream,
        "__bool__": truth,
        "__array__": array,
        "__repr__": representation,
    }
    return {
        "_make_wrapper_subclass": staticmethod(make_wrapper_subclass),
        **{name: property(_by_way_of_modes(answer)) for name, answer in properties.items()},
        **{name: _by_way_of_modes(answer) for name, answer in methods.items()},
    }


def _by_way_of_modes(answer: Callable[..., Any]) -> Callable[..., Any]:
    """A method that is handed to the function modes that are on, as torch hands its own, and then answers without them.

    Otherwise what it asks torch for would go to them, and come back to it with arguments that it has translated.
    """

    @functools.wraps(answer)
    def handed(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if torch._C._is_torch_function_mode_enabled():
            return handle_torch_function(handed, (self,), self, *args, **kwargs)
        return answer(self, *args, **kwargs)

    return handed


@functools.cache
def _has_own_functions(kind: type[torch.Tensor]) -> bool:
    """True for wrappers that answer functions of torch by a table of their own (torchao's)."""
    own = getattr(kind.__torch_function__, "__func__", None)  # a disabled one has none
    inherited = torch.Tensor.__torch_function__.__func__  # type: ignore[attr-defined]
    return hasattr(kind, "__tensor_flatten__") and own is not None and own is not inherited


_real_repr: Callable[..., str] = torch.Tensor.__repr__
_real_array: Callable[..., Any] = torch.Tensor.__array__


def _stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """A real tensor with this shape, for code that insists on data (never kept): its values where they are known."""
    known = constants.compute(tensor)
    if known is not None:
        return known.clone()
    value = 1 if tensor.dtype == torch.bool else constants.placeholder(tensor)
    return torch.full((), value, dtype=tensor.dtype).expand(tensor.shape)


def as_device(value: Any) -> torch.device | None:
    """The device that an argument names, if it names one."""
    if isinstance(value, torch.device):
        return value
    if isinstance(value, str):
        try:
            return torch.device(value)
        except RuntimeError:
            return None
    return None


def _on_meta(
    self: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], state: FakeCudaState
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of ``Tensor.to`` with the GPU replaced by the meta device."""

    def swapped(value: Any) -> Any:
        if isinstance(value, int) and not isinstance(value, bool):
            return _META
        named = as_device(value)
        if named is None:
            return value
        return _META if named.type == "cuda" else named

    first = args[:1]
    if first and isinstance(first[0], torch.Tensor) and is_symbolic(first[0]):
        # .to(other): its dtype and its simulated device, and never other itself, which torch would ask.
        named = torch.device("cpu") if state.on_host(first[0]) else _META
        return (named, first[0].dtype, *args[1:]), kwargs
    if first:
        args = (swapped(first[0]), *args[1:])
    if "device" in kwargs:
        kwargs = {**kwargs, "device": swapped(kwargs["device"])}
    return args, kwargs


def _target(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device | None:
    """The device among arguments of ``Tensor.to``, as :func:`_on_meta` left them."""
    return args[0] if args and isinstance(args[0], torch.device) else kwargs.get("device")


def _dtype(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
    return next((value for value in (*args, kwargs.get("dtype")) if isinstance(value, torch.dtype)), None)


def _names_meta(args: tuple[Any, ...], kwargs: dict[str, Any], state: FakeCudaState) -> bool:
    """True if ``Tensor.to`` is asked for the user's own meta device."""
    named = args[0] if args else kwargs.get("device")
    if isinstance(named, torch.Tensor):
        return is_symbolic(named) and state.place(named) is _META
    device = as_device(named)
    return device is not None and device.type == "meta"


def _to_own_meta(
    self: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], state: FakeCudaState
) -> torch.Tensor:
    """``Tensor.to`` the meta device, where a tensor takes no memory."""
    state.shapes_only += 1
    try:
        made = torch.empty_like(self, dtype=_dtype(args, kwargs), device=_META)
    finally:
        state.shapes_only -= 1
    state.recorder.put(made, "meta")
    return made


def _from_host(self: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """``Tensor.to`` of a symbolic tensor in host memory, its arguments as :func:`_on_meta` left them.

    Both places are the meta device, so torch would take a move to the GPU for none at all, and a move to where the
    tensor is already for one.
    """
    device, dtype = _target(args, kwargs), _dtype(args, kwargs)
    if device is None:
        return _base.to(self, *args, **kwargs)
    if device.type == "cpu":
        return _base.to(self, self.dtype if dtype is None else dtype)
    moved: torch.Tensor = torch.ops.aten._to_copy(self, dtype=dtype, device=CUDA)
    return moved


def _factory(original: Callable[..., Any], state: FakeCudaState) -> Callable[..., Any]:
    """``torch.tensor`` and ``torch.as_tensor``, which would open the GPU before anybody can step in.

    What a constructor makes of given numbers keeps them, for layers may be sized by them.
    """

    @functools.wraps(original)
    def made(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        named = CUDA if isinstance(device, int) and not isinstance(device, bool) else as_device(device)
        if device is None and not state.in_kernel:
            named = _default_device()
        requires_grad = kwargs.pop("requires_grad", False)
        if named is None or named.type != "cuda":
            if device is not None:
                kwargs["device"] = device
            elif state.building:
                kwargs["device"] = "cpu"
            result: torch.Tensor = original(*args, **kwargs)
        else:
            data = args[0] if args else kwargs["data"]
            if isinstance(data, torch.Tensor) and is_symbolic(data):
                result = original(*args, device=_META, **kwargs)
                result = result if state.place(result) is CUDA else result.to(CUDA)
            else:
                result = original(*args, device="cpu", **kwargs).to(CUDA)
        return result.requires_grad_() if requires_grad else result

    return made


#: Factories that the user's code may ask for a tensor on the meta device; ``nn.Linear(..., device="meta")`` does.
_FACTORIES = (
    "empty",
    "empty_strided",
    "zeros",
    "ones",
    "full",
    "rand",
    "randn",
    "randint",
    "arange",
    "linspace",
    "eye",
)

#: Functions of torch's fake tensors that make a context on the GPU.
_CONTEXT = ("init_gpu_context", "init_cuda_context")

#: Others that may be given a GPU by its number, which torch would ask the driver about.
_OTHER_FACTORIES = (
    *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"),
    *("randperm", "normal", "logspace", "tril_indices", "triu_indices"),
)


def named_by_number(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments in which a GPU that is named by its number is a device."""
    return {**kwargs, "device": CUDA} if type(kwargs.get("device")) is int else kwargs


def _by_name(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def made(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **named_by_number(kwargs))

    return made


def device_by_default(function: Any, named: Any) -> torch.device | None:
    """The device on which torch's function makes its tensor where the default device decides; None: it does not.

    Args:
        function: that is called.
        named: the device that it is given.
    """
    if named is not None or function not in torch.utils._device._device_constructors():
        return None
    return _default_device()


def _default_device() -> torch.device | None:
    """Device of the innermost ``with torch.device(...)``; ``torch.get_default_device`` would make a tensor to know."""
    contexts = [mode for mode in _get_current_function_mode_stack() if isinstance(mode, DeviceContext)]
    return contexts[-1].device if contexts else None


def _on_named_device(original: Callable[..., Any], state: FakeCudaState) -> Callable[..., Any]:
    """A factory that says whether it was the user's code that named the meta device.

    A constructor that asks for a tensor where another one lies gets one that takes no memory either.
    """

    @functools.wraps(original)
    def made(*args: Any, **kwargs: Any) -> torch.Tensor:
        kwargs = named_by_number(kwargs)
        if state.in_kernel:  # our own: nobody looks at the places of what a kernel makes in between
            own: torch.Tensor = original(*args, **kwargs)
            return own
        if state.building and kwargs.get("device") is _DEVICES["cpu"]:
            del kwargs["device"]
        named = _default_device() if kwargs.get("device") is None else as_device(kwargs["device"])
        before, state.own_meta = state.own_meta, named is not None and named.type == "meta"
        try:
            result: torch.Tensor = original(*args, **kwargs)
        finally:
            state.own_meta = before
        return result

    return made


def _group_by_device(original: Callable[..., Any], state: FakeCudaState) -> Callable[..., Any]:
    """Grouping of optimizer tensors: symbolic groups are CUDA groups, so that foreach is chosen, or lie on the host."""

    def place(tensors: list[list[torch.Tensor | None]]) -> torch.device:
        first = next((tensor for tensor in tensors[0] if tensor is not None), None) if tensors else None
        return torch.device("cpu") if first is not None and state.on_host(first) else CUDA

    @functools.wraps(original)
    def grouped(*args: Any, **kwargs: Any) -> Any:
        groups = original(*args, **kwargs)
        return {
            (place(value[0]) if device is not None and device.type == "meta" else device, dtype): value
            for (device, dtype), value in groups.items()
        }

    return grouped


#: Names that ``torch.Tensor`` answers differently during a trace (for symbolic tensors only).
TENSOR_ATTRIBUTES: tuple[str, ...] = tuple(_tensor_attributes(FakeCudaState(Recorder())))


def _answers_of(module: Any, answers: dict[str, Any], state: FakeCudaState) -> dict[str, Any]:
    return {name: while_active(state, value, getattr(module, name)) for name, value in answers.items()}


@contextlib.contextmanager
def _dynamos_tables_kept() -> Iterator[None]:
    """After the block Dynamo's tables of torch's functions and methods hold none of the trace's own replacements.

    A process group that is made empties them (``init_process_group``), and Dynamo fills each when it next looks.
    With replacements in them, code that is compiled later in this process would end a graph at each of torch's own.
    """

    def tables() -> list[Any]:
        rules = sys.modules.get("torch._dynamo.trace_rules")
        names = ("get_torch_obj_rule_map", "get_tensor_method")
        return [getattr(rules, name)() for name in names if hasattr(rules, name)]

    before = tables()
    try:
        yield
    finally:
        if [*map(id, tables())] != [*map(id, before)]:
            sys.modules["torch._dynamo.trace_rules"].clear_lru_cache()


@contextlib.contextmanager
def simulated_cuda(state: FakeCudaState, capability: Capability) -> Iterator[None]:
    """Symbolic tensors and ``torch.cuda`` answer as one CUDA device of this compute capability inside the block."""
    group = "_group_tensors_by_device_and_dtype"
    torch.utils._device._device_constructors()  # cached for good: let it see torch's own factories, not these
    answers = cuda_answers(capability, state.total_memory)
    replacements: tuple[tuple[Any, dict[str, Any]], ...] = (
        (torch.Tensor, _tensor_attributes(state)),
        (torch.cuda, _answers_of(torch.cuda, answers, state)),
        (torch.cuda, CUDA_TYPES),
        (torch, {_SETTER: while_active(state, default_type_setter(getattr(torch, _SETTER)), getattr(torch, _SETTER))}),
        (torch.cuda.random, _answers_of(torch.cuda.random, GENERATOR_ANSWERS, state)),
        (torch.cuda, {"_cudart": TOOLS}),
        (torch.cuda.nvtx, {"_nvtx": TOOLS}),
        (torch, {name: _factory(getattr(torch, name), state) for name in ("tensor", "as_tensor")}),
        (torch, {name: _on_named_device(getattr(torch, name), state) for name in _FACTORIES}),
        (torch, {name: _by_name(getattr(torch, name)) for name in _OTHER_FACTORIES}),
        # flatten_parameters would call cuDNN; the stand-ins of an RNN's weights are flat from the start.
        (torch.backends.cudnn, {"is_acceptable": lambda tensor: False}),
        (torch._C, {group: _group_by_device(getattr(torch._C, group), state)}),
        # torch's own fake tensors of CUDA (DTensor makes them) would first put a real tensor there.
        (fake_tensor, {name: lambda *_args: None for name in _CONTEXT if hasattr(fake_tensor, name)}),
    )
    with _dynamos_tables_kept(), contextlib.ExitStack() as stack:
        undone: list[Callable[[], None]] = []
        for target, values in replacements:
            undone.append(replace_attributes(target, values))
            stack.callback(undone[-1])

        @contextlib.contextmanager
        def as_it_was() -> Iterator[None]:
            """Libraries keep tables by torch's own functions (torchao's NF4), which stay when the trace is over."""
            # Other replacements may lie over these: DeepSpeed's own tensors of host memory.
            replaced_since = [
                (target, {name: vars(target)[name] for name in values}) for target, values in replacements
            ]
            for undo in reversed(undone):
                undo()
            try:
                yield
            finally:
                for target, values in replaced_since:
                    replace_attributes(target, values)

        if hasattr(torch, "accelerator"):
            on_accelerator = {name: answers[name] for name in ("current_stream", "set_stream", "synchronize")}
            stack.enter_context(replaced(torch.accelerator, on_accelerator))
        stack.enter_context(streams_noted(lambda: state.recorder.streams))
        stack.enter_context(lengths_known(state.recorder))
        compiled = CompiledKernels(state, stack)
        taken_over = TritonLaunches(state, capability, stack), ManagedMemory(state, stack), compiled

        def look() -> None:
            for library in taken_over:
                library.look()
            for seen in tuple(state.imported):
                seen()

        look()
        stack.enter_context(imports_run_for_real(state, after=look, around=as_it_was))
        state.active = True
        stack.callback(setattr, state, "active", False)
        yield
