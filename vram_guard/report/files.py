"""Files that are either whole or not there, and whose loss never costs the result."""

from __future__ import annotations

import os
import secrets
import warnings
from pathlib import Path


class NotWrittenWarning(UserWarning):
    """A report could not be written (read-only folder, full disk); what it reports still holds."""


def write_atomically(path: str | os.PathLike[str], content: bytes | str) -> bool:
    """Write a file so that a reader sees the old one or the new one, never a part.

    The content goes to a temporary file beside it, which is then renamed: the last of two writers wins.
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
        warnings.warn(f"{target} was not written: {error}", NotWrittenWarning, stacklevel=2)
        return False
    return True
