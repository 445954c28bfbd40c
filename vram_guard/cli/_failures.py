"""Errors of the user's own code, as a command says them."""

from __future__ import annotations

from vram_guard.user_code import is_of_stand_ins, line_of_error, said_of_failure


def failure_of_users_code(error: Exception) -> str | None:
    """One line for an error that the user's own code has passed on; None where none of it was running.

    The line of code is the innermost one outside libraries: what a model raises is found there, whatever raised it.
    """
    line = line_of_error(error)
    if not line:
        return None
    return said_of_failure(line, f"{type(error).__name__}: {error}", "--verbose", stand_ins=is_of_stand_ins(error))
