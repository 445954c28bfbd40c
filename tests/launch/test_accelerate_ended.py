"""Dry runs whose processes somebody else ends, and dry runs whose launcher is ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")

import accelerate_cases as cases

from vram_guard.cli import EXIT_NOT_KNOWN
from vram_guard.forks import hanging

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are looked at in /proc")

LAUNCH = (sys.executable, "-m", "vram_guard.cli", "launch")
ENDED = cases.HERE / "accelerate_scripts" / "ended.py"


def waiting_at(where: str) -> list[int]:
    """The processes that wait there."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "comm").read_text().strip() == f"waits {where}":
                found.append(int(process.name))
    return found


@contextlib.contextmanager
def killing(where: str, number: int, times: int, go_on: Path) -> Iterator[list[int]]:
    """Inside the block, so many processes that wait somewhere are ended, one after the other; the next one goes on."""
    done: list[int] = []
    over = threading.Event()

    def kill() -> None:
        while len(done) < times and not over.wait(0.05):
            for process in waiting_at(where):
                if process not in done:
                    os.kill(process, number)
                    done.append(process)
        go_on.touch()

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield done
    finally:
        over.set()
        thread.join()


def dry_run(cache: Path, *own: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*LAUNCH, *cases.ONE, "--dry-run", "--json", *own],
        env=cases.environment(VRAM_GUARD_CACHE=str(cache), **more),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def answer(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(("where", "number"), [("3", signal.SIGKILL), ("setup", signal.SIGTERM)])
def test_what_others_have_ended_is_tried_again_once_and_then_not_known(
    tmp_path: Path, where: str, number: signal.Signals
) -> None:
    launched, go_on = ("--budget", "1GiB", "--advanced", "whole_job=false", str(ENDED), where), tmp_path / "go on"
    with killing(where, number, 2, go_on) as killed:
        done = dry_run(tmp_path, *launched, GO_ON=str(go_on))
    assert (done.returncode, done.stdout, len(killed)) == (EXIT_NOT_KNOWN, "", 2), done.stderr
    assert f"signal {int(number)}" in done.stderr
    assert "not known" in done.stderr
    assert ("batches of 3 samples" in done.stderr) == (where == "3")
    go_on.unlink()
    with killing(where, number, 1, go_on) as killed:
        found = answer(dry_run(tmp_path, *launched, GO_ON=str(go_on)))
    assert len(killed) == 1
    assert "signal" not in json.dumps(found)


@pytest.mark.parametrize(("number", "where"), [(signal.SIGKILL, "3"), (signal.SIGQUIT, "setup"), (signal.SIGTERM, "3")])
def test_nothing_is_left_of_a_launcher_that_is_ended(tmp_path: Path, number: signal.Signals, where: str) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    launcher = subprocess.Popen(
        [*LAUNCH, *cases.ONE, "--dry-run", "--budget", "1GiB", str(ENDED), where, "program"],
        env=cases.environment(
            libraries=(), VRAM_GUARD_CACHE=str(tmp_path / "cache"), TMPDIR=str(temporary), GO_ON="never"
        ),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        until = time.monotonic() + 250
        while not waiting_at(where):
            assert launcher.poll() is None
            assert time.monotonic() < until
            time.sleep(0.1)
        below = [one for one in hanging.made_by(launcher.pid) if one != launcher.pid]
        assert sum(Path(f"/proc/{one}/comm").read_text() == "sleep\n" for one in below) == 2
        assert list(temporary.iterdir())
        launcher.send_signal(number)
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            launcher.wait(60)
        launcher.kill()
    until = time.monotonic() + 20
    while left := [one for one in below if (hanging._fields(one) or ["Z"])[0] != "Z"] + list(temporary.iterdir()):
        assert time.monotonic() < until, left
        time.sleep(0.05)
