"""Floating-point operations and bytes moved of each operator of a step, for :mod:`vram_guard.plan.step_time`.

Bytes are what the results and operands take, each once: an operator that overwrites its target reads it as well, except
where it only fills it; what picks rows reads as much as it returns. Caches are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from vram_guard.budget.margins import Network
from vram_guard.simulate.cost._flops import MATMULS, RECURRENT, Args, Formula, formula_of, unit_of
from vram_guard.simulate.device.symbolic import is_symbolic
from vram_guard.simulate.memory.recorder import Recorder
from vram_guard.techniques.selective import draws
from vram_guard.tensors import tensors_in
from vram_guard.timeline import Affine, Unit, Work

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
    size: int = tensor.nbytes
    if size and not tensor.is_contiguous():
        return min(size, tensor.untyped_storage().nbytes())
    return size


def launches_of(lists: list[list[torch.Tensor]]) -> int:
    """Kernels that ``multi_tensor_apply`` starts for these lists of tensors, all alike in length and sizes."""
    if not lists:
        return 1
    tensors = lists[0]
    chunks = sum(-(-tensor.numel() // _CHUNK) for tensor in tensors)
    most = _TENSORS_A_LAUNCH[min(len(lists), len(_TENSORS_A_LAUNCH)) - 1]
    return max(1, -(-len(tensors) // most), -(-chunks // _BLOCKS_A_LAUNCH))


class _OperatorKind(NamedTuple):
    """The properties of an operator that do not depend on its arguments."""

    name: str
    operator: str
    flops: Formula | None
    written: tuple[int, ...]
    """Positions of the arguments that it overwrites."""
    lists: bool
    random: Any
    """The operator itself where it may take random numbers, else None."""


def _kind(func: Any) -> _OperatorKind | None:
    """None: no kernel runs."""
    schema = func._schema
    name: str = schema.name
    written = tuple(i for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write)
    view = not written and bool(schema.returns) and all(r.alias_info is not None for r in schema.returns)
    if view or name in _NO_KERNEL:
        return None
    return _OperatorKind(
        name=name,
        operator=str(func),
        flops=formula_of(func),
        written=written,
        lists=name.startswith(("aten::_foreach_", "aten::_amp_foreach")) or name in _FUSED,
        random=func if torch.Tag.nondeterministic_seeded in func.tags else None,
    )


#: The share of a step's FLOPs from which on a network counts as one of convolutions. A definition, not a fit: the patch
#: embedding of a vision transformer does about 1% of them, the front end of an audio transformer 5%, a U-Net's
#: convolutions a third and more, and those of a convolutional network nearly all.
CONVOLUTIONAL = 0.1

_CONVOLUTIONS = ("aten.convolution.", "aten.convolution_backward.")
_HALF = ("fp16", "bf16")


def network_of(work: Iterable[Work]) -> Network | None:
    """The kind of network, by what its matrix products and convolutions compute; None where there are none."""
    computing = [one for one in work if one.flops.base]
    whole = sum(one.flops.base for one in computing)
    if not whole:
        return None
    half = sum(one.flops.base for one in computing if one.unit in _HALF) > whole / 2
    convolved = sum(one.flops.base for one in computing if one.operator.startswith(_CONVOLUTIONS))
    if convolved >= CONVOLUTIONAL * whole:
        return "convolutions in half precision" if half else "convolutions in float32"
    return "no convolutions, half precision" if half else "no convolutions, float32"


class CostMeter:
    """Counts what the operators of one step compute and move, as they pass."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._kinds: dict[int, tuple[_OperatorKind | None, Any]] = {}
        """By the identity of an operator, which is kept for that: its own hash is Python code."""
        self._work: dict[int, list[Work]] = {}
        """Of each step that is counted."""

    def work(self) -> tuple[Work, ...]:
        """Everything counted so far of the step that is measured, with the exact numbers of this batch size."""
        return tuple(self._work.get(self._recorder.measured_step, ()))

    def forget(self) -> None:
        """Let go of what a timeline has taken over."""
        self._work.clear()

    @property
    def counted(self) -> int:
        """Number of entries of the latest step that is counted."""
        return len(next(reversed(self._work.values()), ()))

    def loaded(self, tensor: torch.Tensor) -> None:
        """A tensor of the batch came from the host."""
        if self._recorder.measured:
            self._add("aten.copy_.default", 0, 0, "vector", 1, _size(tensor) * self._recorder.batch_factor)

    def count(self, func: Any, args: Args, kwargs: dict[str, Any], out: Any) -> None:
        """Count one operator that has run."""
        known = self._kinds.get(id(func))
        if known is None:
            known = self._kinds[id(func)] = _kind(func), func
        kind = known[0]
        if kind is None:
            return
        try:
            self._count(kind, args, kwargs, out)
        except (RuntimeError, NotImplementedError):  # a sparse tensor, or an argument that is not dense memory
            return

    def _count(self, kind: _OperatorKind, args: Args, kwargs: dict[str, Any], out: Any) -> None:
        on_host = self._recorder.on_host if self._recorder.has_host_tensors else None
        given = _look((*args, *kwargs.values()) if kwargs else args, on_host)
        made = _look((out,), on_host)
        if not (given.on_device or made.on_device):
            if given.simulated or made.simulated:  # what real tensors do on the host is the user's own business
                self._add(kind.operator, 0, self._moved(kind, args, kwargs, given.size, made.size), "host", 1, 0)
            return
        if kind.name in _COPIES and (given.on_host or made.on_host):
            self._add(kind.operator, 0, 0, "vector", 1, _bytes((args[1 if kind.written else 0],)))
            return
        flops = 0
        unit: Unit = "vector"
        if kind.flops is not None:
            # A product's first tensor may be a bias, of the result's dtype (``out_dtype``).
            operand = next(iter(tensors_in(args)[-1:] if kind.name in MATMULS else tensors_in(args)), None)
            dtype = torch.float32 if operand is None else operand.dtype
            unit = unit_of(kind.name, dtype)
            flops = int(kind.flops(args, kwargs, out))
            if dtype.is_complex:
                flops *= 4
        moved = self._moved(kind, args, kwargs, given.size, made.size)
        random = kind.random is not None and draws(kind.random, args, kwargs)
        self._add(kind.operator, flops, moved, unit, self._launches(kind, args, out), 0, random=random)

    def _moved(self, kind: _OperatorKind, args: Args, kwargs: dict[str, Any], given: int, made: int) -> int:
        if kind.name in _GATHERS:
            return 2 * made + _bytes(args[1:])
        if kind.name in _SCATTERS:
            return 2 * _bytes(args[1:])
        if not kind.written:
            return given + made
        if kind.name in _FILLS:
            return given
        written = [args[i] for i in kind.written if i < len(args)]
        if kind.name in _FUSED and kwargs.get("grad_scale") is None and len(written) > 1:
            del written[1]
        return given + _bytes(tuple(written))

    def _launches(self, kind: _OperatorKind, args: Args, out: Any) -> int:
        if kind.lists:
            given = (*args, out) if isinstance(out, (list, tuple)) else args
            return launches_of([list(v) for v in given if isinstance(v, (list, tuple)) and v and _is_tensor(v[0])])
        if kind.name in RECURRENT:
            # One step after the other; layers of one step wait for each other too.
            source, weights, per_layer = args[:3]
            batch_first = args[14 if kind.name.endswith("backward") else 10]
            steps = int(source.shape[1 if batch_first else 0])
            return max(1, steps * (len(weights) // int(per_layer)))
        return 1

    def _add(
        self, operator: str, flops: int, moved: int, unit: Unit, launches: int, transfer: int, *, random: bool = False
    ) -> None:
        recorder = self._recorder
        # Only a recomputation runs with gradients on, inside one of the backward pass's nodes.
        again = recorder.in_backward and torch.is_grad_enabled() and torch._C._current_autograd_node() is not None
        self._work.setdefault(recorder.measured, []).append(
            Work(
                operator,
                recorder.module_now(),
                recorder.phases[-1].name,
                again,
                Affine(flops, 0),
                Affine(moved, 0),
                unit,
                launches,
                Affine(transfer, 0),
                recorder.micro_batch,
                random,
                recorder.streams.current,
            )
        )


class _Operands(NamedTuple):
    """The places and the size of an operator's tensors."""

    size: int
    on_device: bool
    on_host: bool
    """Anything but numbers in host memory."""
    simulated: bool
    """Anything symbolic in host memory."""


def _look(values: Iterable[Any], placed_on_host: Callable[[torch.Tensor], bool] | None) -> _Operands:
    size, on_device, on_host, simulated = 0, False, False, False
    for tensor in tensors_in(values):
        size += _size(tensor)
        if not is_symbolic(tensor):
            on_host = on_host or tensor.dim() > 0
        elif placed_on_host is not None and placed_on_host(tensor):
            on_host = simulated = True
        else:
            on_device = True
    return _Operands(size, on_device, on_host, simulated)


def _bytes(values: Args) -> int:
    return sum(_size(tensor) for tensor in tensors_in(values))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
