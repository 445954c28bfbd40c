"""Room for calls within calls, so that a call deep down takes no memory from the system and gives none back.

Python keeps the frames of functions in chunks of 16 KiB. From 3.11 until the latest releases of 3.13 and 3.14, a call
that does not fit into the chunk maps another one, and its return unmaps it (`CPython issue 142183
<https://github.com/python/cpython/issues/142183>`_): a loop that stands just before the end of a chunk pays two system
calls and a page fault for every function that it calls, up to sixty times the call itself. Traces and proofs call
deeply, through hooks, dispatch modes and wrapped forwards.

A chunk is made as large as the frame that needs it: what a function with a large frame calls finds room there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

#: Values in the frame. Its chunk has 1 MiB then, of which no page is used before something is written there, and half
#: is left for what is called: more frames than the interpreter lets there be by itself.
_VALUES = 65536


def with_room(work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """Call a function that calls deeply.

    Example:
        >>> with_room(max, 1, 2)
        2
    """
    call: Any = _call
    if sys.version_info >= (3, 11):  # frames are objects of their own before
        call = FunctionType(_call.__code__.replace(co_stacksize=_VALUES), globals())
    result: T = call(work, arguments, named)
    return result


def _call(work: Callable[..., T], arguments: tuple[Any, ...], named: dict[str, Any]) -> T:
    return work(*arguments, **named)
