"""A probe for loops over batches that train, where the models' mode does not show it.

Models come from ``from_pretrained`` in evaluation mode, Transformers' Trainer loads the batches of a step before it
calls ``train()``, and adapters are trained in evaluation mode altogether; on the other hand, evaluations often run
without ``no_grad``. So at the first batch of which that cannot be told, a copy of the process goes on as in an
evaluation. If it comes to a backward pass, the original knows which iteration over a loader is the training's; else the
copy is the one that plans, and answers in the original's place.
"""

from __future__ import annotations

import os
from typing import Any

from vram_guard.forks.fork import Copy
from vram_guard.language import _
from vram_guard_accelerate.dry_run import forks
from vram_guard_accelerate.dry_run.forks import ForkEntered, ParentPipe
from vram_guard_accelerate.dry_run.time_limit import no_limit


class TrainingProbe:
    """One process's knowledge of its loops."""

    def __init__(self) -> None:
        self._count = 0
        self._latest = 0
        self._training: int | None = None
        self._parent: ParentPipe | None = None
        self._tried = False

    def count_request(self, began: int | None) -> int:
        """A batch is asked for; the number of the first one of this iteration.

        Args:
            began: that number; None where this is the first one.
        """
        self._count += 1
        self._latest = self._count if began is None else began
        return self._latest

    def trains_from_here(self, patience: float) -> bool:
        """True if the requested batch is the training's first; called where the mode does not show it.

        Args:
            patience: seconds that a copy may take.

        Raises:
            UnsupportedStepError: the copy died, or did not come to an end in time.
        """
        if not self._tried:
            self._tried = True
            try:
                self._training = forks.answer_of(
                    _copy, _("the copy that looked for a loop that trains"), patience, silent=True
                )
            except ForkEntered as entered:
                self._parent = entered.parent
                return False
            if self._training is None:
                os._exit(0)  # it has answered for this process
        return self._count == self._training

    def differentiated(self) -> None:
        """A backward pass, before anything was planned; a copy has seen enough then."""
        if self._parent is not None:
            self._parent.send(self._latest)


def _copy() -> Copy[Any]:
    made = forks.fork(None)
    no_limit()  # it may plan, and has a limit of its own
    return made
