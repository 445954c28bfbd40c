"""Python's collector of cycles."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator

#: The process that imported this; its copies have other numbers.
_IMPORTED_IN = os.getpid()


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

    No finalizer of those objects is run: the collector is paused, and in a copy they are frozen again, with all that is
    there by then; a process that lives on would never let go of that.
    """
    is_frozen = bool(gc.get_freeze_count()) and os.getpid() != _IMPORTED_IN
    with collector_paused():
        gc.unfreeze()
        try:
            yield
        finally:
            if is_frozen:
                gc.freeze()
