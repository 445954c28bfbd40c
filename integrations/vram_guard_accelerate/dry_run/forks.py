"""Copies of this process, which run the rest of a script several times over.

A script's loop is there once. A copy of the process, made where the loop asks for its first batch, runs it with another
batch size, another precision, other techniques, and sends back what came out; the original has not moved, and can be
copied again. Memory is shared between the copies until written to, and symbolic tensors have none.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from vram_guard.errors import UnsupportedStepError
from vram_guard.forks import ended
from vram_guard.forks.ended import EndedOnceError
from vram_guard.forks.fork import Copy, Home, fork_here
from vram_guard.forks.side_effects import discard_writes, way
from vram_guard.language import _
from vram_guard_accelerate.dry_run.time_limit import no_limit


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


running: set[Copy[Any]] = set()
"""Copies that have not answered yet."""


def fork(task: Any) -> Copy[Any]:
    """A copy that begins here: :class:`ForkEntered` is raised in it, with what it is to do."""
    copy = fork_here()
    if isinstance(copy, Home):
        running.clear()  # copies of the original's: they are not this one's to end
        if way():  # what this process writes is seen by none of those that it was copied from
            discard_writes()
        raise ForkEntered(task, ParentPipe(copy))
    running.add(copy)
    return copy


def answer_of(ask: Callable[[], Copy[Any]], what: str, seconds: float, begun: Copy[Any] | None = None) -> Any:
    """The answer of a copy; where it is ended from outside, that of a second one.

    Args:
        ask: makes a copy.
        what: the copy and what it is to do, in words.
        seconds: when to give up.
        begun: the first copy, where it is there already.

    Raises:
        EndedCopyError: both were ended so.
        LostCopyError: the copy died, or did not answer in time.
    """
    with contextlib.suppress(EndedOnceError):
        return _answer(begun or ask(), seconds)
    try:
        return _answer(ask(), seconds)
    except EndedOnceError as error:
        raise ended.twice(what, error.code) from error


def _answer(copy: Copy[Any], seconds: float) -> Any:
    try:
        return copy.answer(most_seconds=seconds)
    finally:
        running.discard(copy)


def check_forks() -> None:
    """Raises UnsupportedStepError where processes cannot be copied (Windows)."""
    if not hasattr(os, "fork"):
        raise UnsupportedStepError(
            _(
                "a script's loop is followed in copies of its process (fork), which this system does not have; run "
                "vram-guard launch --dry-run on Linux or macOS with --gpu or --budget"
            )
        )


def end_all() -> None:
    """End all copies: none outlives its original."""
    for copy in list(running):
        copy.kill()
