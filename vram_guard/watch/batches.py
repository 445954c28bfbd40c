"""Loaded batches, trained on whole or in micro-batches, and in smaller ones after running out of memory.

The loop over micro-batches, their weights, and what becomes of their outputs stand here once. An adapter hands in what
its framework does with one of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from vram_guard.apply.loss_weight import LossWeight, loss_weights, split_or_warn
from vram_guard.apply.microbatch import CannotSplitError, MicroBatch, Splitter, batch_size
from vram_guard.apply.normalisers import EveryLabel, Normaliser
from vram_guard.apply.outputs import detached, merged
from vram_guard.errors import LossChangedError
from vram_guard.techniques.loss_graphs import LossGraphs
from vram_guard.watch import own_collectives
from vram_guard.watch.rank_coordinator import RankCoordinator, hosts
from vram_guard.watch.recovery import Attempt, MicroBatchSchedule, Recovery

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


@dataclass(frozen=True)
class Share:
    """One micro-batch of a batch; or the batch itself, where it stays whole."""

    data: Any
    samples: int
    weight: Any
    """Factor of its loss."""
    first: bool
    last: bool
    graphs: LossGraphs | None = None
    """Of the losses so far; None: the user has said what the loss is over the samples."""

    def weighted(self, loss: torch.Tensor) -> torch.Tensor:
        """Its loss as a part of the batch's, before the backward pass.

        Raises:
            LossChangedError: the loss is made in another way than those that micro-batches are proven for.
        """
        if self.graphs is not None:
            (self.graphs.see if self.first and self.last else self.graphs.check)(loss)
        weighted: torch.Tensor = loss * self.weight
        return weighted


@dataclass(frozen=True)
class BatchPass:
    """One pass over a batch."""

    parts: list[MicroBatch]
    loss_weight: LossWeight
    attempt: Attempt | None
    """The attempt of the pass, where recovery is armed."""
    uneven: bool = False
    """True where ranks may run different numbers of micro-batches: none must call the others meanwhile."""
    graphs: LossGraphs | None = None
    """See :attr:`Share.graphs`."""

    @property
    def whole(self) -> bool:
        """True where the batch is in one part."""
        return len(self.parts) == 1

    @property
    def as_written(self) -> bool:
        """True where the user's own step may take the batch: whole, and on every rank."""
        return self.whole and not self.uneven

    def backward(self, run: Callable[[], None]) -> None:
        """Run the backward pass of one micro-batch, or of the whole batch."""
        if self.attempt is None:
            run()
        else:
            self.attempt.backward(run)

    def run(self, one: Callable[[Share], Any], *, rows: bool = True) -> Any:
        """Call ``one`` for each micro-batch and merge what it returns; see :func:`vram_guard.apply.outputs.merged`."""
        with own_collectives.refused() if self.uneven else contextlib.nullcontext():
            return self._run(one, rows=rows)

    def _run(self, one: Callable[[Share], Any], *, rows: bool) -> Any:
        if self.whole:
            return one(Share(self.parts[0].data, self.parts[0].samples, 1.0, True, True, self.graphs))
        parts, weights = self._counting()
        outputs: list[Any] = []
        for at, (part, weight) in enumerate(zip(parts, weights, strict=True)):
            share = Share(part.data, part.samples, weight, at == 0, at == len(parts) - 1, self.graphs)
            if self.attempt is not None:
                self.attempt.last = share.last
            outputs.append(detached(one(share)))
        return merged(outputs, parts, weights, rows=rows)

    def _counting(self) -> tuple[list[MicroBatch], list[Any]]:
        """The micro-batches with their weights; those without a label that counts are left out: their loss is 0 / 0."""
        weights = loss_weights(self.parts, self.loss_weight)
        if not isinstance(self.loss_weight, Normaliser):
            return self.parts, weights
        # Numbers of Python: a count in double precision would make losses of single precision double.
        pairs = [(part, float(weight)) for part, weight in zip(self.parts, weights, strict=True) if float(weight) != 0]
        return [part for part, _weight in pairs], [weight for _part, weight in pairs]


def cut_batches(
    put: Callable[[MicroBatches], Callable[[], None]],
    splitter: Splitter,
    loss_weight: LossWeight,
    graphs: LossGraphs | None,
    *,
    in_step: bool,
    why_whole: Callable[[], str],
) -> Callable[[], None]:
    """Have the batches of a training cut, on all of its ranks; returns the function that undoes it.

    Args:
        put: has a framework train on its batches through these; returns the function that undoes it.
        splitter: how they are cut.
        loss_weight: what the loss is over the samples of a batch.
        graphs: see :class:`MicroBatches`.
        in_step: every forward waits for the other ranks.
        why_whole: asked before a batch is cut.
    """
    ranks = hosts()
    undo = put(MicroBatches(splitter, loss_weight, graphs=graphs, ranks=ranks, in_step=in_step, why_whole=why_whole))

    def undone() -> None:
        undo()
        if ranks is not None:
            ranks.close()

    return undone


