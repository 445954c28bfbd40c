"""Watching GPUs: a made-up NVML (a driver cannot be here), real threads, real processes, a real Trainer."""

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
import torch
from each import each
from pretended_nvml import GIB, NOT_SUPPORTED, Card, Library

from vram_guard import cli
from vram_guard.budget import Budget, nvml
from vram_guard.budget.sampling import GpuSample, ProcessSample, nvml_sampler
from vram_guard.errors import InvalidInputError, NoDeviceError
from vram_guard.guard.guard import Guard
from vram_guard.guard.settings import GuardSettings
from vram_guard.watch.monitor import BackgroundMonitor, Monitor, checked_interval, device_sampler, watch
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

    def nvmlDeviceGetProcessUtilization(self, card: Card, since: int) -> Any:
        if card.parent is not None:
            raise pynvml.NVMLError(NOT_SUPPORTED)
        moments = [SimpleNamespace(pid=4242, timeStamp=since + n, smUtil=20 * n) for n in (2, 1)]
        return moments if since < 6 else []


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


# --- one moment ---


def test_a_moment_of_every_gpu_and_process(machine):
    first = card(processes=[trainer_process(), SimpleNamespace(pid=7, usedGpuMemory=None)])
    machine(first, card(name="NVIDIA A100", uuid="GPU-b"), names={4242: "/usr/bin/python3 train.py"})
    with nvml_sampler() as sampler:
        one, other = sampler()
        again = [sampler()[0] for _ in range(4)]
    assert (one.gpu, one.utilization, one.used, one.total) == ("0", 0.1, 4 * GIB, 24 * GIB)
    assert one.processes == (
        ProcessSample(4242, "python3", 4 * GIB, 0.4),
        ProcessSample(7, "unknown program", None, None),
    )
    assert (other.gpu, other.name, other.processes) == ("1", "NVIDIA A100", ())
    assert again[-1].processes[0].utilization is None  # nothing new since the last look


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
    cannot = dict.fromkeys(("nvmlDeviceGetUtilizationRates", "nvmlDeviceGetProcessUtilization"), NOT_SUPPORTED)
    machine(card(processes=[trainer_process()]), fails=cannot)
    with nvml_sampler() as sampler:
        (found,) = sampler()
    assert found.utilization is None
    assert found.processes[0].utilization is None
    assert found.processes[0].bytes == 4 * GIB


def test_a_gpu_without_memory_of_its_own_shares_the_hosts(machine):
    machine(card(memory_error=NOT_SUPPORTED))
    with nvml_sampler() as sampler:
        (found,) = sampler()
    assert 0 < found.used < found.total


