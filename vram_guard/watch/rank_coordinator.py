"""All processes of a data-parallel training do the same after one of them ran out of memory.

DistributedDataParallel averages gradients while backward still runs. If backward breaks on one rank, the others wait in
a collective that this rank will never join. So, while recovery is armed, a batch's forward and backward run
without any communication; then the ranks tell each other how it went, and only when all are through are the
gradients averaged. Nobody ever waits for a rank that failed, and no time limit is involved.

Cost, per optimizer step: the averaging no longer overlaps with backward (one pass over the gradients at the
speed of the interconnect), and two exchanges of a few hundred bytes over gloo between the hosts. The GPU is not waited
for: an out-of-memory error is raised on the host when the allocation is asked for.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import nn

from vram_guard.watch import own_collectives
from vram_guard.watch.process_groups import wait_for_gloo

#: Gradients travel in buckets of so many bytes, as in DistributedDataParallel (bucket_cap_mb=25).
BUCKET = 25 * 2**20


class Verdict(IntEnum):
    """Outcome on one rank; the worst of all ranks counts."""

    FINE = 0
    OUT_OF_MEMORY = 1
    """It can be rolled back and tried again."""
    STOPPED = 2
    """The rank raises an error and takes part in nothing more."""


class Agreement(NamedTuple):
    """What all ranks know of each other at one point."""

    verdict: Verdict
    """The worst of all ranks."""
    own_calls: bool = False
    """True if the user's code called the other ranks itself, on any rank."""


class RankCoordinator:
    """Agreement of the processes of one training. Every rank calls every method alike.

    As it stands here, there is one process.
    """

    def agree(self, own: Verdict, *, own_calls: bool = False) -> Agreement:
        """Tell the other ranks how this one fares.

        Args:
            own: this rank's verdict.
            own_calls: whether the user's code has called the other ranks itself since the batch began, or is about to.
        """
        return Agreement(own, own_calls)

    def noticed(self, begins: Callable[[], None]) -> AbstractContextManager[None]:
        """Inside the block, ``begins`` is called before each call for which all ranks wait."""
        del begins
        return contextlib.nullcontext()

    def least(self, own: int) -> int:
        """The smallest number of all ranks."""
        return own

    def parts(self, needed: int, samples: int) -> tuple[int, int]:
        """The most parts that any rank needs for its batch, and the fewest samples that any rank's batch has."""
        return needed, samples

    def average_gradients(self) -> list[torch.nn.Parameter]:
        """Every rank's gradients become the mean over all ranks.

        Returns:
            The parameters that got none on some rank, where DistributedDataParallel would stop for that.
        """
        return []

    def share_buffers(self) -> None:
        """Every rank gets the buffers of rank 0."""

    def close(self) -> None:
        """Let go of what the ranks talk over; nothing more is settled."""


class SingleProcess(RankCoordinator):
    """A training of one process."""


def coordinator_of(module: nn.Module, wrapper: Any) -> RankCoordinator:
    """The coordinator of a module that may run inside DistributedDataParallel; on every rank at the same point."""
    if wrapper is module:
        return SingleProcess()
    return DataParallel(
        module,
        broadcast_buffers=bool(wrapper.broadcast_buffers),
        unused_allowed=bool(wrapper.find_unused_parameters or wrapper.static_graph),
    )


def hosts() -> RankCoordinator:
    """The processes of torch.distributed's default group, which only agree on things; on every rank at one point."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized() and dist.is_gloo_available()) or dist.get_world_size() == 1:
        return SingleProcess()
    return Hosts()


class Hosts(RankCoordinator):
    """Processes in torch.distributed's default group, whose hosts talk over a gloo group of their own.

    Made on every rank at the same point.

    The group ends with :meth:`close`, or else with this object, or before the interpreter goes: worker threads of a
    living group that free Python's objects while it goes may end a finished rank with SIGABRT (pytorch/pytorch issue
    190489).
    """

    def __init__(self) -> None:
        import torch.distributed as dist

        self._dist = dist
        self._groups = [dist.new_group(backend="gloo")]
        """The one over which the hosts talk, until it is closed."""
        self._own = 0
        self._end = weakref.finalize(self, _destroy, self._groups)  # at exit at the latest

    def agree(self, own: Verdict, *, own_calls: bool = False) -> Agreement:
        """See :class:`RankCoordinator`."""
        worst, called = self._exchange([own, own_calls], self._dist.ReduceOp.MAX).tolist()
        return Agreement(Verdict(worst), bool(called))

    def noticed(self, begins: Callable[[], None]) -> AbstractContextManager[None]:
        """See :class:`RankCoordinator`."""
        return own_collectives.noticed(lambda: None if self._own else begins())

    def least(self, own: int) -> int:
        """See :class:`RankCoordinator`."""
        return int(self._exchange([own], self._dist.ReduceOp.MIN)[0])

    def parts(self, needed: int, samples: int) -> tuple[int, int]:
        """See :class:`RankCoordinator`."""
        most, fewest = self._exchange([needed, -samples], self._dist.ReduceOp.MAX).tolist()
        return most, -fewest

    def close(self) -> None:
        """See :class:`RankCoordinator`. A second call does nothing."""
        self._end()

    def _exchange(self, numbers: Sequence[int], operation: object) -> torch.Tensor:
        message = torch.tensor([int(number) for number in numbers], dtype=torch.int64)
        with self._talking():
            self._dist.all_reduce(message, op=operation, group=self._groups[0])
        return message

    @contextlib.contextmanager
    def _talking(self) -> Iterator[None]:
        """Inside the block the ranks call each other for this object, and not for the user's code."""
        self._own += 1
        try:
            yield
        finally:
            self._own -= 1


