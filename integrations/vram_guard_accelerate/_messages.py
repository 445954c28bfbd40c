"""Messages of the guard, on standard error, where they stay apart from the script's own output."""

from __future__ import annotations

import sys

from vram_guard.printable import printable
from vram_guard.terminal import fitting


def say(text: str) -> None:
    """To standard error, in whatever encoding it has."""
    encoding = sys.stderr.encoding or "utf-8"
    text = fitting(printable(text), sys.stderr)
    print(text.encode(encoding, errors="replace").decode(encoding), file=sys.stderr, flush=True)  # noqa: T201
