"""What a script hands to nobody: found among all objects of the process."""

from __future__ import annotations

import gc
from typing import Any

_freeze = gc.freeze
_frozen_by_script = True
"""Whether the script has called ``gc.freeze``; taken to be so where it ran before it was followed."""


def freeze_before_script() -> None:
    """The collector and :func:`alive` no longer look at what is there, none of which is the script's."""
    global _frozen_by_script  # noqa: PLW0603 - the collector is one for the process
    _freeze()
    _frozen_by_script = False

    def freeze() -> None:
        global _frozen_by_script  # noqa: PLW0603
        _frozen_by_script = True
        _freeze()

    gc.freeze = freeze


def freeze_before_copying() -> None:
    """As ``gc.freeze``, and not by the script: a copy that looked through all objects would have all their memory."""
    _freeze()


def unfreeze_what_the_script_froze() -> None:
    """From here on, :func:`alive` finds that as well. It then looks at all that was imported, which takes longer."""
    if _frozen_by_script:
        gc.unfreeze()


def alive(*kinds: type) -> list[Any]:
    """All objects of these classes and of those derived from them, but for what was there before the script began.

    Args:
        kinds: classes whose objects the collector tracks, as all of Python's own.
    """
    objects = gc.get_objects()
    # Objects whose class only says that it is another one (mocks, lazy proxies) are not what it says.
    classes = {one for one in set(map(type, objects)) if issubclass(one, kinds)}
    return [thing for thing in objects if type(thing) in classes]
