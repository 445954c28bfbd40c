"""Messages of the guard, on standard error, where they stay apart from the script's own output."""

from __future__ import annotations

import sys

from vram_guard.terminal import shown_on


def say(text: str) -> None:
    """To standard error, in whatever encoding it has."""
    print(shown_on(text, sys.stderr), file=sys.stderr, flush=True)  # noqa: T201
