"""Files that are either whole or not there."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from vram_guard.errors import InvalidInputError
from vram_guard.language import _


def write_atomically(path: str | os.PathLike[str], content: bytes | str) -> None:
    """Write a file so that a reader sees the old one or the new one, never a part.

    The content goes to a temporary file next to it, which is then renamed: the last of two writers wins.
    Missing folders are made.

    Raises:
        InvalidInputError: it cannot be written (read-only folder, full disk).
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
        raise InvalidInputError(_("{path} was not written: {reason}", path=target, reason=error)) from error
