"""Two processes whose batches differ in size, and steps that talk to the other process themselves (gloo, CPU)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")
torch = pytest.importorskip("torch")

if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("torch was built without gloo", allow_module_level=True)

from two_ranks import HERE, trainings  # noqa: E402 - torch has to be there

SCRIPT = "lightning_ranks_script.py"

#: Guarded trainings, and those without the guard that they must be equal to.
EQUAL = {
    "uneven+split": "uneven+plain",
    "seldom+split": "seldom+plain",
}
#: Trainings that would be another one in micro-batches, or would hang, with the reason that is given.
REFUSED = {
    "own+split": "the step itself calls all_reduce (cases/lightning_ranks_script.py:",
    "gather+split": "the step itself calls barrier (cases/lightning_ranks_script.py:",
    "functional+split": "the step itself calls all_reduce (cases/lightning_ranks_script.py:",
    "uneven+split+static": "DistributedDataParallel(static_graph=True)",
}
#: Trainings in which a rank could wait for one that has no more micro-batches.
ENDED = ("late+split", "latefunctional+split")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Both ranks' results of every training, in the same two processes; ranks that hang fail the tests."""
    out = tmp_path_factory.mktemp("ranks")
    cases = [*EQUAL, *dict.fromkeys(EQUAL.values()), *REFUSED]
    return trainings(SCRIPT, out, cases, limit=280)


@pytest.mark.parametrize("case", EQUAL)
def test_ranks_with_batches_of_other_sizes_train_the_same(results: Any, case: str) -> None:
    for mine, plain in zip(results[case], results[EQUAL[case]], strict=True):
        assert "error" not in mine, mine["error"]
        assert mine["splits"] == 2
        assert mine["steps"] == plain["steps"] == 8
        assert mine["logged"] == pytest.approx(plain["logged"], rel=1e-5)
        for name, value in plain["weights"].items():
            torch.testing.assert_close(mine["weights"][name], value, rtol=2e-5, atol=2e-6)
    # Batches of 8, 8, 8, 8 here and of 3, 4, 8, 1 there: as many micro-batches, as long as they have two samples.
    assert results[case][0]["seen"] == [4] * 16
    assert results[case][1]["seen"] == [3, 2, 2, 4, 4, 1] * 2


@pytest.mark.torch_since(2, 6)
@pytest.mark.parametrize("case", REFUSED)
def test_what_the_ranks_would_do_more_often_is_refused_before_training(results: Any, case: str) -> None:
    first, second = results[case]
    assert "error" not in first, first["error"]
    assert first["steps"] == second["steps"] == 8
    assert first["seen"] == [8] * 8
    assert any("smaller micro-batches are not possible" in line and REFUSED[case] in line for line in first["said"])


@pytest.mark.torch_since(2, 6)
@pytest.mark.parametrize("case", ENDED)
def test_where_a_rank_would_wait_for_ever_both_end_with_one_error(tmp_path: Path, case: str) -> None:
    for rank in trainings(SCRIPT, tmp_path, [case], limit=90)[case]:
        assert rank["error"].startswith("UnsupportedStepError")
        assert "not cut into as many micro-batches on each of them" in rank["error"]


def test_a_rank_that_runs_out_of_memory_says_the_plan_to_use_and_its_launcher_ends_the_other(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, HERE / SCRIPT, tmp_path, "uneven+recover+breaks"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 1
    assert "RecoveryFailedError: out of memory, and no batch is repeated: the other processes would wait" in done.stderr
    assert "pin={'micro_batch_size': 4}" in done.stderr
    assert "What was predicted" in done.stderr
