"""The phases of a dry run, and the places of a script at which they differ.

Until ``Accelerator.prepare`` a script runs for real (:mod:`.preparing`). From then on its models are symbolic
(:mod:`.following`). Where its loop asks for the first training batch, the process stops to plan: copies of it run the
loop on (:mod:`.forked`), each with another batch size, precision or technique, and say what it would have allocated.
"""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from inspect import CO_GENERATOR
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from vram_guard.limits import BATCHES_AHEAD, ROUNDS_FOLLOWED
from vram_guard.longest.planned_batch import PlannedBatch
from vram_guard.proof.functions import OwnBackward
from vram_guard.user_code import is_users_file
from vram_guard_accelerate.dry_run.first_batch import FirstBatch, LaunchShape, ScriptObservations

if TYPE_CHECKING:
    from torch import nn
    from typing_extensions import Self

    from vram_guard_accelerate.dry_run._engine import EngineProcess
    from vram_guard_accelerate.dry_run._sharded_process import ShardedProcess

_CALLS_NEXT = re.compile(r"(?<![\w.])next\(")


def calls_next() -> bool:
    """True where the script's line that asks for a batch calls ``next``: the end of a loader does not end its loop."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - who asks is the question
    while frame is not None:
        code = frame.f_code
        in_line = code.co_flags & CO_GENERATOR or (code.co_name.startswith("<") and code.co_name != "<module>")
        if is_users_file(code.co_filename) and not in_line:
            return _CALLS_NEXT.search(linecache.getline(code.co_filename, frame.f_lineno)) is not None
        frame = frame.f_back
    return False


class DryRun:
    """The process of a script that is followed.

    Args:
        shape: the launch that it stands for.
        decide: given the script at its first training batch: plans, and does not return.
        planned_batch: the batch that is planned for.
    """

    def __init__(
        self,
        shape: LaunchShape,
        decide: Callable[[FirstBatch], NoReturn],
        *,
        planned_batch: PlannedBatch = PlannedBatch(),  # noqa: B008 - a value
    ) -> None:
        self.shape = shape
        self.decide = decide
        self.script = ScriptObservations()
        self.own_backward = OwnBackward()
        """What the script puts between operators and their backward pass."""
        self.process: ShardedProcess | EngineProcess | None = None
        """What divides the model, where the launch, or the script, chose that; None: it stays whole."""
        self.planned_batch = planned_batch
        self.phase = DryRunPhase(self)
        self.loads = False
        """A loader makes a batch: loaders that it asks give it their own."""
        self.watched_loaders: set[type] = set()
        """Classes of loaders whose own iteration is watched."""


class BatchIterator:
    """Iterates over a loader of the script, whose phase decides which batches it gets."""

    def __init__(self, run: DryRun, loader: Any, original: Callable[[Any], Iterator[Any]]) -> None:
        self.loader = loader
        self._run = run
        self._original = original
        self._real: Iterator[Any] | None = None
        self._given = 0
        self._forwards = run.phase.forwards

    def __iter__(self) -> BatchIterator:
        return self

    def __next__(self) -> Any:
        return self.next_real() if self._run.loads else self._run.phase.next_batch(self)

    def next_real(self) -> Any:
        """The loader's own next batch."""
        outer, self._run.loads = self._run.loads, True
        try:
            if self._real is None:
                self._real = self._original(self.loader)
            return next(self._real)
        finally:
            self._run.loads = outer

    def next_beside_training(self) -> Any:
        """The same, until a loop that does not train has seen enough; one that calls ``next`` counts by itself."""
        forwards = self._run.phase.forwards
        used, self._forwards = forwards > self._forwards, forwards
        if self._given >= (ROUNDS_FOLLOWED if used else BATCHES_AHEAD) and not calls_next():
            raise StopIteration
        self._given += 1
        return self.next_real()


class DryRunPhase:
    """Behaviour at the places of a script that the patches watch; here: the script runs as it would without them."""

    def __init__(self, run: DryRun) -> None:
        self.run = run

    def __deepcopy__(self, _memo: object) -> Self:
        """Copies of a model, whose hooks lead here, are followed as the model is."""
        return self

    @property
    def forwards(self) -> int:
        """Number of calls of prepared models."""
        return 0

    def begins(self) -> None:
        """The script is about to start."""

    def called(self, model: nn.Module, called: dict[str, Any]) -> None:
        """A model of a script without Accelerate is about to be called, with these arguments."""

    def prepare(self, original: Callable[..., Any], accelerator: Any, args: Any, kwargs: Any) -> Any:
        """``Accelerator.prepare``, or ``prepare_model``."""
        return original(accelerator, *args, **kwargs)

    def load_state(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """``Accelerator.load_state``: the script resumes."""

    def next_batch(self, batches: BatchIterator) -> Any:
        """A loader's next batch."""
        return batches.next_real()

    def stands_for_others(self, loader: Any) -> bool:  # noqa: ARG002 - of no use here
        """True if no more than two rounds over a loader are followed, so that the second stands for all others."""
        return False

    def moving_batch(self) -> AbstractContextManager[object]:
        """A batch moves to the GPU inside the block."""
        return nullcontext()

    def differentiates_for_real(self) -> None:
        """Gradients are about to be computed, by whatever way."""

    def clips(self, parameters: Any) -> Any:
        """The script clips the gradients of these parameters; the same ones, to be clipped."""
        return parameters

    def stepped(self, optimizer: object) -> None:
        """An optimizer has stepped."""

    def failed(self, error: BaseException, script: str) -> None:
        """The script has raised this. Does not return in a copy, which sends it to its original."""

    def ended(self) -> None:
        """The script is over. Does not return in a copy, which sends what it has seen to its original."""
