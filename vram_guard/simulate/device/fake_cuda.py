"""The pretend GPU: while a trace runs, symbolic tensors and ``torch.cuda`` answer as a CUDA device would.

Symbolic tensors are plain meta tensors: torch runs their shape arithmetic and autograd on any machine, with or
without CUDA. What gives them away is what user code can see: ``tensor.device``, ``tensor.to("cuda")``,
``torch.cuda.is_available()``. :func:`pretend_cuda` puts CUDA's answers there and takes them away again. The list of
what is replaced is :data:`TENSOR_ATTRIBUTES` and :func:`cuda_answers`; nothing else of torch is touched.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from vram_guard.simulate.tracing.import_guard import Switch, imported_as_always

if TYPE_CHECKING:
    from typing_extensions import Self

    from vram_guard.simulate.device.data_dependent import Questions

_CUDA = torch.device("cuda", 0)
_META = torch.device("meta")

_base = torch._C.TensorBase
_real_device: Callable[[torch.Tensor], torch.device] = _base.device.__get__
_real_is_meta: Callable[[torch.Tensor], bool] = _base.is_meta.__get__  # type: ignore[attr-defined]
_real_is_cpu: Callable[[torch.Tensor], bool] = _base.is_cpu.__get__  # type: ignore[attr-defined]

is_symbolic = _real_is_meta
"""Whether a tensor is symbolic, whatever it pretends to be."""


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their stretch of memory without gaps or overlaps, in whatever order."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


class Pretence:
    """Whether the pretence is on right now, and which symbolic tensors pretend to be in host memory."""

    def __init__(
        self,
        on_host: Callable[[torch.Tensor], bool],
        pinned: Callable[[torch.Tensor], bool],
        questions: Questions,
    ) -> None:
        self.active = False
        """A module imported during a trace may keep what it found in ``torch.cuda``: that must end with the trace."""
        self.in_kernel = False
        """Set while torch's own code for meta tensors runs: that must see the truth."""
        self.shapes_only = 0
        """Above 0 while torch derives the shapes of results: operators that run then take no memory."""
        self.on_host = on_host
        self.pinned = pinned
        self.questions = questions


