"""Copies of a process, and the ways in which they end without an answer."""

from __future__ import annotations

import os
import sys
import threading

import pytest

pytest.importorskip("accelerate")
if sys.platform == "win32":
    pytest.skip("a dry run copies its process (fork)", allow_module_level=True)

from vram_guard.errors import LostCopyError
from vram_guard.forks.fork import answer_of
from vram_guard_accelerate.dry_run import forks
from vram_guard_accelerate.dry_run.forks import ForkEntered

WATCHDOG = 200  # seconds; an answer that is there comes at once


def test_an_answer_that_cannot_be_sent_is_an_error_with_its_reason() -> None:
    try:
        copy = forks.fork(None)
    except ForkEntered as entered:
        entered.parent.send(threading.Lock())
    with pytest.raises(LostCopyError, match="cannot pickle"):
        answer_of(lambda: copy, "", WATCHDOG)


def test_a_copy_whose_pipe_is_closed_ends_with_an_error_on_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    try:
        copy = forks.fork(None)
    except ForkEntered as entered:
        os.close(entered.parent.home.pipe.fileno())  # as a script that becomes a daemon does
        entered.parent.send("answer")
    with pytest.raises(LostCopyError, match="exit code 1"):
        answer_of(lambda: copy, "", WATCHDOG)
    assert "Bad file descriptor" in capfd.readouterr().err
