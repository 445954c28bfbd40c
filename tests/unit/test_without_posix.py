"""Processes without what Windows and macOS do not have: everything but ``vram-guard launch`` on Windows runs there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")
pytest.importorskip("mmengine")
pytest.importorskip("accelerate")

CASES = Path(__file__).parents[1] / "cases"
WORK = "imports,alive,commands,lightning,mmengine"


@pytest.fixture(scope="module", params=["win32", "darwin"])
def found(request: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "VRAM_GUARD_CACHE": str(folder / "cache"),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(CASES), *sys.path])),
    }
    command = [sys.executable, str(CASES / "without_posix_script.py"), request.param, WORK, str(folder)]
    run = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=280, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    return {**json.loads(run.stdout.splitlines()[-1]), "system": request.param}


def test_every_module_imports(found: dict[str, Any]) -> None:
    assert found["imports"] == {}


def test_trainings_are_examined_and_their_plans_applied(found: dict[str, Any]) -> None:
    assert found["lightning"] == {"changes": True, "fits": True, "steps": 2}
    assert found["mmengine"] == {"changes": True, "fits": True, "steps": 12}


def test_commands_answer_and_launch_names_what_it_lacks(found: dict[str, Any]) -> None:
    for name in ("plan", "estimate", "gpus"):
        code, out, err = found["commands"][name]
        assert code == 0, err
        assert out
    code, out, err = found["commands"]["launch"]
    assert (code, out) == (3, "")
    assert err.count("\n") == 1
    # Elsewhere the script was run, and has no training.
    assert ("(fork)" in err) == (found["system"] == "win32")


def test_a_process_is_asked_whether_it_runs_without_a_signal(found: dict[str, Any]) -> None:
    assert found["alive"] == {"known": True, "ended": "alive" if found["system"] == "win32" else ""}
