"""Parts of a job that a training may do without where they cannot be followed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from vram_guard.job import JobRun
from vram_guard.language import Message


@contextlib.contextmanager
def left_out_if_it_fails(run: JobRun, what: object) -> Iterator[None]:
    """Code of the user's that may fail in the block: a note says why, and what it would have taken is not predicted.

    Args:
        run: of the trace.
        what: the part, for people.
    """
    try:
        yield
    except Exception as error:  # noqa: BLE001 - the user's own code, and a framework's on tensors without values
        run.note(
            Message(
                "{phase} cannot be followed to its end ({error}): the rest of it is not included in the prediction",
                phase=what,
                error=in_a_line(error),
            )
        )
        forget_frames(error)


def in_a_line(error: Exception) -> str:
    """An error for a note."""
    return f"{type(error).__name__}: {error}".split("\n", 1)[0]


def forget_frames(error: Exception) -> None:
    """What has been said of an error is all that is left of it: its frames hold symbolic tensors."""
    error.__traceback__ = error.__context__ = error.__cause__ = None
