"""Ranks that are copies of one process, which has imported everything once."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable


def exit_codes(ranks: int, work: Callable[[int], object]) -> list[int]:
    """Of so many copies of this process, each of which did the work of its rank, and nothing else."""
    children = []
    for rank in range(ranks):
        child = os.fork()
        if not child:
            code = 1
            try:
                work(rank)
                code = 0
            except Exception:  # noqa: BLE001 - said here: the process ends without Python's own words
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
