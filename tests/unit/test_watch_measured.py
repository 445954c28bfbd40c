"""Predicted beside measured, and what is remembered of it."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from device_numbers import GIB, Numbers
from torch import nn

from vram_guard.cache import cache_folder, forget_oldest
from vram_guard.watch import corrections
from vram_guard.watch.corrections import Corrections, Subject, fingerprint
from vram_guard.watch.first_steps import FirstSteps, Measured

ABOUT = Subject("NVIDIA GeForce RTX 4090", "2.13.0+cu128", "abc")


def watch(*, before: tuple[int, int] = (0, 0), start: tuple[int, int], steps: tuple[int, int]) -> Measured | None:
    memory: Any = Numbers()
    memory.take(*before)
    estimate: Any = SimpleNamespace(peak_reserved=11 * GIB, first_steps=(10 * GIB, 11 * GIB))
    watcher = FirstSteps(memory, ABOUT, estimate, remember=False)
    assert watcher.measure() is None
    memory.take(*start)
    watcher.start()
    memory.take(*steps)
    return watcher.measure()


def test_what_was_there_before_the_model_is_not_the_trainings() -> None:
    found = watch(before=(GIB, 2 * GIB), start=(3 * GIB, 4 * GIB), steps=(12 * GIB, 13 * GIB))
    assert found is not None
    assert (found.allocated, found.reserved) == (11 * GIB, 11 * GIB)
    assert found.ratio == pytest.approx(1.1)
    assert "allocated 11.00 GiB measured, 10.00 GiB predicted (+10.0%)" in found.words()
    assert found.metrics() == {"measured_peak_allocated_bytes": 11.0 * GIB, "measured_peak_reserved_bytes": 11.0 * GIB}


def test_cache_that_earlier_work_left_is_given_back_and_counted_for_the_training() -> None:
    memory: Any = Numbers()
    memory.take(20 * GIB, 21 * GIB)
    memory.take(GIB, 21 * GIB)  # an earlier model died; the allocator keeps its segments
    memory.kept = 2 * GIB
    estimate: Any = SimpleNamespace(peak_reserved=24 * GIB, first_steps=(20 * GIB, 24 * GIB))
    watcher = FirstSteps(memory, ABOUT, estimate, remember=False)
    assert memory.reserved() == 2 * GIB
    watcher.start()
    memory.take(22 * GIB, 26 * GIB)
    found = watcher.measure()
    assert found is not None
    assert (found.allocated, found.reserved) == (21 * GIB, 24 * GIB)


def test_an_earlier_peak_hides_the_trainings() -> None:
    found = watch(start=(3 * GIB, 20 * GIB), steps=(9 * GIB, 20 * GIB))
    assert found is not None
    assert (found.allocated, found.reserved) == (9 * GIB, None)
    assert found.ratio == pytest.approx(0.9)
    assert "reserved not measured" in found.words()
    found = watch(start=(30 * GIB, 30 * GIB), steps=(9 * GIB, 20 * GIB))
    assert found is not None
    assert found.ratio is None


# --- corrections --------------------------------------------------------------------------------------------


def test_only_ever_raises(tmp_path: Path) -> None:
    kept = Corrections(tmp_path)
    assert kept.factor(ABOUT) == 1.0
    kept.remember(ABOUT, 0.7)
    assert kept.factor(ABOUT) == 1.0, "a lucky run"
    kept.remember(ABOUT, 1.04)
    kept.remember(ABOUT, 0.9)
    assert Corrections(tmp_path).factor(ABOUT) == 1.04
    assert kept.factor(Subject(ABOUT.gpu, "2.14.0", ABOUT.structure)) == 1.0
    for _ in range(corrections.KEPT):
        kept.remember(ABOUT, 1.01)
    assert kept.factor(ABOUT) == 1.01, "an odd run is forgotten in the end"


def test_nonsense_is_not_remembered(tmp_path: Path) -> None:
    for ratio in (math.nan, math.inf, -1.0, 0.0, 50.0):
        Corrections(tmp_path).remember(ABOUT, ratio)
    assert list(tmp_path.rglob("*")) == []


def test_a_file_that_is_not_ours_counts_as_none(tmp_path: Path) -> None:
    path = tmp_path / "corrections" / ABOUT.file_name
    path.parent.mkdir()
    wrong = [{"a": 1}, [1.0, "x"], [-3.0], [math.nan], [1000.0]]
    contents = [json.dumps({"about": asdict(ABOUT), "ratios": ratios}).encode() for ratios in wrong]
    for content in (b"", b"{half", b"\xff\xfe", b"[" * 3000, b"[]", *contents):
        path.write_bytes(content)
        assert Corrections(tmp_path).factor(ABOUT) == 1.0, content
    Corrections(tmp_path).remember(ABOUT, 1.2)
    assert Corrections(tmp_path).factor(ABOUT) == 1.2


def test_a_folder_that_cannot_be_written_is_fine(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    Corrections(blocked).remember(ABOUT, 1.1)
    assert Corrections(blocked).factor(ABOUT) == 1.0


def test_the_oldest_files_of_each_kind_go(tmp_path: Path) -> None:
    for number in range(8):
        for kind in ("json", "log"):
            path = tmp_path / f"{number}.{kind}"
            path.touch()
            os.utime(path, (number, number))
    forget_oldest(tmp_path, 3, ("*.json", "*.log"))
    assert {path.name for path in tmp_path.iterdir()} == {f"{n}.{kind}" for n in (5, 6, 7) for kind in ("json", "log")}
    forget_oldest(tmp_path / "missing", 3)


def test_several_processes_at_once(tmp_path: Path) -> None:
    """Each writes one ratio of its own training and twenty of a common one."""
    script = """
import sys
from dataclasses import asdict
from pathlib import Path
from vram_guard.watch.corrections import Corrections, Subject
kept, me = Corrections(Path(sys.argv[1])), sys.argv[2]
kept.remember(Subject("gpu", "torch", me), 1.25)
for _ in range(20):
    kept.remember(Subject("gpu", "torch", "common"), 1.5)
"""
    running = [subprocess.Popen([sys.executable, "-c", script, str(tmp_path), str(me)]) for me in range(4)]
    assert [process.wait(280) for process in running] == [0] * 4
    kept = Corrections(tmp_path)
    assert [kept.factor(Subject("gpu", "torch", str(me))) for me in range(4)] == [1.25] * 4
    assert kept.factor(Subject("gpu", "torch", "common")) == 1.5
    assert [path.suffix for path in (tmp_path / "corrections").iterdir()] == [".json"] * 5


def test_where_it_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")
    for name in ("VRAM_GUARD_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    assert cache_folder() == tmp_path / ".cache" / "vram_guard"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder() == tmp_path / ".cache" / "vram_guard"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "vram_guard"
    monkeypatch.setenv("VRAM_GUARD_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"


def test_the_fingerprint_is_about_structure_alone() -> None:
    def model(width: int = 4) -> nn.Module:
        return nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width))

    one = fingerprint(model(), "32-true")
    assert fingerprint(model(), "32-true") == one, "values do not count"
    assert fingerprint(model().to("meta"), "32-true") == one, "nor does the device"
    frozen = model()
    frozen[0].requires_grad_(False)
    others = {
        fingerprint(model(5), "32-true"),
        fingerprint(model(), "bf16-mixed"),
        fingerprint(model().to(torch.bfloat16), "32-true"),
        fingerprint(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), "32-true"),
        fingerprint(frozen, "32-true"),
    }
    assert len(others) == 5
    assert one not in others
