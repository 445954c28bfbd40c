"""What a script hands to nobody: found among all objects of the process."""

from __future__ import annotations

import gc
from typing import Any


def alive(*kinds: type) -> list[Any]:
    """All objects of these classes and of those derived from them, but for what was there before the script began.

    Args:
        kinds: classes whose objects the collector tracks, as all of Python's own.
    """
    objects = gc.get_objects()
    # Objects whose class only says that it is another one (mocks, lazy proxies) are not what it says.
    classes = {one for one in set(map(type, objects)) if issubclass(one, kinds)}
    return [thing for thing in objects if type(thing) in classes]
