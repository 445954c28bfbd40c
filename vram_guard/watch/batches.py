"""Loaded batches, trained on or validated whole or in micro-batches, and in smaller ones after running out of memory.

The loop over micro-batches, their weights, and what becomes of their outputs stand here once. An adapter hands in what
its framework does with one of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from vram_guard.apply.loss_weight import LossWeight, loss_weights, split_or_warn
from vram_guard.apply.microbatch import CannotSplitError, MicroBatch, Splitter, batch_size
from vram_guard.apply.normalisers import Normaliser
from vram_guard.apply.outputs import detached, merged
from vram_guard.language import _
from vram_guard.watch.rank_coordinator import RankCoordinator, SingleProcess
from vram_guard.watch.recovery import Attempt, MicroBatchSchedule, Recovery

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


@dataclass(frozen=True)
class BatchPass:
    """One pass over a batch."""

    parts: list[MicroBatch]
    loss_weight: LossWeight
    attempt: Attempt | None
    """The attempt of the pass, where recovery is armed."""

    @property
    def whole(self) -> bool:
        """True where the batch is in one part."""
        return len(self.parts) == 1

    def run(
        self,
        one: Callable[[Share], Any],
        *,
        rows: bool = True,
        otherwise: Callable[[Sequence[Any]], Any] | None = None,
    ) -> Any:
        """Call ``one`` for each micro-batch and merge what it returns; see :func:`vram_guard.apply.outputs.merged`."""
        if self.whole:
            return one(Share(self.parts[0].data, self.parts[0].samples, 1.0, first=True, last=True))
        parts, weights = self._counting()
        outputs: list[Any] = []
        for at, (part, weight) in enumerate(zip(parts, weights, strict=True)):
            share = Share(part.data, part.samples, weight, first=at == 0, last=at == len(parts) - 1)
            if self.attempt is not None:
                self.attempt.last = share.last
            outputs.append(detached(one(share)))
        return merged(outputs, parts, weights, rows=rows, otherwise=otherwise)

    def _counting(self) -> tuple[list[MicroBatch], list[Any]]:
        """The micro-batches with their weights; those without a label that counts are left out: their loss is 0 / 0."""
        weights = loss_weights(self.parts, self.loss_weight)
        if not isinstance(self.loss_weight, Normaliser):
            return self.parts, weights
        # Numbers of Python: a count in double precision would make losses of single precision double.
        pairs = [(part, float(weight)) for part, weight in zip(self.parts, weights, strict=True) if float(weight) != 0]
        return [part for part, _weight in pairs], [weight for _part, weight in pairs]


class MicroBatches:
    """The batches of one loader.

    Args:
        splitter: how they are cut; None: learned from the first batch that has to be.
        loss_weight: what the loss is over the samples of a batch.
        recovery: recovers a batch from running out of memory; None: errors are left alone.
        schedule: the sizes of micro-batches to take; None: the splitter's.
        why_whole: asked before a batch is cut: the reason for which it must not be, "" for none.
        ranks: the processes that train on batches of their own at the same time; None: recovery's, or this one alone.
        in_step: every forward waits for the other ranks (synchronised batch normalisation, weights in shards): all
            must run as many.
    """

    def __init__(
        self,
        splitter: Splitter | None,
        loss_weight: LossWeight = "mean",
        *,
        recovery: Recovery | None = None,
        schedule: MicroBatchSchedule | None = None,
        why_whole: Callable[[], str] = str,
        ranks: RankCoordinator | None = None,
        in_step: bool = False,
    ) -> None:
        self.recovery = recovery
        self._ranks = ranks or (SingleProcess() if recovery is None else recovery.ranks)
        self._in_step = in_step
        self.schedule = schedule or MicroBatchSchedule(None if splitter is None else splitter.micro_batch_size)
        self.never_cut = ""
        """The reason for which batches must stay whole; "" for none."""
        self._splitter = splitter
        self._loss_weight = loss_weight
        self._why_whole = why_whole

    def for_validation(self) -> MicroBatches:
        """Batches that each rank validates by itself: whole until memory runs out."""
        recovery = None if self.recovery is None else self.recovery.of_this_rank()
        return MicroBatches(copy.copy(self._splitter), recovery=recovery, schedule=MicroBatchSchedule())

    def run(
        self, batch: Any, work: Callable[[BatchPass], T], *, synchronise: bool = False, what: str | None = None
    ) -> T:
        """Call ``work`` until a pass over the batch gets through; see :meth:`Recovery.run`."""
        if self.recovery is None:
            return work(BatchPass(self._parts(batch, self.schedule.size), self._loss_weight, None))

        def attempted(attempt: Attempt) -> T:
            return work(BatchPass(self._parts(batch, attempt.micro_batch_size), self._loss_weight, attempt))

        return self.recovery.run(
            attempted,
            self.schedule,
            lambda: self._count(batch),
            synchronise=synchronise,
            what=_("this batch") if what is None else what,
        )

    def _parts(self, batch: Any, size: int | None) -> list[MicroBatch]:
        if size is None or self._splitter is None:
            return [MicroBatch(batch, 1, 1)]
        self._splitter.micro_batch_size = size
        alone = isinstance(self._ranks, SingleProcess)
        parts = None if alone else self._agreed(self._splitter, batch)
        return split_or_warn(self._splitter, batch, self._why_whole(), parts)

    def _agreed(self, splitter: Splitter, batch: Any) -> int:
        """The number of micro-batches of this rank's batch: as many as the rank needs that needs the most.

        Batches differ in size where ranks have samplers of their own, and at the end of an epoch. What the step does
        with the other ranks beyond what a trace has seen would wait for ever if one ran it more often. A batch too
        short for so many is cut into pairs of samples at least (batch normalisation needs two), if the plan's
        micro-batches have two. Where every forward waits for the others, the shortest batch decides for all.
        """
        try:
            samples = splitter.count(batch)
        except CannotSplitError:
            samples = 1  # it stays whole, and says so
        needed = -(-samples // splitter.micro_batch_size)
        most, fewest = self._ranks.parts(needed, samples)
        if self._in_step:
            return min(most, fewest)
        return min(most, max(needed, samples // min(splitter.micro_batch_size, 2)))

    def _count(self, batch: Any) -> int:
        """The samples of a batch that is about to be cut, perhaps for the first time."""
        if why := self.never_cut or self._why_whole():
            raise CannotSplitError("batch", why)
        if self._splitter is None:
            size = batch_size(batch)
            self._splitter = Splitter(self.schedule.full or size, size, None if self.schedule.full else batch)
        return self._splitter.count(batch)
