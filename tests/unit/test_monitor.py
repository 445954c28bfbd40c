"""Watching GPUs: a made-up NVML (a driver cannot be here), real processes."""

# ruff: noqa: N802 - NVML names its functions so

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from each import each
from pretended_nvml import GIB, NOT_SUPPORTED, Card, Library

from vram_guard import cli
from vram_guard.budget import Budget, nvml
from vram_guard.budget.sampling import GpuProcess, GpuSample, nvml_sampler
from vram_guard.guard.guard import Guard
from vram_guard.guard.settings import GuardSettings
from vram_guard.watch.monitor import GpuSummary, watch
from vram_guard.watch.running import running as trainings
from vram_guard.watch.running import running_here

WATCHDOG = 200  # seconds; only a test in which nothing happens at all takes so long


class Busy(Library):
    """A library whose GPUs work: utilisation and memory change with every look."""

    def __init__(self, *cards: Card, shares: tuple[int, ...] = (10, 90), fails_after: int = 10**9, **more: Any) -> None:
        super().__init__(*cards, **more)
        self.shares, self.fails_after, self.looks = itertools.cycle(shares), fails_after, 0

    def nvmlDeviceGetUtilizationRates(self, card: Card) -> Any:
        self.looks += 1
        if card.parent is not None:
            raise pynvml.NVMLError(NOT_SUPPORTED)
        if self.looks > self.fails_after:
            raise pynvml.NVMLError(15)  # the GPU is lost
        return SimpleNamespace(gpu=next(self.shares), memory=1)


def card(**more: Any) -> Card:
    """4 of 24 GiB in use."""
    return Card(**{"total": 24 * GIB, "free": 20 * GIB, **more})


def trainer_process(bytes_held: int | None = 4 * GIB) -> Any:
    return SimpleNamespace(pid=4242, usedGpuMemory=bytes_held)


@pytest.fixture
def machine(monkeypatch):
    """Puts made-up GPUs into this machine."""

    def build(*cards, **library):
        made = Busy(*cards, **library)
        monkeypatch.setattr(nvml, "load_library", lambda: made)
        return made

    for variable in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(variable, raising=False)
    return build


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """Twenty moments a second."""
    monkeypatch.setattr("vram_guard.watch.monitor.INTERVAL", 0.05)


# --- one moment ---


def test_a_moment_of_every_gpu_and_process(machine):
    first = card(processes=[trainer_process(), SimpleNamespace(pid=7, usedGpuMemory=None)])
    machine(first, card(name="NVIDIA A100", uuid="GPU-b"), names={4242: "/usr/bin/python3 train.py"})
    with nvml_sampler() as sampler:
        one, other = sampler()
    assert (one.gpu, one.utilization, one.used, one.total) == ("0", 0.1, 4 * GIB, 24 * GIB)
    assert one.processes == (GpuProcess(4242, "python3", 4 * GIB), GpuProcess(7, "unknown program", None))
    assert (other.gpu, other.name, other.processes) == ("1", "NVIDIA A100", ())


def test_mig_slices_are_watched_one_by_one(machine):
    whole = card()
    whole.slices = [
        card(name="MIG 1g.10gb", uuid=f"MIG-{n}", parent=whole, total=10 * GIB, free=9 * GIB) for n in (0, 1)
    ]
    machine(whole, card())
    with nvml_sampler() as sampler:
        found = sampler()
    assert [sample.gpu for sample in found] == ["0:0", "0:1", "1"]
    assert found[0].utilization is None
    assert found[0].used == GIB


def test_what_an_old_driver_does_not_tell_is_left_out(machine):
    machine(card(processes=[trainer_process()]), fails={"nvmlDeviceGetUtilizationRates": NOT_SUPPORTED})
    with nvml_sampler() as sampler:
        (found,) = sampler()
    assert found.utilization is None
    assert found.processes[0].bytes == 4 * GIB


def test_a_gpu_without_memory_of_its_own_shares_the_hosts(machine):
    machine(card(memory_error=NOT_SUPPORTED))
    with nvml_sampler() as sampler:
        (found,) = sampler()
    assert 0 < found.used < found.total


# --- a stretch of time ---


def sample(share: float | None, used: int, *processes: GpuProcess) -> GpuSample:
    return GpuSample("0", "card", share, used, 100, processes)


def test_means_and_peaks():
    one = GpuSummary("0", "card", 100)
    one.add(sample(0.2, 10, GpuProcess(1, "a", 5)))
    one.add(sample(0.8, 60, GpuProcess(1, "a", 50), GpuProcess(2, "b", None)))
    one.add(sample(None, 20, GpuProcess(1, "a", 10)))
    assert (one.samples, one.utilization_mean, one.utilization_peak) == (3, 0.5, 0.8)
    assert (one.used_mean, one.used_peak) == (30, 60)
    assert [(process.pid, process.bytes) for process in one.processes.values()] == [(1, 50), (2, None)]


