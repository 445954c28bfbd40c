"""Errors of the user's own code, as a command says them."""

from __future__ import annotations

from vram_guard.language import _
from vram_guard.user_code import line_of_error


def failure_of_users_code(error: Exception) -> str | None:
    """One line for an error that the user's own code has passed on; None where none of it was running.

    The line of code is the innermost one outside libraries: what a model raises is found there, whatever raised it.
    """
    line = line_of_error(error)
    if not line:
        return None
    return _(
        "{line} fails: {problem}. It ran on tensors without values, at first with batches of a few samples; --verbose "
        "shows the traceback",
        line=line,
        problem=f"{type(error).__name__}: {error}".rstrip("."),
    )
