"""Copies that were ended from outside: what they would have found is not known, and nothing is concluded from it.

An error that says that host memory is full is such an end: what else runs on the machine decides where it is raised.
"""

from __future__ import annotations

import errno
import signal
from collections.abc import Iterator

from vram_guard.errors import EndedCopyError, LostCopyError, VramGuardError
from vram_guard.language import _

#: Signals that end a process for what its own code does; any other one comes from elsewhere.
_OF_ITS_OWN = frozenset(
    getattr(signal, name)
    for name in (
        "SIGSEGV",
        "SIGBUS",
        "SIGFPE",
        "SIGILL",
        "SIGABRT",
        "SIGTRAP",
        "SIGSYS",
        "SIGPIPE",
        "SIGALRM",
        "SIGPROF",
        "SIGVTALRM",
    )
    if hasattr(signal, name)
)

_not_known: list[str] = []


class EndedOnceError(LostCopyError):
    """A copy was ended from outside; another one may do its work.

    Args:
        how: it was ended: see :func:`how` and :func:`host_is_full`.
    """

    def __init__(self, how: str) -> None:
        super().__init__(_("the copy of the process that looked at the training {how}", how=how))
        self.how = how

    def __reduce__(self) -> tuple[type[EndedOnceError], tuple[str]]:
        return EndedOnceError, (self.how,)


def how(code: int | None) -> str:
    """The end of a copy in words, by its exit code (see :func:`from_outside`)."""
    if code is None:
        return _("was ended from outside")
    if -code == getattr(signal, "SIGKILL", 0):
        return _("was ended by signal {number}, which the system sends where host memory is full", number=-code)
    return _("was ended by signal {number}", number=-code)


def from_outside(code: int | None) -> bool:
    """True where a copy's exit code says nothing about the code that ran in it.

    Args:
        code: as of :meth:`vram_guard.forks.tied.Child.end`; None where it is not known.
    """
    return code is None or (code < 0 and -code not in _OF_ITS_OWN)


def host_is_full(error: BaseException) -> str:
    """The end of a copy in words, where this error came of full host memory; "" where it did not.

    Args:
        error: that Python, the system or torch's allocator of host memory raised, or one that was raised for it.

    Example:
        >>> host_is_full(MemoryError()), host_is_full(ValueError("no data"))
        ('ran out of host memory (MemoryError)', '')
    """
    for one in _behind(error):
        # An allocator that is replayed raises errors of this package.
        of_python = isinstance(one, MemoryError) and not isinstance(one, VramGuardError)
        if of_python or getattr(one, "errno", None) == errno.ENOMEM or "DefaultCPUAllocator: " in str(one):
            said = (str(one).splitlines() or [""])[0]
            return _("ran out of host memory ({error})", error=": ".join(filter(None, (type(one).__name__, said))))
    return ""


def _behind(error: BaseException) -> Iterator[BaseException]:
    """An error, and those that were handled when it was raised."""
    found: BaseException | None = error
    seen: set[int] = set()
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield found
        found = found.__cause__ or found.__context__


def twice(what: str, how: str) -> EndedCopyError:
    """The error where a second copy ended as the first one did; from here on :func:`not_known` has it too.

    Args:
        what: the copy, in words.
        how: the second one's end, as :class:`EndedOnceError` has it.
    """
    return missing(
        _("{what} {how}, and so did a second one: what it would have found is not known", what=what, how=how)
    )


def missing(what: str) -> EndedCopyError:
    """The error that names what is not known; from here on :func:`not_known` has it too."""
    _not_known.append(what)
    return EndedCopyError(what)


def not_known() -> EndedCopyError | None:
    """The error that names what is missing, whoever has caught it before; None where nothing is.

    To be asked in a copy before it answers: an answer is none where something that it rests on is not known.
    """
    return EndedCopyError("; ".join(dict.fromkeys(_not_known))) if _not_known else None


def instead_of(error: BaseException) -> BaseException:
    """The same in place of an error that may have come of it; else that error."""
    return not_known() or error


def forget() -> None:
    """What is not known so far belongs to answers of others than what begins here."""
    _not_known.clear()