class Clock(threading.Event):
    """A clock that stands still but for waiting, as the module ``time`` and as the event that is waited on."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def wait(self, timeout: float | None = None) -> bool:
        self.now += timeout
        return False


def test_watching_keeps_its_time_whatever_a_look_takes(machine, monkeypatch):
    clock = Clock()
    monkeypatch.setattr("vram_guard.watch.monitor.time", clock)
    monkeypatch.setattr("vram_guard.watch.monitor.INTERVAL", 0.1)
    machine(card())
    told = []

    def tell(seconds: float, _moment: tuple[GpuSample, ...]) -> None:
        told.append(seconds)
        clock.now += 0.02

    watch(seconds=0.5, tell=tell, stop=clock)
    assert clock.now == pytest.approx(1000.5)
    assert told == pytest.approx([0, 0.1, 0.2, 0.3, 0.4])
    monkeypatch.setattr("vram_guard.watch.monitor.INTERVAL", 60)
    watch(seconds=0.03, tell=tell, stop=clock)  # at least once, and no longer than asked for
    assert len(told) == 6
    assert clock.now == pytest.approx(1000.53)


# --- the command ---


def test_summary_for_people(machine, capsys):
    machine(card(processes=[trainer_process()]), names={4242: "python"})
    assert cli.main(["monitor", "0.1"]) == 0
    captured = capsys.readouterr()
    live, _, summary = captured.out.partition("\nSummary of ")
    assert "utilisation  10%" in live
    assert "utilisation  90%" in live
    assert "17% (4.00 GiB / 24.00 GiB)" in live
    assert "utilisation mean 50%, peak 90%" in summary
    assert "4242 python: peak 4.00 GiB\n" in summary
    assert "is often idle" in summary
    assert captured.err == ""


def test_summary_for_programs_leaves_stdout_to_the_answer(machine, capsys):
    machine(card(processes=[trainer_process()]), card(uuid="GPU-2"))
    assert cli.main(["monitor", "0.1", "--json"]) == 0
    captured = capsys.readouterr()
    answer = json.loads(captured.out)
    assert answer["kind"] == "monitor"
    gpu = answer["gpus"][1]
    assert gpu["gpu"] == "1"
    assert gpu["memory_total_bytes"] == 24 * GIB
    assert "GPU 1" in captured.err


@each("arguments", [["-1"], ["nan"]])
def test_nonsense_is_refused_before_anything_is_watched(machine, capsys, arguments):
    machine(card())
    try:
        code = cli.main(["monitor", *arguments])
    except SystemExit as ended:  # argparse's own
        code = ended.code
    assert code == 2
    assert "Summary" not in capsys.readouterr().out


def test_no_gpu_at_all_is_said_with_exit_code_3(machine, capsys):
    machine(fails={"nvmlInit": 12})
    assert cli.main(["monitor", "1"]) == 3
    assert "cannot be watched" in capsys.readouterr().err


def test_a_driver_that_dies_still_leaves_a_summary(machine, capsys):
    machine(card(), fails_after=2)
    assert cli.main(["monitor", "5"]) == 3
    captured = capsys.readouterr()
    assert "Summary of 2 samples" in captured.out
    assert "the GPU has fallen off the bus" in captured.err


FAKE = """
from types import SimpleNamespace
class NVMLError(Exception):
    value = 0
def nvmlInit(): pass
def nvmlShutdown(): pass
def nvmlDeviceGetCount(): return 1
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetName(handle): return b"Made-up card"
def nvmlDeviceGetMemoryInfo(handle): return SimpleNamespace(total=100 << 30, free=25 << 30, used=75 << 30)
def nvmlDeviceGetUtilizationRates(handle): return SimpleNamespace(gpu=42)
"""


@contextmanager
def running(tmp_path: Path):
    """The real command in a process of its own, with a made-up pynvml before the real one on its path."""
    (tmp_path / "pynvml.py").write_text(FAKE)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "vram_guard.cli", "monitor"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_with_the_summary(tmp_path, number):
    with running(tmp_path) as process:
        line = process.stdout.readline()
        assert "utilisation  42% | memory  75%" in line
        process.send_signal(number)
        out, err = process.communicate(timeout=WATCHDOG)
        assert "Summary of " in out
        assert "mean 42%, peak 42%" in out
        assert err == ""
        assert process.returncode == 0


@pytest.fixture
def told(tmp_path, monkeypatch):
    """This process's training, as it tells those who watch."""
    monkeypatch.setenv("VRAM_GUARD_CACHE", str(tmp_path))
    own = running_here(3 * GIB, GIB // 2)
    yield own
    own.forget()


def test_predicted_stands_beside_measured_in_the_summary(machine, capsys, told):
    machine(card(processes=[SimpleNamespace(pid=os.getpid(), usedGpuMemory=4 * GIB)]))
    assert cli.main(["monitor", "0.05", "--json"]) == 0
    (process,) = json.loads(capsys.readouterr().out)["gpus"][0]["processes"]
    assert (process["memory_peak_bytes"], process["predicted_bytes"]) == (4 * GIB, 3 * GIB + GIB // 2)
    assert cli.main(["monitor", "0.05"]) == 0
    said = capsys.readouterr().out
    assert "peak 4.00 GiB, 3.50 GiB predicted" in said


def test_a_process_that_is_gone_or_another_of_its_number_is_left_out(told, tmp_path):
    assert set(trainings()) == {os.getpid()}
    path = tmp_path / "running" / f"{os.getpid()}.json"
    facts = json.loads(path.read_text())
    for changed in ({"started": "1"}, {"predicted": "1"}, {"more": 1}):
        path.write_text(json.dumps({**facts, **changed}))
        assert trainings() == {}
    path.write_text("[")
    assert trainings() == {}


def test_a_guarded_training_tells_who_watches(tmp_path, monkeypatch):
    monkeypatch.setenv("VRAM_GUARD_CACHE", str(tmp_path))
    guard = Guard(SimpleNamespace(why_left_alone=lambda: ""), GuardSettings())
    estimate, budget = SimpleNamespace(peak_reserved=3 * GIB), Budget.of("RTX 4090")
    plan = SimpleNamespace(before=estimate, estimate=estimate, budget=budget, fits=True, changed=False)
    guard.decision = SimpleNamespace(plan=plan)
    guard.first_steps = SimpleNamespace(start=lambda: 0)
    guard.training_starts()
    (told,) = trainings().values()
    assert told.expected == 3 * GIB + budget.context > 3 * GIB
    guard.applied.close()
    assert trainings() == {}
