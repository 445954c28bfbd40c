"""A copy that waits: it is copied again for every task, and gone with its original."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from collections.abc import Iterator

import pytest

pytest.importorskip("accelerate")
if sys.platform == "win32":
    pytest.skip("a dry run copies its process (fork)", allow_module_level=True)

from vram_guard.errors import EndedCopyError, LostCopyError, UnsupportedStepError
from vram_guard.forks.ended import EndedOnceError
from vram_guard_accelerate.dry_run import forks
from vram_guard_accelerate.dry_run._fork_server import ForkServer
from vram_guard_accelerate.dry_run.forks import ForkEntered

WATCHDOG = 200  # seconds; an answer that is there comes at once


def waiting(seen: list[str]) -> ForkServer:
    """A server whose copies do what their task says."""
    try:
        return ForkServer()
    except ForkEntered as copy:
        name, value = copy.task
        if name == "die":
            os._exit(3)
        if name == "wait":
            threading.Event().wait()  # until it is ended
        copy.parent.send((name, random.random() if name == "draw" else value, seen, os.getpid()))


@pytest.fixture
def server() -> Iterator[ForkServer]:
    made = waiting(["before"])
    yield made
    made.end()
    assert not forks.running


def test_copies_begin_where_it_waits_and_answer_in_any_order(server: ForkServer) -> None:
    one, two = server.fork(("one", 1)), server.fork(("two", list(range(100_000))))
    name, value, seen, process = two.answer(WATCHDOG)
    assert (name, len(value), seen) == ("two", 100_000, ["before"])
    assert one.answer(WATCHDOG)[:2] == ("one", 1)
    assert process not in (os.getpid(), 0)
    assert list(forks.running.values()) == [server]


def test_data_sets_draw_the_same_in_every_copy(server: ForkServer) -> None:
    drawn = [server.fork(("draw", 0)).answer(WATCHDOG)[1] for _ in range(2)]
    assert drawn == [random.random()] * 2  # Python seeds its generator anew after a fork


def test_a_copy_that_dies_or_takes_too_long_is_said(server: ForkServer) -> None:
    with pytest.raises(UnsupportedStepError):
        server.fork(("die", 0)).answer(WATCHDOG)
    slow = server.fork(("wait", 0))
    with pytest.raises(UnsupportedStepError):
        slow.answer(0.2)
    assert server.fork(("still", "there")).answer(WATCHDOG)[0] == "still"


def test_a_server_that_is_gone_is_said(server: ForkServer) -> None:
    process = next(iter(forks.running)).process
    os.kill(process, signal.SIGKILL)
    os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
    with pytest.raises(EndedCopyError, match="was lost"):
        server.fork(("too", "late"))


def test_ending_all_ends_what_waits_too(server: ForkServer) -> None:
    slow = server.fork(("wait", 0))
    forks.end_all()
    with pytest.raises(EndedOnceError):
        slow.answer(WATCHDOG)


@pytest.mark.parametrize("may_be_silent", [False, True])
def test_an_answer_that_cannot_be_sent_is_an_error_with_its_reason(may_be_silent: bool) -> None:
    try:
        copy = forks.fork(None)
    except ForkEntered as entered:
        entered.parent.send(threading.Lock())
    with pytest.raises(LostCopyError, match="cannot pickle"):
        copy.answer(WATCHDOG, may_be_silent=may_be_silent)


def test_a_copy_whose_pipe_is_closed_ends_with_an_error_on_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    try:
        copy = forks.fork(None)
    except ForkEntered as entered:
        os.close(entered.parent.pipe)  # as a script that becomes a daemon does
        entered.parent.send("answer")
    with pytest.raises(LostCopyError, match="exit code 1"):
        copy.answer(WATCHDOG, may_be_silent=True)
    assert "Bad file descriptor" in capfd.readouterr().err


def test_a_copy_does_not_end_the_other_copies_of_its_original() -> None:
    def begin(task: str) -> forks.Fork:
        try:
            return forks.fork(task)
        except ForkEntered as copy:
            if copy.task == "ends all":
                forks.end_all()
            else:
                threading.Event().wait(0.5)  # the other one is made, and ends what it may, meanwhile
            copy.parent.send(copy.task)

    waits, ends = begin("waits"), begin("ends all")
    assert ends.answer(WATCHDOG) == "ends all"
    assert waits.answer(WATCHDOG) == "waits"
    assert not forks.running