def _tensor_attributes(state: Pretence) -> dict[str, Any]:
    """The attributes that ``torch.Tensor`` gets for the time of a trace."""

    def pretends(tensor: torch.Tensor) -> bool:
        return not state.in_kernel and _real_is_meta(tensor)

    def device(self: torch.Tensor) -> torch.device:
        if pretends(self):
            return torch.device("cpu") if state.on_host(self) else _CUDA
        return _real_device(self)

    def is_cuda(self: torch.Tensor) -> bool:
        return pretends(self) and not state.on_host(self)

    def is_cpu(self: torch.Tensor) -> bool:
        return state.on_host(self) if pretends(self) else _real_is_cpu(self)

    def is_meta(self: torch.Tensor) -> bool:
        return state.in_kernel and _real_is_meta(self)

    def get_device(self: torch.Tensor) -> int:
        return 0 if pretends(self) else _base.get_device(self)

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not state.in_kernel:
            args, kwargs = _on_meta(self, args, kwargs, state)
            if _real_is_meta(self) and state.on_host(self):
                return _from_host(self, args, kwargs)
        return _base.to(self, *args, **kwargs)

    def cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return to(self, "cuda")

    def cpu(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return to(self, "cpu")

    def pin_memory(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if _real_is_meta(self) and state.on_host(self) and not state.pinned(self):
            return torch.empty_like(self, device="cpu", pin_memory=True)  # a copy, as for real
        return self

    def is_pinned(self: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
        return _real_is_meta(self) and state.on_host(self) and state.pinned(self)

    def numpy(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return _stand_in(self).numpy() if _real_is_meta(self) else _base.numpy(self, *args, **kwargs)

    def tolist(self: torch.Tensor) -> Any:
        return state.questions.tolist(self) if _real_is_meta(self) else _base.tolist(self)

    def item(self: torch.Tensor) -> Any:
        return state.questions.item(self) if pretends(self) else _base.item(self)

    def truth(self: torch.Tensor) -> bool:
        return state.questions.truth(self) if pretends(self) else _base.__bool__(self)

    def array(self: torch.Tensor, dtype: Any = None, copy: Any = None) -> Any:
        if not _real_is_meta(self):
            return _real_array(self) if dtype is None else _real_array(self, dtype)
        made = _stand_in(self).numpy()
        return made if dtype is None else made.astype(dtype)

    def representation(self: torch.Tensor, **kwargs: Any) -> str:
        if _real_is_meta(self):
            return f"tensor(..., device='{device(self)}', size={tuple(self.shape)}, dtype={self.dtype})"
        return _real_repr(self, **kwargs)

    def make_wrapper_subclass(cls: Any, size: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        # A wrapper around symbolic tensors is symbolic too, or torch would look for a GPU to guard.
        named = as_device(kwargs.get("device"))
        if named is not None and named.type == "cuda":
            kwargs["device"] = _META
        made: torch.Tensor = _base._make_wrapper_subclass(cls, size, *args, **kwargs)
        return made

    return {
        "_make_wrapper_subclass": staticmethod(make_wrapper_subclass),
        "device": property(device),
        "is_cuda": property(is_cuda),
        "is_cpu": property(is_cpu),
        "is_meta": property(is_meta),
        "get_device": get_device,
        "to": to,
        "cuda": cuda,
        "cpu": cpu,
        "pin_memory": pin_memory,
        "is_pinned": is_pinned,
        "numpy": numpy,
        "tolist": tolist,
        "item": item,
        "__bool__": truth,
        "__array__": array,
        "__repr__": representation,
    }


#: Names that ``torch.Tensor`` answers differently during a trace (for symbolic tensors only).
TENSOR_ATTRIBUTES: tuple[str, ...] = (
    *("device", "is_cuda", "is_cpu", "is_meta", "get_device", "to", "cuda", "cpu"),
    *("pin_memory", "is_pinned", "numpy", "tolist", "item", "__bool__", "__array__", "__repr__"),
    "_make_wrapper_subclass",
)

_real_repr: Callable[..., str] = torch.Tensor.__repr__
_real_array: Callable[..., Any] = torch.Tensor.__array__


def _stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """A real tensor of ones with this shape, for code that insists on data (never kept)."""
    return torch.ones((), dtype=tensor.dtype).expand(tensor.shape)


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
    self: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], state: Pretence
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
    if first and isinstance(first[0], torch.Tensor) and _real_is_meta(first[0]):
        # .to(other): its dtype and its pretended device, and never other itself, which torch would ask.
        named = torch.device("cpu") if state.on_host(first[0]) else _META
        return (named, first[0].dtype, *args[1:]), kwargs
    if first:
        args = (swapped(first[0]), *args[1:])
    if "device" in kwargs:
        kwargs = {**kwargs, "device": swapped(kwargs["device"])}
    return args, kwargs


def _from_host(self: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """``Tensor.to`` of a symbolic tensor in host memory, its arguments as :func:`_on_meta` left them.

    Both places are the meta device, so torch would take a move to the GPU for none at all, and a move to where the
    tensor is already for one.
    """
    device = args[0] if args and isinstance(args[0], torch.device) else kwargs.get("device")
    if device is None:
        return _base.to(self, *args, **kwargs)
    dtype = next((value for value in (*args, kwargs.get("dtype")) if isinstance(value, torch.dtype)), None)
    if device.type == "cpu":
        return _base.to(self, self.dtype if dtype is None else dtype)
    moved: torch.Tensor = torch.ops.aten._to_copy(self, dtype=dtype, device=_CUDA)
    return moved


def _factory(original: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.tensor`` and ``torch.as_tensor``, which would open the GPU before anybody can step in."""

    @functools.wraps(original)
    def made(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        named = _CUDA if isinstance(device, int) and not isinstance(device, bool) else as_device(device)
        requires_grad = kwargs.pop("requires_grad", False)
        if named is None or named.type != "cuda":
            if device is not None:
                kwargs["device"] = device
            result: torch.Tensor = original(*args, **kwargs)
        else:
            data = args[0] if args else kwargs["data"]
            if isinstance(data, torch.Tensor) and _real_is_meta(data):
                result = original(*args, **kwargs)
            else:
                result = original(*args, device="cpu", **kwargs).to(_CUDA)
        return result.requires_grad_() if requires_grad else result

    return made


def _group_by_device(original: Callable[..., Any], state: Pretence) -> Callable[..., Any]:
    """Grouping of optimizer tensors: symbolic groups are CUDA groups, so that foreach is chosen, or lie on the host."""

    def place(tensors: list[list[torch.Tensor | None]]) -> torch.device:
        first = next((tensor for tensor in tensors[0] if tensor is not None), None) if tensors else None
        return torch.device("cpu") if first is not None and state.on_host(first) else _CUDA

    @functools.wraps(original)
    def grouped(*args: Any, **kwargs: Any) -> Any:
        groups = original(*args, **kwargs)
        return {
            (place(value[0]) if device is not None and device.type == "meta" else device, dtype): value
            for (device, dtype), value in groups.items()
        }

    return grouped


class _NullContext:
    """Stands for streams, events and device guards: there is one device and one stream."""

    cuda_stream = 0
    device = _CUDA
    device_index = 0
    stream_id = 0
    device_type = 1

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        return None

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "record_event":
            return lambda *args, **kwargs: _NullContext()
        return lambda *args, **kwargs: 0.0 if name == "elapsed_time" else None


def cuda_answers(capability: tuple[int, int], total_memory: int, name: str) -> dict[str, Any]:
    """What ``torch.cuda`` answers during a trace. No call reaches a driver."""
    properties = SimpleNamespace(
        name=name,
        major=capability[0],
        minor=capability[1],
        total_memory=total_memory,
        multi_processor_count=108,
        is_integrated=False,
        is_multi_gpu_board=False,
        warp_size=32,
        L2_cache_size=40 * 2**20,
    )
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "_lazy_call": lambda *args, **kwargs: None,
        "init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "get_device_name": lambda device=None: name,
        "get_device_capability": lambda device=None: capability,
        "get_device_properties": lambda device=None: properties,
        "is_bf16_supported": lambda *args, **kwargs: capability >= (8, 0),
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "is_current_stream_capturing": lambda: False,
        "memory_allocated": lambda device=None: 0,
        "memory_reserved": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "max_memory_reserved": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None,
        "mem_get_info": lambda device=None: (total_memory, total_memory),
        "memory_stats": lambda device=None: {},
        "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda state, device=None: None,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "current_stream": _NullContext,
        "default_stream": _NullContext,
        "stream": _NullContext,
        "Stream": _NullContext,
        "Event": _NullContext,
        "device": _NullContext,
    }


def while_active(state: Switch, pretended: Any, original: Any) -> Any:
    """``pretended`` while the trace runs and ``original`` ever after, for whoever got hold of it."""
    if isinstance(original, type):

        def new(cls: type, *args: Any, **kwargs: Any) -> Any:
            return pretended(*args, **kwargs) if state.active else original(*args, **kwargs)

        return type(original.__name__, (original,), {"__new__": new})

    @functools.wraps(original)
    def answer(*args: Any, **kwargs: Any) -> Any:
        return pretended(*args, **kwargs) if state.active else original(*args, **kwargs)

    return answer


@contextlib.contextmanager
def replaced(target: Any, values: dict[str, Any]) -> Iterator[None]:
    """``target`` has these attributes inside the block, and exactly its old ones afterwards."""
    missing = object()
    own = vars(target)
    before = {name: own.get(name, missing) for name in values}
    try:
        for name, value in values.items():
            setattr(target, name, value)
        yield
    finally:
        for name, value in before.items():
            if value is missing:
                # A class that inherited the attribute inherits it again.
                if name in vars(target):
                    delattr(target, name)
            else:
                setattr(target, name, value)


@contextlib.contextmanager
def pretend_cuda(
    state: Pretence,
    *,
    capability: tuple[int, int],
    total_memory: int = 80 * 2**30,
    name: str = "vram_guard pretend GPU",
) -> Iterator[None]:
    """Symbolic tensors and ``torch.cuda`` answer as one CUDA device inside the block."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(torch.Tensor, _tensor_attributes(state)))
        answers = cuda_answers(capability, total_memory, name)
        guarded = {key: while_active(state, value, getattr(torch.cuda, key)) for key, value in answers.items()}
        stack.enter_context(replaced(torch.cuda, guarded))
        stack.enter_context(
            replaced(
                torch,
                {"tensor": _factory(torch.tensor), "as_tensor": _factory(torch.as_tensor)},
            )
        )
        # flatten_parameters would call cuDNN; the stand-ins of an RNN's weights are flat from the start.
        stack.enter_context(replaced(torch.backends.cudnn, {"is_acceptable": lambda tensor: False}))
        group = "_group_tensors_by_device_and_dtype"
        stack.enter_context(replaced(torch._C, {group: _group_by_device(getattr(torch._C, group), state)}))
        stack.enter_context(imported_as_always(state))
        state.active = True
        stack.callback(setattr, state, "active", False)
        yield
