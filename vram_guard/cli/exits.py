"""The exit codes of ``vram-guard``."""

from __future__ import annotations

from typing import Final

from vram_guard.errors import DoesNotFitError, EndedCopyError, InvalidInputError, VramGuardError

EXIT_DONE: Final = 0
EXIT_DOES_NOT_FIT: Final = 1
EXIT_USAGE: Final = 2
EXIT_ENVIRONMENT: Final = 3
EXIT_NOT_KNOWN: Final = 4


def exit_code(error: VramGuardError) -> int:
    """The exit code for an error.

    Example:
        >>> exit_code(InvalidInputError("no such card"))
        2
    """
    if isinstance(error, DoesNotFitError):
        return EXIT_DOES_NOT_FIT
    if isinstance(error, InvalidInputError):
        return EXIT_USAGE
    return EXIT_NOT_KNOWN if isinstance(error, EndedCopyError) else EXIT_ENVIRONMENT