class MicroBatches:
    """The batches of one loader.

    Args:
        splitter: how they are cut; None: learned from the first batch that has to be.
        loss_weight: what the loss is over the samples of a batch.
        graphs: of the losses so far, with which each one is compared; None: the user has said what the loss is.
        recovery: recovers a batch from running out of memory; None: errors are left alone.
        schedule: the sizes of micro-batches to take; None: the splitter's.
        why_whole: asked before a batch is cut: the reason for which it must not be, "" for none.
        ranks: the processes that train on batches of their own at the same time; None: this one alone.
        in_step: every forward waits for the other ranks (synchronised batch normalisation, weights in shards): all
            must run as many.
    """

    def __init__(
        self,
        splitter: Splitter | None,
        loss_weight: LossWeight = "mean",
        *,
        graphs: LossGraphs | None = None,
        recovery: Recovery | None = None,
        schedule: MicroBatchSchedule | None = None,
        why_whole: Callable[[], str] = str,
        ranks: RankCoordinator | None = None,
        in_step: bool = False,
    ) -> None:
        self.recovery = recovery
        self._ranks = ranks
        self._in_step = in_step
        self.schedule = schedule or MicroBatchSchedule(None if splitter is None else splitter.micro_batch_size)
        self._never_cut = ""
        """The reason for which batches must stay whole; "" for none."""
        self._splitter = splitter
        self._loss_weight = loss_weight
        self._graphs = graphs
        self._why_whole = why_whole

    def run(self, batch: Any, work: Callable[[BatchPass], T], what: str) -> T:
        """Call ``work`` until a pass over the batch gets through; see :meth:`Recovery.run`."""
        if self.recovery is None:
            return self._pass(batch, work, self.schedule.size, None)

        def attempted(attempt: Attempt) -> T:
            try:
                return self._pass(batch, work, attempt.micro_batch_size, attempt)
            except LossChangedError as changed:
                self._never_cut = changed.reason
                raise

        return self.recovery.run(attempted, self.schedule, lambda: self._count(batch), what)

    def see(self, loss: torch.Tensor) -> None:
        """The loss of a batch that is trained on as written, before its backward pass."""
        if self._graphs is not None:
            self._graphs.see(loss)

    def _pass(self, batch: Any, work: Callable[[BatchPass], T], size: int | None, attempt: Attempt | None) -> T:
        if size is None or self._splitter is None:
            return work(BatchPass([MicroBatch(batch, 1, 1)], self._loss_weight, attempt, graphs=self._graphs))
        self._splitter.micro_batch_size = size
        number, even = (None, True) if self._ranks is None else self._agreed(self._ranks, self._splitter, batch)
        why = self._why_whole()
        if not why and isinstance(self._loss_weight, EveryLabel):
            why = self._loss_weight.why_whole(batch)
        parts = split_or_warn(self._splitter, batch, why, number)
        if self._graphs is not None:
            self._graphs.next_batch()
        return work(BatchPass(parts, self._loss_weight, attempt, not even, self._graphs))

    def _agreed(self, ranks: RankCoordinator, splitter: Splitter, batch: Any) -> tuple[int, bool]:
        """The number of micro-batches of this rank's batch: as many as the rank needs that needs the most.

        Batches differ in size where ranks have samplers of their own, and at the end of an epoch. A batch too
        short for so many is cut into pairs of samples at least (batch normalisation needs two), if the plan's
        micro-batches have two. Where every forward waits for the others, the shortest batch decides for all.

        Returns:
            The number, and whether every rank is known to run as many.
        """
        try:
            samples = splitter.count(batch)
        except CannotSplitError:
            samples = 1  # it stays whole, and says so
        needed = -(-samples // splitter.micro_batch_size)
        most, fewest = ranks.parts(needed, samples)
        if self._in_step:
            return min(most, fewest), True

        def number(samples: int) -> int:
            needed = -(-samples // splitter.micro_batch_size)
            return min(most, max(needed, samples // min(splitter.micro_batch_size, 2)))

        # Micro-batches in which nothing counts towards the loss are left out.
        left_out = isinstance(self._loss_weight, Normaliser) and most > 1
        return number(samples), number(fewest) == most and not left_out

    def _count(self, batch: Any) -> int:
        """The samples of a batch that is about to be cut, perhaps for the first time."""
        if why := self._never_cut or self._why_whole():
            raise CannotSplitError("batch", why)
        if self._splitter is None:
            size = batch_size(batch)
            self._splitter = Splitter(self.schedule.full or size, size, None if self.schedule.full else batch)
        return self._splitter.count(batch)
