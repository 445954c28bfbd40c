"""Work in a copy of the process: it comes home, and nothing else does."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vram_guard.errors import EndedCopyError, InvalidInputError, UnsupportedStepError
from vram_guard.forks import fork, hanging
from vram_guard.forks.exclusive import alone_in_process
from vram_guard.forks.fork import ForkRefusedError, run_in_fork
from vram_guard.forks.side_effects import BEST_WAY
from vram_guard.forks.waiting import WaitingCopy

pytestmark = pytest.mark.skipif(not fork.can_fork(), reason="copies of processes need Linux")


def test_generators_go_on_in_the_copy_where_they_are_in_the_original() -> None:
    def draws(_say: object = None) -> tuple[float, ...]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    draws()  # numpy makes its generator when it is first asked for
    assert run_in_fork(draws) == draws()


def test_a_result_and_progress_come_home() -> None:
    lines: list[str] = []

    def work(say: fork.Progress) -> dict[str, int]:
        say("one")
        say("two")
        return {"process": os.getpid()}

    assert run_in_fork(work, lines.append)["process"] != os.getpid()
    assert lines == ["one", "two"]


@pytest.mark.parametrize("error", [ValueError("too bad"), InvalidInputError("no such card"), KeyError("x")])
def test_an_error_comes_home_as_itself_with_its_traceback(error: Exception) -> None:
    def fails(_say: object) -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        run_in_fork(fails)
    assert str(caught.value) == str(error)
    assert "in fails" in str(caught.value.__cause__)


def test_nothing_of_the_process_changes() -> None:
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    own = torch.Generator().manual_seed(3)
    shared, flag = multiprocessing.Value("i", 5), torch.zeros(3).share_memory_()
    states = torch.get_rng_state(), random.getstate(), own.get_state()
    kept = [1, 2]

    def work(_say: object) -> int:
        torch.rand(3), np.random.rand(), random.random(), torch.rand(2, generator=own)
        kept.append(3)
        shared.value += 1
        flag.add_(1)
        return int(shared.value)

    assert run_in_fork(work) == 6
    assert shared.value == 5
    assert flag.tolist() == [0, 0, 0]
    assert kept == [1, 2]
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert torch.equal(states[2], own.get_state())
    assert shared.get_lock().acquire(timeout=1)  # type: ignore[call-arg]


def test_files_that_the_copy_writes_stay_as_they_are(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text("first\n")
    new, folder, saved = tmp_path / "new.txt", tmp_path / "folder", tmp_path / "weights.pt"
    with log.open("a") as opened, (tmp_path / "both").open("w+") as both:
        both.write("abc")
        both.flush()

        def work(_say: object) -> tuple[str, str, int, int]:
            opened.write("second\n")
            opened.flush()
            both.write("def")
            both.flush()
            with log.open("a") as again:
                again.write("third\n")
            new.write_text("new")
            folder.mkdir()
            torch.save(torch.arange(4), saved)
            descriptor = os.open(tmp_path / "low", os.O_WRONLY | os.O_CREAT)
            os.write(descriptor, b"x")
            np.save(folder / "array.npy", np.arange(3))
            loaded = int(torch.load(saved, weights_only=True).sum())
            read = log.read_text(), new.read_text(), loaded, int(np.load(folder / "array.npy").sum())
            log.unlink()
            return read

        assert run_in_fork(work) == ("first\nthird\n", "new", 6, 3)
    assert log.read_text() == "first\n"
    assert (tmp_path / "both").read_text() == "abc"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["both", "log.txt"]


def test_a_copy_that_waits_answers_more_than_once_and_raises_what_the_work_raises() -> None:
    seen = [1]

    def divided(by: int) -> int:
        seen.append(by)
        return 6 // by + len(seen)

    waiting = WaitingCopy(divided)
    seen.append(2)  # after the copy was made
    assert waiting(2) == 5
    with pytest.raises(ZeroDivisionError):
        waiting(0)
    assert waiting(3) == 4  # each argument meets the copy as it was made
    assert seen == [1, 2]


def test_without_an_overlay_a_database_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BEST_WAY, "python")
    with pytest.raises(UnsupportedStepError, match=r"runs\.db"):
        run_in_fork(lambda _say: sqlite3.connect(tmp_path / "runs.db"))
    assert not (tmp_path / "runs.db").exists()


def test_connections_of_the_original_are_dead_in_the_copy() -> None:
    ours, theirs = socket.socketpair()
    reading, writing = os.pipe()
    try:

        def work(_say: object) -> tuple[bytes, bytes]:
            os.write(writing, b"lost")
            with pytest.raises(OSError, match="pipe"):
                ours.send(b"lost too")
            return ours.recv(4), os.read(reading, 4)

        assert run_in_fork(work) == (b"", b"")
        ours.send(b"mine")
        assert theirs.recv(100) == b"mine"
    finally:
        ours.close()
        theirs.close()
        os.close(writing)
        assert os.read(reading, 10) == b""
        os.close(reading)


def test_a_copy_that_dies_is_reported() -> None:
    with pytest.raises(UnsupportedStepError, match="exit code 7"):
        run_in_fork(lambda _say: os._exit(7))
    with pytest.raises(UnsupportedStepError, match="exit code 3"):
        run_in_fork(lambda _say: sys.exit(3))


@pytest.mark.parametrize(("number", "times"), [(signal.SIGKILL, 1), (signal.SIGTERM, 2)])
def test_a_copy_that_is_ended_from_outside_is_tried_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, times: int
) -> None:
    """Whatever caught the error in between: an outer copy, too, has no answer without it."""
    monkeypatch.setenv(BEST_WAY, "python")  # what the program writes is counted
    counted = tmp_path / "counted"
    counted.touch()

    def killed(_say: object) -> str:
        killer = f"import os, sys; open(sys.argv[1], 'a').write('.'); os.kill(int(sys.argv[2]), {int(number)})"
        if counted.stat().st_size < times:
            subprocess.run([sys.executable, "-c", killer, str(counted), str(os.getpid())], check=True)
            time.sleep(60)
        return "done"

    def outer(_say: object) -> str:
        with contextlib.suppress(Exception):
            return run_in_fork(killed)
        return "a property of the script"

    if times == 1:
        assert run_in_fork(outer) == "done"
    else:
        with pytest.raises(EndedCopyError, match=f"signal {int(number)}.*not known"):
            run_in_fork(outer)
        counted.write_text("")
        with pytest.raises(EndedCopyError):
            run_in_fork(killed)
    assert run_in_fork(outer) == "done"  # nothing is left of it


def _reap_all(*_signal: object) -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


@pytest.mark.parametrize("handler", [signal.SIG_IGN, _reap_all])
def test_who_else_waits_for_children_disturbs_no_copy(handler: Any) -> None:
    before = signal.signal(signal.SIGCHLD, handler)
    try:
        assert run_in_fork(lambda _say: "done") == "done"
        waiting = WaitingCopy(lambda number: number + 1)
        assert waiting(1) == 2
        with pytest.raises(EndedCopyError):
            run_in_fork(lambda _say: os.kill(os.getpid(), signal.SIGKILL))
    finally:
        signal.signal(signal.SIGCHLD, before)


MANY = """
import os, subprocess, sys, threading, time
from vram_guard.forks.fork import begin_in_fork, run_in_fork
from vram_guard.forks.waiting import WaitingCopy

