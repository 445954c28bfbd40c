"""What a script does after its last epoch, whatever counts the epochs."""

from __future__ import annotations

import sys
from typing import Any

import pytest

pytest.importorskip("accelerate")
if sys.platform == "win32":
    pytest.skip("a dry run copies its process (fork)", allow_module_level=True)

import accelerate_cases as cases

SCRIPT = cases.HERE / "accelerate_scripts" / "epoch_loops.py"
LOOPS = (
    *("while_", "while_true", "until_steps", "counted", "listed", "bar", "last_of_its_function", "by_next"),
    "otherwise",
)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    asked = tmp_path_factory.mktemp("epochs") / "asked"
    for name in LOOPS:
        cases.request(asked / name, SCRIPT, name)
    return cases.dry_runs(asked)


@pytest.mark.parametrize("name", LOOPS)
def test_two_epochs_are_followed_and_what_comes_after_the_last(answers: dict[str, Any], name: str) -> None:
    estimate = answers[name]["plan"]["estimate"]
    names = [phase["name"] for phase in estimate["phases"]]
    assert names == ["setup", "training", "saving", "training", "saving", "validation"], estimate["notes"]
    assert estimate["phases"][-1]["peak_allocated"] > 100_000 * (64 + 256 + 512) * 4
    assert not estimate["notes"]
