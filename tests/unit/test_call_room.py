"""Functions that are called with room for what they call."""

from __future__ import annotations

import resource
from concurrent.futures import ThreadPoolExecutor

import pytest

from vram_guard.call_room import with_room

CALLS = 200


def called():
    """Called in a loop at some depth."""


def deep(levels):
    """A loop that calls a function, below this many calls."""
    if levels:
        return deep(levels - 1)
    for _time in range(CALLS):
        called()
    return levels


def page_faults(levels):
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    deep(levels)
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def most_page_faults():
    deep(700)
    return max(page_faults(levels) for levels in range(700))


def test_no_depth_takes_memory_for_every_call():
    """Without room there is a depth at which each call of Python 3.11 takes a page and gives it back."""
    with ThreadPoolExecutor(1) as thread:  # the calls that led here have room already, as those of every test
        assert thread.submit(with_room, most_page_faults).result() < CALLS / 2


def test_arguments_results_and_errors_pass():
    assert with_room(dict, [(1, 2)], a=3) == {1: 2, "a": 3}
    with pytest.raises(ValueError, match="'x'"):
        with_room(int, "x")
