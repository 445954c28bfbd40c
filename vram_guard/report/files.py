"""Files that are either whole or not there, and whose loss never costs the result."""

from __future__ import annotations

import os
import secrets
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vram_guard.errors import InvalidInputError
from vram_guard.language import _


class NotWrittenWarning(UserWarning):
    """A report could not be written (read-only folder, full disk); what it reports still holds."""


def write_atomically(path: str | os.PathLike[str], content: bytes | str) -> bool:
    """Write a file so that a reader sees the old one or the new one, never a part.

    The content goes to a temporary file next to it, which is then renamed: the last of two writers wins.
    Missing folders are made.

    Returns:
        Whether it was written; where it could not be, a :class:`NotWrittenWarning` says why.
    """
    target = Path(path)
    data = content.encode() if isinstance(content, str) else content
    temporary = target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())  # a full disk shows here, not after the rename
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)  # gone after the rename; left over after an error or Ctrl-C
    except OSError as error:
        message = _("{path} was not written: {reason}", path=target, reason=error)
        warnings.warn(message, NotWrittenWarning, stacklevel=2)
        return False
    return True


@contextmanager
def must_be_written() -> Iterator[None]:
    """A file that was asked for by name and cannot be written is an error, not a warning.

    Raises:
        InvalidInputError: :func:`write_atomically` warned.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error", NotWrittenWarning)
        try:
            yield
        except NotWrittenWarning as error:
            raise InvalidInputError(str(error)) from None
