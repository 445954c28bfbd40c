"""The Python stack of a copy of the process that is killed by a signal, for the original to read."""

from __future__ import annotations

import faulthandler
import os
import re
import tempfile
from typing import IO

from vram_guard.language import _

#: A line of what faulthandler writes, innermost first.
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$', re.MULTILINE)


class FatalStack:
    """A file that both processes have open, which only a fatal signal fills.

    Example:
        >>> stack = FatalStack()
        >>> stack.text(), stack.place()
        ('', '')
        >>> stack.close()
    """

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):  # on Linux
            self._file: IO[bytes] = os.fdopen(os.memfd_create("stack"), "w+b")
        else:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close
        self.number = self._file.fileno()

    def write_when_killed(self) -> None:
        """In the copy: from now on; by SIGSEGV, SIGBUS, SIGFPE, SIGILL and SIGABRT."""
        faulthandler.disable()  # one that is enabled already would not put its handlers in place of others
        faulthandler.enable(self.number, all_threads=False)

    def text(self) -> str:
        """The stack, innermost frame first; "" where the copy was not killed by one of these signals."""
        return os.pread(self.number, os.fstat(self.number).st_size, 0).decode(errors="replace")

    def place(self) -> str:
        """The innermost frame as "file:line, in function"; "" where there is none."""
        frame = _FRAME.search(self.text())
        return "" if frame is None else f"{frame['file']}:{frame['line']}, in {frame['function']}"

    def located(self, problem: str) -> str:
        """A problem, with the place where the copy was, if that is known."""
        place = self.place()
        return problem + _("; it was at {place}", place=place) if place else problem

    def close(self) -> None:
        """Give the file back."""
        self._file.close()