def program(**how):
    return subprocess.Popen(["sleep", "1000"], **how).pid

def work(say):
    say(f"{os.getpid()} {program()} {program(start_new_session=True)} {program(preexec_fn=os.setsid)}")
    run_in_fork(lambda inner: [inner(f"{os.getpid()} {program()}"), time.sleep(1000)], say)

waiting = WaitingCopy(work)
side = begin_in_fork(lambda say: time.sleep(1000))
print(side._process.process, flush=True)
other = threading.Thread(target=lambda: begin_in_fork(lambda say: time.sleep(1000)))
other.start(); other.join()
run_in_fork(work, lambda line: print(line, flush=True))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_copy_and_no_program_of_one_outlives_the_original(number: int) -> None:
    original = subprocess.Popen([sys.executable, "-c", MANY], stdout=subprocess.PIPE, text=True)
    assert original.stdout is not None
    with original.stdout:
        lines = [original.stdout.readline() for _line in range(3)]
    below = [one for one in hanging.made_by(original.pid) if one != original.pid]
    assert len(below) >= 9, lines  # five copies and four programs
    original.send_signal(number)
    original.wait()
    until = time.monotonic() + 20
    while left := [one for one in below if (hanging._fields(one) or ["Z"])[0] != "Z"]:
        assert time.monotonic() < until, left
        time.sleep(0.05)


