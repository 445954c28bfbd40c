"""Errors of the user's own code, as a command says them."""

from __future__ import annotations

from vram_guard.user_code import line_of_error, said_of_failure


def failure_of_users_code(error: Exception) -> str | None:
    """One line for an error that the user's own code has passed on; None where none of it was running.

    The line of code is the innermost one outside libraries: what a model raises is found there, whatever raised it.
    """
    line = line_of_error(error)
    return said_of_failure(line, f"{type(error).__name__}: {error}", "--verbose") if line else None
