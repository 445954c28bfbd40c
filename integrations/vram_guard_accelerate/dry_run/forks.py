"""Copies of this process, which run the rest of a script several times over.

A script's loop is there once. A copy of the process, made where the loop asks for its first batch, runs it with another
batch size, another precision, other techniques, and sends back what came out; the original has not moved, and can be
copied again. Memory is shared between the copies until written to, and symbolic tensors have none.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from vram_guard.errors import UnsupportedStepError
from vram_guard.forks.fork import Copy, Home, fork_here
from vram_guard.forks.side_effects import discard_writes, way
from vram_guard.language import _
from vram_guard_accelerate.dry_run.time_limit import no_limit

if TYPE_CHECKING:
    from vram_guard.plan.source import TraceRequest
    from vram_guard.proof.bodies import Watch


@dataclass(frozen=True)
class ForkTask:
    """Run the loop under these settings, for two optimizer steps."""

    request: TraceRequest
    whole_job: bool = False
    """True if the loop is followed beyond its second step: evaluation, saving, the next epoch."""
    watch: Watch | None = None
    """What is looked at in each forward of the loop; None: nothing."""


@dataclass(frozen=True)
class ParentPipe:
    """The way from a copy back to the process that asked for it."""

    home: Home

    def send(self, answer: Any) -> NoReturn:
        """Send the answer and end this copy at once, without the script's own exit handlers."""
        no_limit()  # its own answer would end in the middle of this one
        self.home.answer(answer)


class ForkEntered(BaseException):
    """Raised in a copy, to leave the frames of its caller; holds what the copy is to do."""

    def __init__(self, task: Any, parent: ParentPipe) -> None:
        super().__init__()
        self.task = task
        self.parent = parent


def fork(task: Any) -> Copy[Any]:
    """A copy that begins here: :class:`ForkEntered` is raised in it, with what it is to do."""
    copy = fork_here()
    if isinstance(copy, Home):
        if way():  # what this process writes is seen by none of those that it was copied from
            discard_writes()
        raise ForkEntered(task, ParentPipe(copy))
    return copy


def check_forks() -> None:
    """Raises UnsupportedStepError where processes cannot be copied (Windows)."""
    if not hasattr(os, "fork"):
        raise UnsupportedStepError(
            _(
                "a script's loop is followed in copies of its process (fork), which this system does not have; run "
                "vram-guard launch --dry-run on Linux or macOS with --gpu or --budget"
            )
        )
