"""Fake tensors of torch's compiler, made of symbolic ones: they lie on CUDA in Python and on the meta device in C++.

C++ has no CUDA to ask on a machine without a GPU, and kernels of a trace (autocast, composite operators) stand at the
meta device's dispatch keys: there they act on what the compiler follows, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map_only

from vram_guard.patching import replaced
from vram_guard.simulate.device.cuda_module import CUDA
from vram_guard.simulate.device.fake_cuda import FakeCudaState
from vram_guard.simulate.device.symbolic import is_symbolic
from vram_guard.tensors import inner_tensors

_META = torch.device("meta")

_make_subclass: Callable[..., torch.Tensor] = torch._C.TensorBase._make_subclass
_is_meta: Callable[[torch.Tensor], bool] = torch._C.TensorBase.is_meta.__get__  # type: ignore[attr-defined]

#: The operator by which C++ asks a tensor that is Python where it lies.
_DEVICE_OF = torch.ops.prim.device.default


def on_cuda(value: Any) -> Any:
    """The meta device as CUDA; everything else as it is."""
    return CUDA if isinstance(value, torch.device) and value.type == "meta" else value


def moved_to_cuda(tensor: Any) -> Any:
    """A fake tensor on the meta device, which from now on lies on CUDA."""
    if isinstance(tensor, FakeTensor) and tensor.fake_device.type == "meta":
        tensor.fake_device = CUDA
    return tensor


def graph_on_cuda(graph: torch.fx.GraphModule) -> None:
    """A graph and those within it name CUDA wherever they name the meta device."""
    for module in graph.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                for kept in ("val", "tensor_meta"):
                    if kept in node.meta:
                        tree_map_only(FakeTensor, moved_to_cuda, node.meta[kept])
                if node.op != "placeholder":
                    node.args = torch.fx.node.map_aggregate(node.args, on_cuda)
                    node.kwargs = torch.fx.node.map_aggregate(node.kwargs, on_cuda)
            module.recompile()


@contextlib.contextmanager
def fake_tensors_on_cuda(state: FakeCudaState) -> Iterator[None]:
    """Inside the block, fake tensors of symbolic ones lie where the trace has them."""
    from_tensor = FakeTensorMode.from_tensor
    of_tensor = vars(FakeTensor)["__torch_dispatch__"].__func__
    of_mode = FakeTensorMode.__torch_dispatch__

    def made_of(self: FakeTensorMode, tensor: torch.Tensor, **kwargs: Any) -> FakeTensor:
        made = from_tensor(self, tensor, **kwargs)
        if is_symbolic(tensor) and not isinstance(tensor, FakeTensor):
            place = state.place(tensor)
            if place.type == "cpu" and made.fake_device.type == "meta":
                made.fake_device = place
        for part in inner_tensors(made):  # a quantised tensor is made of several
            moved_to_cuda(part)
        return made

    def make_subclass(cls: Any, data: torch.Tensor, require_grad: bool = False, **kwargs: Any) -> torch.Tensor:
        named = kwargs.get("device_for_backend_keys")
        if named is not None and named.type == "cuda":
            kwargs["device_for_backend_keys"] = _META
        return _make_subclass(cls, data, require_grad, **kwargs)

    def dispatched(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE_OF and _hidden(args[0]):
            return _META
        return of_tensor(cls, func, types, args, kwargs or {})

    def dispatched_by_mode(self: FakeTensorMode, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE_OF and isinstance(args[0], FakeTensor) and _hidden(args[0]):
            return _META
        if kwargs and "device" in kwargs:
            kwargs = {**kwargs, "device": on_cuda(kwargs["device"])}
        return of_mode(self, func, types, args, kwargs)

    answers = {
        # Inductor leaves every operator on the meta device to torch's eager kernels.
        "is_meta": property(lambda tensor: not _on_cuda(tensor) and _is_meta(tensor)),
        "is_cuda": property(_on_cuda),
        "__torch_dispatch__": classmethod(dispatched),
    }
    of_all = {
        "from_tensor": made_of,
        "__torch_dispatch__": dispatched_by_mode,
        "avoid_device_init": property(lambda _self: True),  # constants are copied to no real GPU
    }
    with (
        replaced(FakeTensor, answers),
        replaced(FakeTensorMode, of_all),
        replaced(torch.Tensor, {"_make_subclass": staticmethod(make_subclass)}),
        _composites_decompose(),
    ):
        yield


def _on_cuda(tensor: FakeTensor) -> bool:
    return tensor.fake_device.type == "cuda" and not tensor.fake_mode.in_kernel_invocation


def _hidden(tensor: FakeTensor) -> bool:
    """True if C++ must not hear where a fake tensor lies."""
    return tensor.fake_device.type == "cuda" or tensor.fake_mode.in_kernel_invocation


@contextlib.contextmanager
def _composites_decompose() -> Iterator[None]:
    """Inside the block composite operators decompose under autograd, as they do for CUDA.

    torch registers Python kernels for the meta device for some of them (``nll_loss``). Its Python dispatcher takes an
    operator that has a kernel of its own for one that is not composite (``torch._ops.resolve_key``), and autograd then
    does not know it: its result requires no gradient.
    """
    taken: list[tuple[Any, Any]] = []
    key = torch._C.DispatchKey.Meta
    for operator in _with_meta_kernels():
        taken.append((operator, operator.py_kernels.pop(key)))
        operator._dispatch_cache.clear()
    try:
        yield
    finally:
        for operator, kernel in taken:
            operator.py_kernels[key] = kernel
            operator._dispatch_cache.clear()


def _with_meta_kernels() -> list[Any]:
    """Composite operators of torch that have a Python kernel for the meta device."""
    from torch._decomp import global_decomposition_table

    return [
        operator
        for operator in {each for table in global_decomposition_table.values() for each in table}
        if torch._C.DispatchKey.Meta in getattr(operator, "py_kernels", ())
        and torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "CompositeImplicitAutograd")
    ]