def test_a_fatal_error_says_where_it_was(request: pytest.FixtureRequest) -> None:
    def work_that_dies(_say: object) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)

    before = signal.signal(
        signal.SIGSEGV, signal.SIG_DFL
    )  # as a library's handler in place of an enabled faulthandler's
    request.addfinalizer(lambda: signal.signal(signal.SIGSEGV, before))
    with pytest.raises(
        UnsupportedStepError, match=r"signal 11; it was at .*test_forks\.py:\d+, in work_that_dies"
    ) as caught:
        run_in_fork(work_that_dies)
    assert "in run_in_fork" in str(caught.value.__cause__)


def test_a_copy_that_hangs_is_ended_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hanging, "IDLE_SECONDS", 2.0)
    monkeypatch.setattr(fork, "LOOK_SECONDS", 0.05)
    lock = threading.Lock()
    seen: list[str] = []

    def work(say: fork.Progress) -> None:
        say(str(os.getpid()))
        lock.acquire()

    with lock, pytest.raises(UnsupportedStepError, match=r"did not answer .*it was at .*test_forks\.py:\d+, in work"):
        run_in_fork(work, seen.append)
    with pytest.raises(ProcessLookupError):
        os.kill(int(seen[0]), 0)


def test_a_copy_that_works_without_a_word_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hanging, "IDLE_SECONDS", 0.3)
    monkeypatch.setattr(fork, "LOOK_SECONDS", 0.05)

    def work(_say: object) -> str:
        until = time.process_time() + 1.0
        while time.process_time() < until:
            pass
        return "done"

    assert run_in_fork(work) == "done"


@pytest.mark.parametrize(
    "words", ["Cannot re-initialize CUDA in forked subprocess. To use CUDA ...", "CUDA error: initialization error\n"]
)
def test_what_a_used_gpu_forbids_in_a_copy_is_told_apart(words: str) -> None:
    def work(_say: object) -> None:
        raise RuntimeError(words)

    with pytest.raises(ForkRefusedError):
        run_in_fork(work)


def test_other_threads_wait_and_one_thread_does_not_nest() -> None:
    with alone_in_process():
        with pytest.raises(UnsupportedStepError), alone_in_process():
            pass
        found: list[int] = []
        thread = threading.Thread(target=lambda: found.append(run_in_fork(lambda _say: 1)))
        thread.start()
        thread.join(0.3)
        assert not found
    thread.join()
    assert found == [1]


ON_A_GPU_MACHINE = """
import pretended_gpu
import torch
from lightning import pytorch as lightning
from torch.utils.data import DataLoader, TensorDataset
from vram_guard.forks.fork import run_in_fork
from vram_guard_lightning import VramGuard

def train(_say):
    weight = torch.ones((), requires_grad=True)
    (3 * weight).backward()
    return float(weight.grad)

print(run_in_fork(lambda say: (train(say), run_in_fork(train))))

class Deep(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(8)))

    def training_step(self, batch):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())

guard = VramGuard(budget="26MiB", margin=0, allow="accumulate", advanced={"remember": False, "whole_job": False})
lightning.Trainer(accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False, callbacks=[guard]).fit(
    Deep(), DataLoader(TensorDataset(torch.rand(2048, 128)), batch_size=1024)
)
"""


def test_on_a_machine_with_a_gpu_copies_and_their_copies_run_backward_passes_and_plans_are_made() -> None:
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ON_A_GPU_MACHINE],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "(3.0, 3.0)"
    assert "2 micro-batches of 512" in done.stdout


ON_A_GPU = """
import torch
from vram_guard.forks.fork import run_in_fork
weight = torch.nn.Parameter(torch.arange(6.0, device="cuda").view(2, 3))
def work(_say):
    (weight * weight).sum().backward()
    return weight.device.type, float(weight.grad.sum())
print(run_in_fork(work), weight.device.type)
"""


@pytest.mark.gpu
def test_values_on_a_real_gpu_are_read_in_the_copy() -> None:
    """In a process of its own: one that has run a backward pass on a GPU cannot be copied."""
    done = subprocess.run([sys.executable, "-c", ON_A_GPU], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split("\n")[0] == "('cpu', 30.0) cuda", done.stderr
