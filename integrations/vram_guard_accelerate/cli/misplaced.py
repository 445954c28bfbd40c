"""Options of the guard that stand behind a script's name, and so are handed to the script."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from vram_guard.errors import NoDeviceError
from vram_guard.language import _


@contextlib.contextmanager
def misplaced_said(arguments: Sequence[str]) -> Iterator[None]:
    """Where nothing says what to plan for inside the block, say so of what says it behind the script's name.

    Args:
        arguments: the script's own.

    Raises:
        NoDeviceError: the one that was raised, with a sentence about the first such option.
    """
    try:
        yield
    except NoDeviceError as error:
        behind = next((word for word in arguments if word.partition("=")[0] in ("--budget", "--gpu")), None)
        if behind is None:
            raise
        said = _(
            "{option} stands behind the script's name, and is handed to the script: for vram-guard it has to stand "
            "before that name",
            option=behind.partition("=")[0],
        )
        raise NoDeviceError(_("{problem} {remark}", problem=error, remark=said), error.problem) from None
