"""Copies that were ended from outside: what they would have found is not known, and nothing is concluded from it."""

from __future__ import annotations

import signal

from vram_guard.errors import EndedCopyError, LostCopyError
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
        code: its exit code, see :func:`from_outside`.
    """

    def __init__(self, code: int | None) -> None:
        super().__init__(_("the copy of the process that looked at the training {how}", how=_how(code)))
        self.code = code


def _how(code: int | None) -> str:
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


def twice(what: str, code: int | None) -> EndedCopyError:
    """The error where a second copy ended as the first one did; from here on :func:`not_known` has it too.

    Args:
        what: the copy, in words.
        code: of the second one.
    """
    return missing(
        _("{what} {how}, and so was a second one: what it would have found is not known", what=what, how=_how(code))
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