class DataParallel(Hosts):
    """A training whose processes hold copies of one module, and average its gradients here.

    What takes memory is allocated here, not when memory is short.

    Args:
        model: the module whose parameters and buffers are kept alike.
        broadcast_buffers: whether rank 0's buffers are everybody's before each batch, as
            DistributedDataParallel's argument of that name.
        unused_allowed: whether DistributedDataParallel would train on where a parameter gets no gradient.
    """

    def __init__(self, model: nn.Module, *, broadcast_buffers: bool = True, unused_allowed: bool = True) -> None:
        super().__init__()
        self._unused_allowed = unused_allowed
        self._ranks = self._dist.get_world_size()
        self._parameters = list(model.parameters())
        self._buffers = list(model.buffers()) if broadcast_buffers else []
        self._stale = broadcast_buffers
        self._flat = {
            kind: torch.empty(min(total, BUCKET) // kind[0].itemsize, dtype=kind[0], device=kind[1])
            for kind, total in _totals([*self._parameters, *self._buffers]).items()
        }

    @torch.no_grad()
    def average_gradients(self) -> list[nn.Parameter]:
        """See :class:`RankCoordinator`. A gradient that no rank has stays None, as with ``find_unused_parameters``."""
        own = [parameter.grad is not None for parameter in self._parameters]
        told = self._exchange([*own, *(not has for has in own)], self._dist.ReduceOp.MAX).tolist()
        anywhere, missing = told[: len(own)], told[len(own) :]
        used = [parameter for parameter, has in zip(self._parameters, anywhere, strict=True) if has]
        gradients = []
        for parameter in used:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        for bucket in _buckets(gradients):
            with _as_one(bucket, self._flat) as flat:
                # Divided before they are added, as DistributedDataParallel does it.
                flat.mul_(1.0 / self._ranks)
                with self._talking():
                    self._dist.all_reduce(flat)
        self._stale = bool(self._buffers)
        if self._unused_allowed:
            return []
        return [p for p, lacks in zip(self._parameters, missing, strict=True) if lacks and p.requires_grad]

    @torch.no_grad()
    def share_buffers(self) -> None:
        """See :class:`RankCoordinator`. Does nothing where no optimizer step has gone by since the last time."""
        if not self._stale:
            return
        self._stale = False
        for bucket in _buckets(self._buffers):
            with _as_one(bucket, self._flat) as flat:
                # gloo knows no bool, and a byte is what one takes
                self._dist.broadcast(flat.view(torch.uint8) if flat.dtype == torch.bool else flat, src=0)


def _destroy(groups: list[Any]) -> None:
    """End process groups, unless the script has ended all of them before; their threads end with the last reference."""
    import torch.distributed as dist

    while groups:
        with contextlib.suppress(ValueError):  # no longer known
            dist.destroy_process_group(groups.pop())
    wait_for_gloo()


class _as_one:  # noqa: N801 - reads as a verb where it is used
    """Inside the block several tensors are one flat tensor; afterwards they hold what it then holds."""

    def __init__(self, bucket: list[torch.Tensor], flat: dict[tuple[torch.dtype, torch.device], torch.Tensor]) -> None:
        self._bucket = bucket
        self._single = len(bucket) == 1 and bucket[0].is_contiguous()
        first = bucket[0]
        room = flat.get((first.dtype, first.device), first)
        total = sum(tensor.numel() for tensor in bucket)
        if self._single:
            self._flat = first.view(-1)
        elif room.numel() >= total:
            self._flat = room[:total]
        else:
            self._flat = torch.empty(total, dtype=first.dtype, device=first.device)

    def __enter__(self) -> torch.Tensor:
        if not self._single:
            torch.cat([tensor.reshape(-1) for tensor in self._bucket], out=self._flat)
        return self._flat

    def __exit__(self, kind: object, *_: object) -> None:
        if self._single or kind is not None:
            return
        pieces = self._flat.split([tensor.numel() for tensor in self._bucket])
        for tensor, piece in zip(self._bucket, pieces, strict=True):
            tensor.copy_(piece.view(tensor.shape))


def _totals(tensors: Iterable[torch.Tensor]) -> dict[tuple[torch.dtype, torch.device], int]:
    """Bytes by dtype and device."""
    totals: dict[tuple[torch.dtype, torch.device], int] = {}
    for tensor in tensors:
        kind = (tensor.dtype, tensor.device)
        totals[kind] = totals.get(kind, 0) + tensor.nbytes
    return totals


def _buckets(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Tensors of one dtype and device in groups of at most ``BUCKET`` bytes; a larger one stands alone."""
    open_ones: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    done: list[list[torch.Tensor]] = []
    for tensor in tensors:
        kind = (tensor.dtype, tensor.device)
        bucket = open_ones.setdefault(kind, [])
        if bucket and sum(member.nbytes for member in bucket) + tensor.nbytes > BUCKET:
            done.append(bucket)
            bucket = open_ones[kind] = []
        bucket.append(tensor)
    return [*done, *open_ones.values()]
