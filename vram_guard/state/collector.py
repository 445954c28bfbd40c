"""Python's collector of cycles."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """While the block runs, cycles are not collected.

    When one dies depends on the collector's counters, by which two traces must not differ; and where hundreds of
    thousands of values are made, it looks at all of them again and again.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
