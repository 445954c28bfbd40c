"""Operators without a kernel for symbolic tensors: run on real zeros, to learn their results' shapes."""

from __future__ import annotations

from typing import Any

import torch

from vram_guard.errors import UnsupportedOperatorError
from vram_guard.language import Message, _
from vram_guard.limits import LARGEST_STAND_IN
from vram_guard.simulate.device import constants
from vram_guard.simulate.device.ranges import bounds_of
from vram_guard.simulate.device.symbolic import is_symbolic
from vram_guard.simulate.memory.recorder import Place, Recorder
from vram_guard.tensors import map_tensors_in, tensors_in

#: Namespaces of the operators that torch itself registers, in the releases supported.
_TORCHS_OWN = frozenset(
    {
        *(
            "aten",
            "prim",
            "prims",
            "_native",
            "_test",
            "higher_order",
            "static_runtime",
            "profiler",
            "export",
            "streams",
        ),
        *("quantized", "_quantized", "quantization", "quantized_decomposed", "sparse"),
        *("mkl", "mkldnn", "mkldnn_prepacked", "onednn", "xnnpack", "prepacked", "onnx", "onnx_symbolic"),
        *("c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "symm_mem", "_dtensor", "fsdp"),
        *("inductor", "inductor_prims", "_inductor_test", "rngprims", "debugprims", "debug_mode_ops", "flex_lib"),
    }
)


def stand_in_result(
    recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], place: Place, error: Exception
) -> Any:
    """Run an operator that has no kernel for symbolic tensors on real zeros, to learn its results' shapes.

    Args:
        recorder: knows from then on that the results lie in ``place``, and what is not known of them.
        func: the operator.
        args: its arguments.
        kwargs: its keyword arguments.
        place: where it runs.
        error: the failure of the symbolic run.

    Raises:
        UnsupportedOperatorError: the stand-ins would be too large, or the CPU cannot run the operator either; the
            message names the operator and the line.
    """
    name = str(func)
    size = 0

    def real(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal size
        if not is_symbolic(tensor):
            return tensor
        known = constants.compute(tensor)
        if known is not None:
            return known
        size += tensor.numel() * tensor.element_size()
        if size > LARGEST_STAND_IN:
            raise UnsupportedOperatorError(no_kernel(recorder, name, _("and its inputs are too large to try")))
        if tensor.layout != torch.strided:
            return _empty_sparse(tensor)
        bounds = bounds_of(tensor)
        # The largest one: what counts how often each is there is as long.
        value = 0 if bounds is None or tensor.dtype == torch.bool else bounds.end - 1
        return torch.full(tensor.shape, value, dtype=tensor.dtype)

    try:
        results = func(*map_tensors_in(real, args), **{key: map_tensors_in(real, kwargs[key]) for key in kwargs})
    except (NotImplementedError, RuntimeError) as second:
        why = _("and fails on the CPU: {error}", error=str(second).partition(". ")[0])  # torch lists its backends
        raise UnsupportedOperatorError(no_kernel(recorder, name, why)) from error
    recorder.note(
        Message(
            "{operator} has no symbolic kernel; the shapes of its results come from a run on zeros, what it takes in "
            "between is not known",
            operator=name,
        ),
        operator=name,
        tier="partly symbolic",
    )
    if func._schema.is_mutable:
        return args[0]
    made = map_tensors_in(lambda tensor: torch.empty_like(tensor, device="meta"), results)
    for tensor in tensors_in((made,)):
        recorder.put(tensor, place, operator=name)
    return made


def _empty_sparse(tensor: torch.Tensor) -> torch.Tensor:
    """A sparse tensor of this shape without elements: how many there are is not known."""
    if tensor.layout != torch.sparse_coo:
        return torch.zeros(tensor.shape, dtype=tensor.dtype).to_sparse(layout=tensor.layout)
    sparse, dense = tensor.sparse_dim(), tensor.shape[tensor.sparse_dim() :]
    indices, values = torch.zeros((sparse, 0), dtype=torch.int64), torch.zeros((0, *dense), dtype=tensor.dtype)
    return torch.sparse_coo_tensor(indices, values, tensor.shape, is_coalesced=True)


def is_torchs_own(name: str) -> bool:
    """True for an operator of torch itself, whose users cannot register kernels for it.

    Args:
        name: as torch prints it: "aten.add.Tensor"; one of higher order has no namespace there.

    Example:
        >>> is_torchs_own("aten.sparse_mask.default"), is_torchs_own("torchvision.nms.default")
        (True, False)
    """
    namespace, dot, _rest = name.partition(".")
    return not dot or namespace in _TORCHS_OWN


def no_kernel(recorder: Recorder, name: str, why: str) -> str:
    """The message about an operator that cannot be followed; its kernels are for its library to register."""
    if is_torchs_own(name):
        return _(
            "PyTorch's operator {name} (at {line}) has no symbolic implementation {why}; predict the step without it, "
            "or measure it on a GPU",
            name=name,
            line=recorder.source() or _("an unknown line"),
            why=why,
        )
    return _(
        "the operator {name} (at {line}) cannot be run symbolically {why}; register a fake kernel for it with "
        "torch.library.register_fake",
        name=name,
        line=recorder.source() or _("an unknown line"),
        why=why,
    )
