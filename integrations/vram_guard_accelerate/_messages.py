"""Messages of the guard, on standard error, where they stay apart from the script's own output."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """To standard error, in whatever encoding it has."""
    encoding = sys.stderr.encoding or "utf-8"
    print(text.encode(encoding, errors="replace").decode(encoding), file=sys.stderr, flush=True)  # noqa: T201