def test_the_device_of_a_training_is_found_by_cudas_number(machine, monkeypatch):

    machine(card(uuid="GPU-a"), card(uuid="GPU-b", free=GIB, bus="00000000:02:00.0"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with device_sampler(torch.device("cuda", 0)) as sampler:
        assert sampler()[0].used == 23 * GIB
    with pytest.raises(NoDeviceError), device_sampler(torch.device("cpu")):
        pass
    machine(card(), fails={"nvmlInit": 12})
    with pytest.raises(NoDeviceError), device_sampler(torch.device("cuda", 0)):
        pass


# --- a stretch of time ---


def sample(share: float | None, used: int, *processes: ProcessSample) -> GpuSample:
    return GpuSample("0", "card", share, used, 100, processes)


def test_means_and_peaks():
    monitor = Monitor()
    monitor.add((sample(0.2, 10, ProcessSample(1, "a", 5, 0.5)),))
    monitor.add((sample(0.8, 60, ProcessSample(1, "a", 50, None), ProcessSample(2, "b", None, None)),))
    monitor.add((sample(None, 20, ProcessSample(1, "a", 10, 0.1)),))
    (one,) = monitor.summary()
    assert (one.samples, one.utilization_mean, one.utilization_peak) == (3, 0.5, 0.8)
    assert (one.used_mean, one.used_peak) == (30, 60)
    assert [(p.pid, p.peak) for p in one.processes] == [(1, 50), (2, None)]
    assert one.processes[0].utilization_mean == pytest.approx(0.3)
    assert "mean 50%, peak 80%" in one.words()
    assert one.metrics()["gpu_memory_peak_bytes"] == 60


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


def test_watching_keeps_its_time_whatever_a_look_takes(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("vram_guard.watch.monitor.time", clock)

    def slow() -> tuple[GpuSample, ...]:
        clock.now += 0.02
        return (sample(0.5, 10),)

    monitor, told = Monitor(), []
    watch(slow, monitor, seconds=0.5, interval=0.1, tell=lambda seconds, _moment: told.append(seconds), stop=clock)
    assert clock.now == pytest.approx(1000.5)
    assert told == pytest.approx([0, 0.1, 0.2, 0.3, 0.4])
    assert monitor.count == 5
    watch(slow, monitor, seconds=0.01, interval=60, stop=clock)  # at least once, and no longer than asked for
    assert monitor.count == 6
    assert clock.now == pytest.approx(1000.52)


@each("interval", [0, -1, 0.01, float("nan"), float("inf"), "1", True, None])
def test_intervals_that_make_no_sense(interval):
    with pytest.raises(InvalidInputError, match="interval"):
        checked_interval(interval)


def test_a_thread_of_its_own(machine):
    machine(card(processes=[trainer_process()]))
    looks, enough = itertools.count(), threading.Event()

    @contextmanager
    def source():
        with nvml_sampler() as sampler:

            def look() -> tuple[GpuSample, ...]:
                if next(looks) == 3:  # three moments have been added up
                    enough.set()
                return sampler()

            yield look

    background = BackgroundMonitor(source, 0.05)
    assert background.latest() == ()
    background.start()
    background.start()
    assert enough.wait(WATCHDOG)
    (one,) = background.stop()
    assert one.samples >= 3
    assert one.utilization_peak == 0.9
    assert background.error is None
    assert background.latest()[0].name == one.name


# --- the command ---


def test_summary_for_people(machine, capsys):
    machine(card(processes=[trainer_process()]), names={4242: "python"})
    assert cli.main(["monitor", "0.1", "--interval", "0.05"]) == 0
    captured = capsys.readouterr()
    live, _, summary = captured.out.partition("\nSummary of ")
    assert "utilisation  10%" in live
    assert "utilisation  90%" in live
    assert "17% (4.00 GiB / 24.00 GiB)" in live
    assert "utilisation mean 50%, peak 90%" in summary
    assert "4242 python: peak 4.00 GiB, utilisation " in summary
    assert "is often idle and has memory left" in summary
    assert captured.err == ""


def test_summary_for_programs_leaves_stdout_to_the_answer(machine, capsys):
    machine(card(processes=[trainer_process()]), card(uuid="GPU-2"))
    assert cli.main(["monitor", "0.1", "--interval", "0.05", "--json"]) == 0
    captured = capsys.readouterr()
    answer = json.loads(captured.out)
    assert answer["kind"] == "monitor"
    gpu = answer["gpus"][1]
    assert gpu["gpu"] == "1"
    assert gpu["memory_total_bytes"] == 24 * GIB
    assert "GPU 1" in captured.err


@each(
    "arguments",
    [
        ["-1"],
        ["nan"],
        ["1", "--interval", "0"],
    ],
)
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
    assert cli.main(["monitor", "5", "--interval", "0.05"]) == 3
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
def running(tmp_path: Path, *arguments: str):
    """The real command in a process of its own, with a made-up pynvml before the real one on its path."""
    (tmp_path / "pynvml.py").write_text(FAKE)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "vram_guard.cli", "monitor", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_with_the_summary(tmp_path, number):
    with running(tmp_path, "--interval", "0.05") as process:
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
    assert cli.main(["monitor", "0.05", "--interval", "0.05", "--json"]) == 0
    (process,) = json.loads(capsys.readouterr().out)["gpus"][0]["processes"]
    assert (process["memory_peak_bytes"], process["predicted_bytes"]) == (4 * GIB, 3 * GIB + GIB // 2)
    assert cli.main(["monitor", "0.05", "--interval", "0.05"]) == 0
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


# --- in a Trainer ---


@pytest.mark.filterwarnings("ignore")
def test_a_training_is_watched_and_says_so(tmp_path, monkeypatch, capsys):
    pytest.importorskip("lightning")
    import importlib

    import lightning_cases as cases

    from vram_guard_lightning import VramGuard

    namespace = cases.NAMESPACE
    logged: list[dict[str, float]] = []

    class Writes(importlib.import_module(f"{namespace}.loggers").Logger):
        name, version = "writes", 0

        def log_hyperparams(self, *_: Any, **__: Any) -> None: ...

        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            logged.append(metrics)

    class Slow(importlib.import_module(namespace).Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            assert looked.wait(WATCHDOG)

    looked = threading.Event()

    @contextmanager
    def source():
        looks = itertools.count()

        def look() -> tuple[GpuSample, ...]:
            if next(looks):  # the first moment is added up by now
                looked.set()
            return (sample(0.5, 40),)

        yield look

    monkeypatch.setattr("vram_guard_lightning._utilization.sampler_of", lambda trainer: source)  # its one seam
    guard = VramGuard(budget="64GiB", advanced={"monitor": 0.05})
    trainer = cases.make_trainer(
        namespace, tmp_path, [guard, Slow()], max_epochs=1, logger=Writes(), log_every_n_steps=2
    )
    trainer.fit(cases.make_module(namespace), cases.loader(40))
    assert capsys.readouterr().out.count("utilisation mean 50%, peak 50%; memory mean 40 B (40%)") == 1
    assert any(line.get("vram_guard/gpu_utilization") == 0.5 for line in logged)
    assert any(line.get("vram_guard/gpu_memory_peak_bytes") == 40 for line in logged)

    monkeypatch.undo()
    trainer = cases.make_trainer(
        namespace, tmp_path, [VramGuard(budget="64GiB", advanced={"monitor": 1})], max_epochs=1
    )
    trainer.fit(cases.make_module(namespace), cases.loader(8))
    assert "there is no GPU to watch: the training runs on cpu" in capsys.readouterr().out
    with pytest.raises(InvalidInputError, match="interval"):
        VramGuard(advanced={"monitor": 0})
