"""Two processes under DDP: one plan on both, gradients averaged once, and no rank left waiting."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import preloaded
import pytest
from compiled_cases import MISSING

pytest.importorskip("lightning")
torch = pytest.importorskip("torch")

if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("torch was built without gloo", allow_module_level=True)

SCRIPT = Path(__file__).parents[1] / "cases" / "lightning_ddp_script.py"


def run(case: str, out: Path, tight: int = 0) -> tuple[list[dict[str, Any]], str]:
    """Both ranks' results and what was printed."""
    out.mkdir()
    environment = {**os.environ, "TIGHT": str(tight), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    for name in ("LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    command = [sys.executable, str(SCRIPT), case, str(out)]
    environment = preloaded.environment(environment, "lightning.pytorch")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    results = [out / f"result-{rank}.json" for rank in (0, 1)]
    assert all(path.exists() for path in results), done.stderr[-3000:]
    return [json.loads(path.read_text()) for path in results], done.stdout


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    out = tmp_path_factory.mktemp("ddp") / "plain"
    return run("plain", out)[0], out


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> int:
    """One byte too few for the step as written."""
    out = tmp_path_factory.mktemp("ddp") / "whole"
    results, _ = run("fits", out)
    assert results[0]["plan"] == results[1]["plan"] == [2048, 1]
    peak: int = results[0]["peak"]
    return peak - 1


def test_the_least_memory_counts_and_the_training_stays_the_same(
    plain: tuple[list[dict[str, Any]], Path], whole: int, tmp_path: Path
) -> None:
    unguarded, folder = plain
    results, printed = run("least", tmp_path / "least", whole)
    assert [result.get("error") for result in results] == [None, None]
    assert results[0]["plan"] == results[1]["plan"]
    assert results[0]["plan"][1] > 1
    assert results[0]["usable"] == results[1]["usable"] == whole
    assert printed.count("\nFull report") == 1, "rank zero prints, and nobody else"
    for rank in (0, 1):
        assert results[rank]["rates"] == unguarded[rank]["rates"]
        assert results[rank]["loaded"] == unguarded[rank]["loaded"]
        assert results[rank]["largest"] == results[rank]["plan"][0]
        guarded = torch.load(tmp_path / "least" / f"weights-{rank}.pt", weights_only=True)
        torch.testing.assert_close(
            guarded, torch.load(folder / f"weights-{rank}.pt", weights_only=True), rtol=2e-5, atol=2e-6
        )


@pytest.mark.skipif(bool(MISSING), reason="this torch's compiler is not followed")
def test_a_compiled_module_is_followed_in_two_processes(tmp_path: Path) -> None:
    results, _ = run("compiled", tmp_path / "compiled")
    assert [result.get("error") for result in results] == [None, None]
    assert results[0] == results[1]
    assert results[0]["why"] == ""
    assert results[0]["graphs"] >= 2
    compiled, uncompiled = results[0]["peaks"]
    assert compiled < uncompiled


def test_one_rank_cannot_plan_and_all_train_as_written(tmp_path: Path) -> None:
    results, _ = run("one fails", tmp_path / "fails", 2**30)
    assert [result.get("error") for result in results] == [None, None]
    assert [result["plan"] for result in results] == [None, None]
    assert results[0]["rates"] == results[1]["rates"] != []
