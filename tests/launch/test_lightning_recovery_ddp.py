"""Two processes of which one runs out of memory: both take the step back, nobody hangs, the training is the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")
torch = pytest.importorskip("torch")

if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("torch was built without gloo", allow_module_level=True)

from lightning_two_ranks import run as run_script  # noqa: E402 - torch has to be there

SCRIPT = Path(__file__).parents[1] / "cases" / "lightning_recovery_ddp_script.py"


#: Trainings that end well, and the undisturbed ones (Lightning's own DDP) that they are compared with.
COMPARED = {
    "armed": "plain",
    "armed+accumulating": "plain+accumulating",
    "forward": "split",
    "backward": "split",
    "forward+accumulating": "split+accumulating",
    "backward+accumulating": "split+accumulating",
    "step": "plain",
    "validation": "plain",
}


def run(out: Path, *cases: str) -> dict[str, list[dict[str, Any]]]:
    """Both ranks' results and weights of each training; ranks that hang fail the test."""
    return run_script(SCRIPT, out, list(cases), limit=250)


#: Before, recovery of several processes is refused without a prediction, and a trace does not see collectives.
pytestmark = pytest.mark.torch_since(2, 6)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Every training that ends well, in the same two processes."""
    return run(tmp_path_factory.mktemp("ddp"), *COMPARED, *dict.fromkeys(COMPARED.values()))


def assert_same(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> None:
    for mine, theirs in zip(one, other, strict=True):
        assert "error" not in mine, mine["error"]
        assert mine["rates"] == theirs["rates"]
        assert mine["steps"] == theirs["steps"]
        assert mine["logged"] == pytest.approx(theirs["logged"], rel=1e-4)
        assert mine["seen"] == theirs["seen"]
        for name, value in theirs["weights"].items():
            torch.testing.assert_close(
                mine["weights"][name], value, rtol=2e-5, atol=2e-6, msg=lambda m, n=name: f"{n} {m}"
            )
    for name, value in one[0]["weights"].items():
        if "running" not in name and "num_batches" not in name:  # those are each rank's own until the next batch
            assert torch.equal(value, one[1]["weights"][name]), name


@pytest.mark.parametrize("case", COMPARED)
def test_one_rank_runs_out_of_memory_and_the_training_stays_the_same(results: Any, case: str) -> None:
    assert_same(results[case], results[COMPARED[case]])
    if COMPARED[case].startswith("split"):
        assert results[case][0]["seen"] == [8] * 2 + [4] * 16, "the rank that did not fail changed at the same batch"


@pytest.mark.parametrize(
    ("case", "here", "there"),
    [
        (
            "hopeless",
            "RecoveryFailedError: out of memory in forward",
            "RecoveryFailedError: out of memory on another rank",
        ),
        ("gather", "calls other ranks itself", "calls other ranks itself"),
        ("user error", "ValueError: my own mistake", "RecoveryFailedError: another rank stopped"),
        ("step half-way", "half-updated", "RecoveryFailedError: another rank stopped"),
    ],
)
def test_both_ranks_stop(tmp_path: Path, case: str, here: str, there: str) -> None:
    healthy, broken = run(tmp_path, case)[case]
    assert here in broken["error"]
    assert there in healthy["error"]
