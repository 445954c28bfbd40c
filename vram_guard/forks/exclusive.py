"""One trace, or one copy of the process, at a time: a trace replaces parts of torch for all threads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from vram_guard.errors import UnsupportedStepError
from vram_guard.language import _

_lock = threading.Lock()
_owner: int | None = None
_copied = False


@contextlib.contextmanager
def alone_in_process() -> Iterator[None]:
    """Inside the block no other thread traces or copies the process; where one does, this one waits for it.

    Raises:
        UnsupportedStepError: this thread is inside such a block already.
    """
    global _owner  # noqa: PLW0603 - as the lock, it belongs to the process
    if _owner == threading.get_ident():
        raise UnsupportedStepError(_("a trace is running already; traces cannot be nested"))
    with _lock:
        _owner = threading.get_ident()
        try:
            yield
        finally:
            _owner = None


def renew_in_copy() -> None:
    """In a copy of the process, which was made inside :func:`alone_in_process`: nobody is there to leave it."""
    global _lock, _owner, _copied
    _lock, _owner, _copied = threading.Lock(), None, True


def in_copy() -> bool:
    """True in a copy of the process, where the user's code may run: nothing that it does reaches the original."""
    return _copied
