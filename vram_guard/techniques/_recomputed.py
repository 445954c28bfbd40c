"""A check of every recomputation: the second forward of a checkpointed block saves what the first one saved.

The gradients of a checkpointed block are a function of the tensors that its second forward saves for the backward pass:
the graph, and what its nodes hold besides tensors, are those of the first. So where these tensors are equal, the
gradients are those of the block as written. Comparing results would not do: an adapter that starts at zero returns
zeros whatever it reads, and has gradients.

Of each saved tensor, values at :data:`PLACES` places are copied in the first forward and compared with those at the
same places in the second. To read whole tensors would take 2 to 10% of a step on a GPU, by the bytes. The places are
spread over the whole tensor, and what changes one value of an activation changes many of those computed from it.
All values of a block are compared at once, for equality; how far they are apart is looked at where they are not equal.

Nothing waits for the device: each recomputation has a flag there, which is read before an optimizer steps.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils import checkpoint

from vram_guard.errors import RecomputationError
from vram_guard.language import _
from vram_guard.limits import VALUES_OF_A_TENSOR
from vram_guard.state.forwards import INSTANCE_NORMALISATION, NORMALISATION
from vram_guard.techniques.comparing import comparing
from vram_guard.tensors import inner_tensors, is_dense

#: The longest sums that are reckoned with: over the inputs of a layer, or the positions of a sequence.
TERMS = 2**14

#: Whole numbers that are compared. Others are memory of a kernel's own, part of which it may leave unwritten.
_COUNTED = frozenset({torch.bool, torch.int16, torch.int32, torch.int64})

_GOLDEN = (math.sqrt(5) - 1) / 2
_numbers = itertools.count()
#: Torch's own answer, which a trace does not replace (see simulate/private_api.py).
_is_meta: Callable[[torch.Tensor], bool] = torch._C.TensorBase.is_meta.__get__  # type: ignore[attr-defined] # noqa: SLF001


class Recomputations:
    """What is known of the recomputations of one model's blocks since it was last looked at."""

    def __init__(self) -> None:
        self._open: BlockCall | None = None
        self._unread: list[_Flag] = []
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def __deepcopy__(self, _memo: object) -> Recomputations:
        """A copied model (an average of weights) reports to the same."""
        return self

    def watch(self) -> Callable[[], None]:
        """Look before every step of every optimizer, until the result is called."""
        handle = register_optimizer_step_pre_hook(self._before_step)
        _watched.append(self)

        def stop() -> None:
            handle.remove()
            _watched.remove(self)

        return stop

    def check(self, *, wait: bool = True) -> None:
        """Raise where a block has differed since the last look.

        Args:
            wait: for the device; else, where it has not got there yet, leave this to the next look.

        Raises:
            RecomputationError: a block has.
        """
        self.begin(None)
        if not self._unread or not (wait or all(flag.is_there() for flag in self._unread)):
            return
        # A trace computes no values; until here it keeps what a step keeps.
        unread, self._unread = [flag for flag in self._unread if not _is_meta(flag.value)], []
        unequal = [flag for flag, equal in zip(unread, self._values(unread), strict=True) if not equal]
        blocks = [flag.block for flag in unequal if flag.pair.is_apart()]
        if blocks:
            raise differing(blocks)

    def begin(self, call: BlockCall | None) -> None:
        """A recomputation of this call is being compared; the one before it is complete."""
        before, self._open = self._open, call
        if before is not None and before is not call:
            self._unread += before.flags()

    def _values(self, unread: list[_Flag]) -> list[bool]:
        """Values of flags. The host waits for those, and not for what a GPU was given to do after them."""
        on_gpu = any(flag.event is not None for flag in unread)
        host = torch.zeros(len(unread), dtype=torch.bool, device="cpu", pin_memory=on_gpu)
        used: dict[torch.cuda.Stream, None] = {}
        for to, flag in zip(host, unread, strict=True):
            if flag.event is None:
                to.copy_(flag.value)
                continue
            device = flag.value.device
            stream = self._streams.get(device) or torch.cuda.Stream(device)
            self._streams[device] = stream
            stream.wait_event(flag.event)
            with torch.cuda.stream(stream):
                to.copy_(flag.value, non_blocking=True)
            used[stream] = None
        for stream in used:
            stream.synchronize()
        values: list[bool] = host.tolist()
        return values

    def _before_step(
        self, _optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self.check()
        by_name = kwargs.get("closure")
        closure = args[1] if by_name is None and len(args) > 1 else by_name
        if not callable(closure):
            return None

        def checked() -> Any:  # forward and backward may run within the step, as Lightning's do
            loss = closure()
            self.check()
            return loss

        return ((args[0], checked, *args[2:]), kwargs) if by_name is None else (args, {**kwargs, "closure": checked})


_watched: list[Recomputations] = []


def check_recomputations() -> None:
    """Look at all blocks, for who steps without the hooks of an optimizer.

    Raises:
        RecomputationError: a block has differed.
    """
    for found in _watched:
        found.check()


class _Pair(NamedTuple):
    """Values of several saved tensors, of each as many: those of the first forward, and those of the second."""

    first: torch.Tensor
    again: torch.Tensor
    rounding: float
    """The rounding step of the lowest precision in the block: what is computed from such numbers has their rounding."""

    def is_apart(self) -> bool:
        """True where they differ by more than rounding."""
        with torch.no_grad():
            return bool(
                _differ(self.first.view(-1, VALUES_OF_A_TENSOR), self.again.view(-1, VALUES_OF_A_TENSOR), self.rounding)
            )


class _Flag(NamedTuple):
    """Where it will be known whether a block came to equal values."""

    block: str
    pair: _Pair
    value: torch.Tensor
    event: torch.cuda.Event | None
    """Recorded on the GPU when the value is there."""

    @classmethod
    def of(cls, block: str, pair: _Pair) -> _Flag:
        value = (pair.first == pair.again).all()
        if not value.is_cuda or _is_meta(value):
            return cls(block, pair, value, None)
        event = torch.cuda.Event()
        event.record()
        return cls(block, pair, value, event)

    def is_there(self) -> bool:
        return self.event is None or self.event.query()


def differing(blocks: Iterable[str]) -> RecomputationError:
    """The error for blocks that differ."""
    return RecomputationError(
        _(
            "{blocks}: the second forward, in the backward pass, did not compute what the first one had computed, so "
            "the gradients would be wrong. No optimizer has stepped with them. Something that these modules read has "
            "changed in between: an adapter or a flag was switched, a context was left, weights were written through "
            ".data. Leave them as written: leave 'checkpoint' and 'slices' out of what is allowed, or pin 'checkpoint' "
            "to other blocks",
            blocks=", ".join(dict.fromkeys(blocks)),
        )
    )


class BlockCall:
    """One call of a block: its first forward, and those that run again in backward passes.

    Args:
        block: its name.
        module: it.
        found: where differences go.
    """

    def __init__(self, block: str, module: nn.Module, found: Recomputations) -> None:
        self.block = block
        self._found = found
        self._is_first = True
        self.saved_count = 0
        self._places: dict[tuple[object, ...], torch.Tensor] = {}
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._buffers = {
            _storages(buffer): isinstance(owner, NORMALISATION)
            for owner in module.modules()
            for buffer in owner.buffers(recurse=False)
        }
        """Storage -> whether it holds running statistics: kernels save and write these, and no gradient reads them."""
        self._channels = {
            owner.num_features
            for owner in module.modules()
            if isinstance(owner, INSTANCE_NORMALISATION) and owner.track_running_stats
        }
        """Of instance normalisation, which hands copies of its statistics, one for each sample, to these kernels."""

    @contextmanager
    def first(self) -> Iterator[str]:
        """Around ``torch.utils.checkpoint``: its ``determinism_check``, which reports what both forwards save."""
        checks = checkpoint._allowed_determinism_checks_to_fns  # noqa: SLF001 - see simulate/private_api.py
        name = f"vram_guard {next(_numbers)}"
        checks[name] = self._saved
        try:
            yield name
        finally:
            del checks[name]
            self._is_first, self._places, self._buffers = False, {}, {}

    def ended(self) -> None:
        """A forward has come to its end, where torch ends a second one at the last tensor that the first has saved.

        Raises:
            RecomputationError: this was the second one.
        """
        if not self._is_first and checkpoint._enable_checkpoint_early_stop is not False:  # noqa: SLF001 - as above
            raise differing([self.block])

    @_disable_dynamo  # compiled code inside the block calls this, and what it calls would be compiled too
    def _saved(self, tensor: torch.Tensor) -> _First | _Again:
        """A tensor that the first forward saves; afterwards one that has been computed again."""
        stride = tensor.stride() if tensor.layout == torch.strided else ()
        kind = _ComparedKind(tuple(tensor.shape), stride, tensor.dtype, tensor.device)
        if not self._is_first:
            return _Again(kind, tensor)
        self.saved_count += 1
        base = _base_of(tensor)
        if tensor.dim() == 1 and any(tensor.numel() % channels == 0 for channels in self._channels):
            return _First(self, kind, None, [])
        if base is None and self._buffers:
            statistics = self._buffers.get(_storages(tensor))
            if statistics:
                return _First(self, kind, None, [])
            base = None if statistics is None else tensor.detach()
        if base is not None:
            return _First(self, kind, _Place(base, tensor.stride(), tensor.storage_offset()), [])
        return _First(self, kind, None, self._values(tensor))

    def compare(self, first: _First, again: torch.Tensor) -> None:
        """Collect what is to be compared of one tensor.

        Raises:
            RecomputationError: it wraps other kinds of tensors.
        """
        self._found.begin(self)
        values = first.values
        if first.place is not None:
            now = first.place.now(again)
            values = [] if now is None else self._values(now)
        if values:
            self.collect(values, self._values(again))
        if first.number == self.saved_count:  # the last, which a result that is not used does not have
            self._found.begin(None)

    def collect(self, values: list[torch.Tensor | None], found: list[torch.Tensor | None]) -> None:
        """Collect what is to be compared.

        Raises:
            RecomputationError: these are values of other kinds of tensors.
        """
        if [one is None for one in found] != [one is None for one in values]:
            raise differing([self.block])
        self._pairs += [(a, b) for a, b in zip(values, found, strict=True) if a is not None and b is not None]

    def _values(self, tensor: torch.Tensor) -> list[torch.Tensor | None]:
        """Values at some places of a tensor, or of those that it wraps; None where they are not compared."""
        with comparing:
            return [self._at_places(part) if _is_compared(part) else None for part in inner_tensors(tensor)]

    def _at_places(self, tensor: torch.Tensor) -> torch.Tensor:
        if type(tensor) is not torch.Tensor:
            tensor = tensor.detach().as_subclass(torch.Tensor)
        if is_dense(tensor):  # in the order of memory
            return tensor.as_strided(*_places(tensor.numel())).clone(memory_format=torch.contiguous_format).view(-1)
        # By all of this, as which tensors have the same size depends on the batch.
        at = tensor.shape, tensor.stride(), tensor.dtype, tensor.device
        places = self._places.get(at)
        if places is None:
            step = int(tensor.numel() * _GOLDEN) | 1
            places = torch.arange(0, VALUES_OF_A_TENSOR * step, step, device=tensor.device).remainder_(tensor.numel())
            self._places[at] = places
        if tensor.is_floating_point() and tensor.itemsize == 1:
            return tensor.view(torch.uint8).take(places).view(tensor.dtype)
        return tensor.take(places)

    def flags(self) -> list[_Flag]:
        """Of each kind and device, whether all that was collected is equal."""
        pairs, self._pairs, self._places = self._pairs, [], {}
        rows: dict[tuple[torch.dtype, torch.device], list[tuple[torch.Tensor, torch.Tensor]]] = {}
        with comparing:
            for first, again in pairs:
                rows.setdefault((again.dtype, again.device), []).append((first.to(again.device), again))
        rounding = max((_rounding(dtype) for dtype, _device in rows if dtype.itemsize > 1), default=0.0)
        with comparing, torch.no_grad():
            stacked = ([torch.cat(each) for each in zip(*of_kind, strict=True)] for of_kind in rows.values())
            return [_Flag.of(self.block, _Pair(first, again, rounding)) for first, again in stacked]


@lru_cache(maxsize=1024)
def _places(numel: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of a view of :data:`PLACES` places of a tensor: rows from its start, and up to its end.

    The step between the places of a row has no divisor in common with the size, so that they lie in all columns.
    """
    row = min(VALUES_OF_A_TENSOR // 2, 1 << (numel.bit_length() - 1))
    step = max(numel // row, 1)
    while math.gcd(step, numel) > 1:
        step -= 1
    return (VALUES_OF_A_TENSOR // 2 // row, 2, row), (0, numel - 1 - (row - 1) * step, step)


class _ComparedKind(NamedTuple):
    """What torch compares of the tensors that two forwards save."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class _First:
    """What is kept of a tensor that the first forward saves."""

    def __init__(
        self, call: BlockCall, kind: _ComparedKind, place: _Place | None, values: list[torch.Tensor | None]
    ) -> None:
        self.call = call
        self.number = call.saved_count
        self.kind = kind
        self.place = place
        self.values = values
        """Of it, or of the tensors that it wraps; [] where none are needed."""

    def __ne__(self, again: object) -> bool:
        """Torch asks this, of each tensor of a recomputation, when that is complete.

        Raises:
            RecomputationError: in place of torch's own error: another tensor was saved.
        """
        if not isinstance(again, (_First, _Again)) or self.kind != again.kind:
            raise differing([self.call.block])
        if isinstance(again, _Again):
            self.call.compare(self, again.tensor)
        else:  # a backward pass within the first forward, which has not saved this
            self.call.saved_count -= 1
            if self.place is None and again.place is None:
                self.call.collect(self.values, again.values)
        return False

    def __eq__(self, again: object) -> bool:
        return not self != again

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self.kind)


class _Again(NamedTuple):
    """A tensor that has been computed again."""

    kind: _ComparedKind
    tensor: torch.Tensor

    def __repr__(self) -> str:
        return repr(self.kind)


class _Place(NamedTuple):
    """A parameter or a buffer, or a part of one: as written, the backward pass reads there what it is by then."""

    base: torch.Tensor
    stride: tuple[int, ...]
    offset: int | torch.SymInt

    def now(self, again: torch.Tensor) -> torch.Tensor | None:
        """What is there now; None where the second forward has saved the same, or where it has been taken away."""
        base = self.base.detach()
        same = _storages(base) == _storages(again)
        if same and (self.stride, self.offset) == (again.stride(), again.storage_offset()):
            return None
        if base.shape == again.shape:
            return base
        return None if base.numel() < again.numel() else base.as_strided(again.shape, self.stride, self.offset)


def _base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The parameter, or other leaf of the graph, that a saved tensor is or is a view of; None for what was computed."""
    for one in (tensor, tensor._base):  # noqa: SLF001 - see simulate/private_api.py
        if one is not None and (isinstance(one, nn.Parameter) or (one.is_leaf and one.requires_grad)):
            return one if one is tensor or type(one) in (torch.Tensor, nn.Parameter) else None
    return None


def _storages(tensor: torch.Tensor) -> tuple[int, ...]:
    """Numbers of the memory that a tensor, or those that it wraps, lie in."""
    plain = (part for part in inner_tensors(tensor) if part.layout == torch.strided)
    return tuple(part.untyped_storage()._cdata for part in plain)  # noqa: SLF001


def _is_compared(tensor: torch.Tensor) -> bool:
    if tensor.layout != torch.strided or tensor.numel() == 0:
        return False
    if tensor.is_floating_point() or tensor.is_complex():
        return True
    # A single whole number is mostly the state of a generator, which kernels leave unwritten where they draw nothing.
    return tensor.dtype in _COUNTED and tensor.dim() > 0


def _differ(first: torch.Tensor, again: torch.Tensor, rounding: float) -> torch.Tensor:
    """True where a row of one is not that of the other, up to rounding; NaN is equal to NaN.

    Kernels need not add up in the same order each time, so a value may be off by

    - twice the rounding step ``eps`` of the lowest precision in the block, relative: numbers that were rounded k times
      on the way differ by ``sqrt(k) eps sqrt(1/6)`` where no two roundings agree, which is 1.6 ``eps`` for k = 16;
    - ``2 sqrt(n) eps`` of the precision in which kernels add up (float32, or float64 for its own kind), for sums of
      n = :data:`TERMS` terms: their roundings are independent, so that they grow as the square root.

    That is 3e-5 in float32, 0.002 in float16 and 0.016 in bfloat16. It holds for the mean of a row's absolute values,
    not for each: what is left where large terms cancel has their rounding.
    """
    dtype = first.dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        return (first != again).any()
    summed = torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32
    tolerance = 2 * max(_rounding(dtype), rounding) + 2 * math.sqrt(TERMS) * torch.finfo(summed).eps
    if not dtype.is_complex:
        first, again = first.to(summed), again.to(summed)
    apart = (first - again).abs()
    apart.masked_fill_((first == again).logical_or_(first.isnan().logical_and_(again.isnan())), 0)
    size = first.abs().nan_to_num_(0.0, 0.0, 0.0)
    return (apart.sum(1) <= size.sum(1).mul_(tolerance)).all().logical_not_()


def _rounding(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if dtype.is_floating_point or dtype.is_complex else 0.0
