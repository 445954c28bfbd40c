"""Copies of a process, and the ways in which they end without an answer."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

import pytest

pytest.importorskip("accelerate")
if sys.platform == "win32":
    pytest.skip("a dry run copies its process (fork)", allow_module_level=True)

from vram_guard.errors import LostCopyError
from vram_guard.forks.fork import Copy
from vram_guard_accelerate.dry_run import forks
from vram_guard_accelerate.dry_run.forks import ForkEntered

WATCHDOG = 200  # seconds; an answer that is there comes at once


def test_an_answer_that_cannot_be_sent_is_an_error_with_its_reason() -> None:
    try:
        copy = forks.fork(None)
    except ForkEntered as entered:
        entered.parent.send(threading.Lock())
    with pytest.raises(LostCopyError, match="cannot pickle"):
        forks.answer_of(lambda: copy, "", WATCHDOG)


def test_a_copy_whose_pipe_is_closed_ends_with_an_error_on_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    try:
        copy = forks.fork(None)
    except ForkEntered as entered:
        os.close(entered.parent.home.pipe.fileno())  # as a script that becomes a daemon does
        entered.parent.send("answer")
    with pytest.raises(LostCopyError, match="exit code 1"):
        forks.answer_of(lambda: copy, "", WATCHDOG)
    assert "Bad file descriptor" in capfd.readouterr().err


def test_a_copy_does_not_end_the_other_copies_of_its_original() -> None:
    def begin(task: str) -> Copy[Any]:
        try:
            return forks.fork(task)
        except ForkEntered as copy:
            if copy.task == "ends all":
                forks.end_all()
            else:
                threading.Event().wait(0.5)  # the other one is made, and ends what it may, meanwhile
            copy.parent.send(copy.task)

    waits, ends = begin("waits"), begin("ends all")
    assert forks.answer_of(lambda: ends, "", WATCHDOG) == "ends all"
    assert forks.answer_of(lambda: waits, "", WATCHDOG) == "waits"
    assert not forks.running
