"""Kernels of torch's higher-order operators under a trace's mode."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def kernel_under(operator: Any, mode: type, kernel: Callable[..., Any]) -> Iterator[None]:
    """Inside the block, a higher-order operator that is called under a mode runs this kernel, under that mode too.

    Args:
        operator: a ``HigherOrderOperator``.
        mode: class of the mode.
        kernel: is called with the operator's arguments.
    """

    def called(active: Any, *args: Any, **kwargs: Any) -> Any:
        with active:
            return kernel(*args, **kwargs)

    operator.python_key_table[mode] = called
    try:
        yield
    finally:
        del operator.python_key_table[mode]
