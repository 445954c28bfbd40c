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


@contextlib.contextmanager
def frozen_objects_listed() -> Iterator[None]:
    """While the block runs, ``gc.get_objects`` lists what was there when this process was copied from another one too.

    No finalizer of those objects is run: the collector is paused.
    """
    is_frozen = bool(gc.get_freeze_count())
    with collector_paused():
        gc.unfreeze()
        try:
            yield
        finally:
            if is_frozen:
                gc.freeze()
