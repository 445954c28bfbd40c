"""Work: how much each operator of a step computes and moves, for the cost model (``vram_guard.plan.cost``).

FLOPs are those of ``torch.utils.flop_counter`` (a multiplication and an addition are two), worked out here directly
for the operators that every model calls thousands of times, from torch's registry for the rest. They differ from it in
two places, where the kernels do: a convolution's backward divides by its groups, and causal attention computes half
of the scores (the fused kernels skip the blocks above the diagonal; flop_counter says of itself that it does not
account for that). cuDNN's recurrent layers have no formula in torch: every weight is used once a sample and time step,
twice that in the backward pass. All other operators count no FLOPs: a few operations an element never take longer than
moving the element, on any GPU.

Bytes are what the results and operands take, each once: an operator that overwrites its target reads it as well, except
where it only fills it; what picks rows reads as much as it returns. Caches are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry

from vram_guard.simulate.pretend import is_symbolic
from vram_guard.simulate.recorder import Recorder
from vram_guard.timeline import Affine, Unit, Work

_Args = tuple[Any, ...]
_Flops = Callable[[_Args, dict[str, Any], Any], int]


# --- floating-point operations ------------------------------------------------------------------------------------


def _mm(args: _Args, _kwargs: dict[str, Any], _out: Any) -> int:
    left, right = args[-2:]
    return 2 * left.numel() * int(right.shape[-1])


def _convolution(args: _Args, _kwargs: dict[str, Any], out: torch.Tensor) -> int:
    source, weight, transposed = args[0], args[1], args[6]
    places = source if transposed else out  # each of them meets the whole filter once
    return 2 * int(source.shape[0]) * math.prod(places.shape[2:]) * weight.numel()


def _convolution_backward(args: _Args, kwargs: dict[str, Any], _out: Any) -> int:
    """Each of the two gradients takes the multiplications of the forward pass."""
    grad, source, weight = args[:3]
    wanted = args[10]
    forward = _convolution((source, weight, None, None, None, None, args[7]), kwargs, grad)
    return forward * (int(wanted[0]) + int(wanted[1]))


def _attention(flops: int, index: int, args: _Args, kwargs: dict[str, Any]) -> int:
    causal = args[index] if len(args) > index else kwargs.get("is_causal", False)
    return flops // 2 if causal else flops


def _attention_forward(causal_at: int) -> _Flops:
    """Query times keys, and scores times values."""

    def flops(args: _Args, kwargs: dict[str, Any], _out: Any) -> int:
        query, key, value = args[:3]
        scores = 2 * int(query.numel() // query.shape[-1]) * int(key.shape[-2])
        return _attention(scores * (query.shape[-1] + value.shape[-1]), causal_at, args, kwargs)

    return flops


def _attention_backward(causal_at: int) -> _Flops:
    """Five products: the scores again, their gradient, and those of query, key and value."""

    def flops(args: _Args, kwargs: dict[str, Any], _out: Any) -> int:
        query, key, value = args[1:4]
        scores = 2 * int(query.numel() // query.shape[-1]) * int(key.shape[-2])
        return _attention(scores * (3 * query.shape[-1] + 2 * value.shape[-1]), causal_at, args, kwargs)

    return flops


def _recurrent(args: _Args, _kwargs: dict[str, Any], _out: Any) -> int:
    source, weights = args[:2]
    samples = source.numel() // max(1, int(source.shape[-1]))
    return 2 * samples * sum(weight.numel() for weight in weights if weight.dim() > 1)


def _recurrent_backward(args: _Args, kwargs: dict[str, Any], out: Any) -> int:
    return 2 * _recurrent(args, kwargs, out)


_MATMULS = frozenset({"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"})
_RECURRENT = frozenset({"aten::_cudnn_rnn", "aten::_cudnn_rnn_backward"})
_BY_CUDNN = _RECURRENT | {"aten::convolution", "aten::convolution_backward"}

FLOPS: dict[str, _Flops] = {
    **dict.fromkeys(_MATMULS, _mm),
    "aten::convolution": _convolution,
    "aten::convolution_backward": _convolution_backward,
    "aten::_scaled_dot_product_flash_attention": _attention_forward(4),
    "aten::_scaled_dot_product_flash_attention_backward": _attention_backward(11),
    "aten::_scaled_dot_product_efficient_attention": _attention_forward(6),
    "aten::_scaled_dot_product_efficient_attention_backward": _attention_backward(11),
    "aten::_scaled_dot_product_cudnn_attention": _attention_forward(6),
    "aten::_scaled_dot_product_cudnn_attention_backward": _attention_backward(14),
    "aten::_cudnn_rnn": _recurrent,
    "aten::_cudnn_rnn_backward": _recurrent_backward,
}


def _flops_of(func: Any) -> _Flops | None:
    own = FLOPS.get(func._schema.name)
    if own is not None:
        return own
    formula: Any = flop_registry.get(func._overloadpacket)
    if formula is None:
        return None
    return lambda args, kwargs, out: int(formula(*args, **kwargs, out_val=out))


def _unit(name: str, dtype: torch.dtype) -> Unit:
    """What computes an operator of this dtype: torch lets cuDNN use TF32, and matrix products only on request."""
    if dtype == torch.float16:
        return "fp16"
    if dtype == torch.bfloat16:
        return "bf16"
    if dtype == torch.float64:
        return "fp64"
    if "efficient_attention" in name:
        return "3xtf32"  # gemm_kernel_utils.h: OpMultiplyAddFastF32 from compute capability 8.0 on
    return "tf32" if _tf32(name) else "fp32"


def _tf32(name: str) -> bool:
    try:
        if name in _BY_CUDNN:
            return bool(torch.backends.cudnn.allow_tf32)
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # old and new switches were both set, and torch will not say which holds
        return name in _BY_CUDNN


# --- bytes --------------------------------------------------------------------------------------------------------

#: Results that no kernel writes.
_NO_KERNEL = frozenset(
    {
        *("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided"),
        *("aten::_unsafe_view", "aten::resize_", "aten::resize_as_", "aten::set_", "aten::detach_", "aten::lift"),
    }
)
#: These write their target without reading it.
_FILLS = frozenset(
    {
        *("aten::fill_", "aten::zero_", "aten::copy_", "aten::normal_", "aten::uniform_", "aten::bernoulli_"),
        *("aten::random_", "aten::exponential_", "aten::_foreach_zero_", "aten::_foreach_copy_"),
    }
)
#: These read only the rows they return.
_GATHERS = frozenset(
    {
        *("aten::embedding", "aten::gather", "aten::index_select", "aten::index", "aten::take"),
        *("aten::nll_loss_forward", "aten::nll_loss2d_forward"),
    }
)
#: These touch only the rows they are given.
_SCATTERS = frozenset(
    {
        *("aten::index_put_", "aten::index_put", "aten::_index_put_impl_", "aten::index_add_", "aten::index_copy_"),
        *("aten::scatter", "aten::scatter_", "aten::scatter_add", "aten::scatter_add_"),
    }
)
#: Their gradients (second list) are read, and written only where a scaler's factor is given.
_FUSED = frozenset({"aten::_fused_adam_", "aten::_fused_adamw_", "aten::_fused_sgd_", "aten::_fused_adagrad_"})
#: Between host and device these are copies over the link, and nothing else.
_COPIES = frozenset({"aten::_to_copy", "aten::copy_", "aten::_foreach_copy_", "aten::clone"})

#: ``MultiTensorApply.cuh``: tensors and blocks of one launch, by the number of lists, and elements of one block. The
#: limits for 4 KB of kernel arguments; drivers since CUDA 12.1 take seven times as many.
_TENSORS_A_LAUNCH = (110, 64, 48, 36, 30)
_BLOCKS_A_LAUNCH = 320
_CHUNK = 65536


def _size(tensor: torch.Tensor) -> int:
    """Bytes behind a tensor: an expanded dimension is there once."""
    size = tensor.numel() * tensor.element_size()
    if size and not tensor.is_contiguous():
        return min(size, tensor.untyped_storage().nbytes())
    return size


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def launches_of(lists: list[list[torch.Tensor]]) -> int:
    """Kernels that ``multi_tensor_apply`` starts for these lists of tensors, all alike in length and sizes."""
    if not lists:
        return 1
    tensors = lists[0]
    chunks = sum(-(-tensor.numel() // _CHUNK) for tensor in tensors)
    most = _TENSORS_A_LAUNCH[min(len(lists), len(_TENSORS_A_LAUNCH)) - 1]
    return max(1, -(-len(tensors) // most), -(-chunks // _BLOCKS_A_LAUNCH))


class _Kind(NamedTuple):
    """What is known of an operator before its arguments are."""

    name: str
    operator: str
    flops: _Flops | None
    written: tuple[int, ...]
    """Positions of the arguments that it overwrites."""
    fills: bool
    gathers: bool
    scatters: bool
    lists: bool


def _kind(func: Any) -> _Kind | None:
    """None: no kernel runs."""
    schema = func._schema
    name: str = schema.name
    written = tuple(i for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write)
    view = not written and bool(schema.returns) and all(r.alias_info is not None for r in schema.returns)
    if view or name in _NO_KERNEL:
        return None
    return _Kind(
        name=name,
        operator=str(func),
        flops=_flops_of(func),
        written=written,
        fills=name in _FILLS,
        gathers=name in _GATHERS,
        scatters=name in _SCATTERS,
        lists=name.startswith("aten::_foreach_") or name in _FUSED or name.startswith("aten::_amp_foreach"),
    )


_UNKNOWN: Any = object()


class Meter:
    """Weighs the operators of one step as they pass."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._kinds: dict[Any, _Kind | None] = {}
        self._weighed: list[tuple[str, str, str, bool, int, int, Unit, int, int, int]] = []

    def work(self) -> tuple[Work, ...]:
        """Everything weighed so far, with the exact numbers of this batch size."""
        return tuple(
            Work(
                operator,
                module,
                phase,  # type: ignore[arg-type]
                recomputed,
                Affine(flops, 0),
                Affine(moved, 0),
                unit,
                launches,
                Affine(transfer, 0),
                micro,
            )
            for operator, module, phase, recomputed, flops, moved, unit, launches, transfer, micro in self._weighed
        )

    def loaded(self, tensor: torch.Tensor) -> None:
        """A tensor of the batch came from the host."""
        if self._recorder.measured:
            self._add("aten.copy_.default", 0, 0, "vector", 1, _size(tensor) * self._recorder.batch_factor)

    def weigh(self, func: Any, args: _Args, kwargs: dict[str, Any], out: Any) -> None:
        """Note what one operator has computed and moved."""
        kind = self._kinds.get(func, _UNKNOWN)
        if kind is _UNKNOWN:
            kind = self._kinds[func] = _kind(func)
        if kind is None:
            return
        try:
            self._weigh(kind, args, kwargs, out)
        except (RuntimeError, NotImplementedError):  # a sparse tensor, or an argument that is no dense memory
            return

    def _weigh(self, kind: _Kind, args: _Args, kwargs: dict[str, Any], out: Any) -> None:
        operands = (*args, *kwargs.values()) if kwargs else args
        on_device, on_host, pretended = self._places((operands, out))
        if not on_device:
            if pretended:  # symbolic memory of the host: what real tensors do there is the user's own business
                self._add(kind.operator, 0, self._moved(kind, args, kwargs, operands, out), "host", 1, 0)
            return
        if on_host and kind.name in _COPIES:
            self._add(kind.operator, 0, 0, "vector", 1, _bytes((args[1 if kind.written else 0],)))
            return
        flops = 0
        unit: Unit = "vector"
        if kind.flops is not None:
            flops = kind.flops(args, kwargs, out)
            unit = _unit(kind.name, next(t.dtype for t in _tensors(args) if t.dtype.is_floating_point))
        self._add(
            kind.operator,
            flops,
            self._moved(kind, args, kwargs, operands, out),
            unit,
            self._launches(kind, args, out),
            0,
        )

    def _places(self, values: _Args) -> tuple[bool, bool, bool]:
        """Whether anything is on the device, anything but numbers on the host, anything symbolic on the host."""
        device, host, pretended = False, False, False
        hosts = self._recorder.has_host_tensors
        for tensor in _tensors(values):
            if is_symbolic(tensor):
                if hosts and self._recorder.on_host(tensor):
                    pretended = True
                else:
                    device = True
            elif tensor.dim():
                host = True
        return device, host or pretended, pretended

    def _moved(self, kind: _Kind, args: _Args, kwargs: dict[str, Any], operands: _Args, out: Any) -> int:
        if kind.gathers:
            return 2 * _bytes((out,)) + _bytes(args[1:])
        if kind.scatters:
            return 2 * _bytes(args[1:])
        total = _bytes(operands)
        if not kind.written:
            return total + _bytes((out,))
        written = [args[i] for i in kind.written if i < len(args)]
        if kind.name in _FUSED and kwargs.get("grad_scale") is None and len(written) > 1:
            del written[1]
        return total if kind.fills else total + _bytes(tuple(written))

    def _launches(self, kind: _Kind, args: _Args, out: Any) -> int:
        if kind.lists:
            given = (*args, out) if isinstance(out, (list, tuple)) else args
            return launches_of([v for v in given if isinstance(v, (list, tuple)) and v and _is_tensor(v[0])])
        if kind.name in _RECURRENT:
            # One step after the other; layers of one step wait for each other too.
            source, weights, per_layer = args[:3]
            batch_first = args[14 if kind.name.endswith("backward") else 10]
            return max(1, int(source.shape[1 if batch_first else 0]) * (len(weights) // max(1, per_layer)))
        return 1

    def _add(self, operator: str, flops: int, moved: int, unit: Unit, launches: int, transfer: int) -> None:
        recorder = self._recorder
        recomputed = recorder.in_backward and torch.is_grad_enabled()
        self._weighed.append(
            (
                operator,
                recorder.module_now(),
                recorder.phases[-1].name,
                recomputed,
                int(flops),
                int(moved),
                unit,
                launches,
                transfer,
                recorder.micro_batch,
            )
        )


def _bytes(values: _Args) -> int:
    return sum(_size(tensor) for tensor in _tensors(values))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
