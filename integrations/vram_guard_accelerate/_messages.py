"""Messages of the guard, on standard error, where they stay apart from the script's own output."""

from __future__ import annotations

import sys

from vram_guard.printable import printable


def say(text: str) -> None:
    """To standard error, in whatever encoding it has."""
    encoding = sys.stderr.encoding or "utf-8"
    print(printable(text).encode(encoding, errors="replace").decode(encoding), file=sys.stderr, flush=True)  # noqa: T201
