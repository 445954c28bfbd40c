"""What is the user's own code, and what is Python's, an installed package's or this package's."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from types import FrameType

from vram_guard.language import _

#: Folders into which packages are installed; Debian's Python has a name of its own for them.
_INSTALLED = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
#: The folder of Python's own files. Not the one around it: a system's Python lies in ``/usr``, and so may a user's
#: ``/usr/src/app``.
_STANDARD = f"{Path(os.__file__).parent}{os.sep}"
#: The folder of Python's program where commands are installed beside it; elsewhere an embedded Python may lie among the
#: user's own files.
_PROGRAMS = Path(sys.executable or "").parent
_PYTHONS = (_STANDARD, f"{_PROGRAMS}{os.sep}") if _PROGRAMS.name in ("bin", "Scripts") else (_STANDARD,)
#: Folders of this package and of its adapters that are imported.
_own = {str(Path(__file__).parent) + os.sep}


def add_own_package(file: str) -> None:
    """The package that this file lies in is no user's code: an adapter's.

    Args:
        file: ``__file__`` of its ``__init__``.
    """
    _own.add(str(Path(file).parent) + os.sep)


def is_installed_file(name: str) -> bool:
    """True for files of installed packages.

    Example:
        >>> is_installed_file(torch.__file__), is_installed_file("/usr/src/app/train.py")
        (True, False)
    """
    return any(folder in name for folder in _INSTALLED)


def is_users_file(name: str) -> bool:
    """True for files outside installed packages, Python and this package; code without a file is nobody's.

    Args:
        name: as code objects and modules have it.

    Example:
        >>> is_users_file("/usr/src/app/train.py"), is_users_file("<string>"), is_users_file(torch.__file__)
        (True, False, False)
    """
    return not is_installed_file(name) and not name.startswith(("<", *_PYTHONS, *_own))


def level_of_user() -> int:
    """The ``stacklevel`` of ``warnings.warn`` for the innermost line of the user's code that leads to the caller.

    Where there is none, that of the caller's own caller.
    """
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - who called is the question
    level = 1
    while frame is not None:
        if is_users_file(frame.f_code.co_filename):
            return level
        frame = frame.f_back
        level += 1
    return 2


def line_of_frame(frame: FrameType | None) -> str:
    """The innermost line of the user's code at which a frame stands, or from which it was called; "" if there is none.

    Returns:
        "train.py, line 12".
    """
    while frame is not None:
        if is_users_file(frame.f_code.co_filename):
            return _said(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return ""


def line_of_error(error: BaseException, script: str = "") -> str:
    """The innermost line of the user's code that an error has passed; "" if there is none.

    Args:
        error: with its traceback.
        script: a file that is the user's wherever it lies.

    Example:
        >>> line_of_error(ValueError("never raised"))
        ''
    """
    own = Path(script).resolve() if script else None
    lines = [
        _said(frame.f_code.co_filename, number)
        for frame, number in traceback.walk_tb(error.__traceback__)
        if is_users_file(frame.f_code.co_filename) or (own and Path(frame.f_code.co_filename).resolve() == own)
    ]
    return lines[-1] if lines else ""


def with_line(said: str, line: str) -> str:
    """What is said of a line of the user's code, with that line; without one, as it is.

    Example:
        >>> with_line("ValueError: no data", "train.py, line 12"), with_line("ValueError: no data", "")
        ('ValueError: no data (train.py, line 12)', 'ValueError: no data')
    """
    return f"{said} ({line})" if line else said


def raised_here(error: BaseException) -> bool:
    """True if this package or an adapter raised an error, and not torch or the user's code that it runs."""
    frames = [frame.f_code.co_filename for frame, _number in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].startswith(tuple(_own))


#: Parts of messages about tensors that have no values: torch's, and their own text (``Tensor.__repr__`` in a trace).
_WITHOUT_VALUES = ("meta tensor", "'Meta' backend", "device='meta'", "FakeTensor", "tensor(..., device=")
#: Errors that no kernel of torch raises: where this package's frame raises one, it is this package that fails.
_PYTHONS_OWN = ("AttributeError", "KeyError", "NameError", "AssertionError", "NotImplementedError")


def is_of_stand_ins(error: BaseException) -> bool:
    """True for an error that this package's tensors without values have led to, and not the user's code by itself.

    Example:
        >>> is_of_stand_ins(NotImplementedError("Cannot copy out of meta tensor; no data!"))
        True
        >>> is_of_stand_ins(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
        False
    """
    return leads_to_stand_ins(type(error).__name__, str(error), ours=raised_here(error))


def leads_to_stand_ins(kind: str, message: str, *, ours: bool) -> bool:
    """The same of an error that was told in words.

    Args:
        kind: the name of its class.
        message: its text.
        ours: whether this package raised it.
    """
    return any(part in message for part in _WITHOUT_VALUES) or (ours and kind in _PYTHONS_OWN)


def said_of_failure(line: str, problem: str, asked: str, *, stand_ins: bool) -> str:
    """A sentence about the user's code that fails in a trace, or that a trace cannot follow.

    Args:
        line: of the user's code, as :func:`line_of_error` has it.
        problem: "RuntimeError: ...".
        asked: the setting that shows the traceback.
        stand_ins: whether it is one of :func:`is_of_stand_ins`.
    """
    if stand_ins:
        return _("{said}; {setting} shows the traceback", said=not_followed(line, problem), setting=asked)
    return _(
        "{line} fails: {problem}. It ran on tensors without values, at first with batches of a few samples; {setting} "
        "shows the traceback",
        line=line,
        problem=problem.rstrip("."),
        setting=asked,
    )


def not_followed(line: str, problem: str) -> str:
    """A sentence about a line whose values a trace does not have.

    Args:
        line: of the user's code; "" if none is known.
        problem: "RuntimeError: ...".
    """
    return _(
        "vram_guard does not follow {line}, which needs values that are not known without running on a GPU "
        "({problem}). Compute them before the step, or leave this line out of what is predicted",
        line=line or _("a line of a library"),
        problem=problem.rstrip("."),
    )


def _said(file: str, number: int) -> str:
    return _("{path}, line {line}", path=Path(file).name, line=number)
