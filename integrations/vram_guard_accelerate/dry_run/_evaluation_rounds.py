"""Rounds of a script's evaluations, of which two are followed."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from vram_guard.language import _
from vram_guard.limits import ROUNDS_FOLLOWED
from vram_guard.timeline import Note
from vram_guard_accelerate._patching import wrap
from vram_guard_accelerate.dry_run.phases import BatchIterator, calls_next

if TYPE_CHECKING:
    from vram_guard.simulate.memory.recorder import Recorder


class EvaluationRounds:
    """Rounds of evaluations, of which two are followed: the second one stands for all others.

    Loops that call ``next`` are not ended by a loader, and take all their rounds.

    Args:
        recorder: of the copy.
        stands: whether the second round over a loader stands for all others, see ``DryRunPhase.stands_for_others``.
    """

    def __init__(self, recorder: Recorder, stands: Callable[[Any], bool]) -> None:
        self._recorder = recorder
        self._stands = stands
        self._ahead: dict[int, Any] = {}
        """Loaders over which one of Accelerate's iterates, which asks for a batch ahead; kept, since ids are reused."""
        self._open: WeakKeyDictionary[Any, contextlib.ExitStack] = WeakKeyDictionary()
        """Rounds that have not ended, by iterator or loader."""
        self._seen: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._until_freed: int | None = None
        """Rounds after which the Trainer that evaluates moves to the host what it has kept of them; None: all."""
        self.kept_outputs = 0
        """Bytes that a Trainer keeps on the GPU of all rounds of an evaluation, and would not with another argument."""
        self.notes: list[Note] = []

    def install(self) -> None:
        """Accelerate's loaders say when they hand out a batch, and Transformers' Trainer when it evaluates."""
        from accelerate import data_loader

        trainer = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
        wrap(trainer, "evaluation_loop", self._trainer_evaluates, optional=True)
        for name in ("DataLoaderShard", "DataLoaderDispatcher"):
            wrap(getattr(data_loader, name), "__iter__", self._handed_out)

    def _trainer_evaluates(self, original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
        options = trainer.args
        by_batch = getattr(options, "batch_eval_metrics", False)  # it moves nothing to the host then
        outer, self._until_freed = self._until_freed, None if by_batch else options.eval_accumulation_steps
        before = len(self._recorder.repeats)
        try:
            return original(trainer, *args, **kwargs)
        finally:
            if self._until_freed is None and not by_batch:
                kept = sum(repeat.kept for repeat in self._recorder.repeats[before:])
                self.kept_outputs = max(self.kept_outputs, kept)
            self._until_freed = outer

    def asks_ahead(self, loader: Any) -> bool:
        """True if one of Accelerate's loaders iterates over this one."""
        return id(loader) in self._ahead

    def _handed_out(self, original: Callable[[Any], Iterator[Any]], loader: Any) -> Iterator[Any]:
        base = getattr(loader, "base_dataloader", loader)
        self._ahead[id(base)] = base
        self._seen[base] = 0
        try:
            for batch in original(loader):
                self._handed(base, loader)
                yield batch
        finally:
            self.close(base)

    @contextlib.contextmanager
    def next_batch(self, batches: BatchIterator) -> Iterator[None]:
        """The next batch of a loader is asked for, which ends the round of the one before."""
        if self.asks_ahead(batches.loader):
            yield
            return
        self.close(batches)
        yield
        self._handed(batches, batches.loader)

    def close(self, key: Any) -> None:
        """The round of an iterator, or of one of Accelerate's loaders, has ended."""
        self._open.pop(key, contextlib.ExitStack()).close()

    def _handed(self, key: Any, loader: Any) -> None:
        self.close(key)
        self._seen[key] = self._seen.get(key, 0) + 1
        base = getattr(loader, "base_dataloader", loader)
        if self._seen[key] == ROUNDS_FOLLOWED and self._stands(base) and not calls_next():
            stack = self._open[key] = contextlib.ExitStack()
            stack.enter_context(self._recorder.repeat(self._rounds_of(loader)))

    def _rounds_of(self, loader: Any) -> int:
        """The rounds that the second one stands for, itself included."""
        rounds: int | None
        try:
            rounds = len(loader)
        except Exception:  # noqa: BLE001 - of the user's data set
            rounds = None
        if self._until_freed is not None:
            rounds = self._until_freed if rounds is None else min(rounds, self._until_freed)
        if rounds is not None:
            return max(1, rounds - 1)
        self.notes.append(Note(_("the number of batches of an evaluation is not known: two are counted")))
        return 1
