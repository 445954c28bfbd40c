"""Scripts that ask for the size of their terminal, under ``vram-guard launch``."""

from __future__ import annotations

import sys
from typing import Any

import pytest

pytest.importorskip("accelerate")
if sys.platform == "win32":
    pytest.skip("a dry run copies its process (fork)", allow_module_level=True)

import accelerate_cases as cases

SCRIPT = cases.HERE / "accelerate_scripts" / "terminal.py"
WAYS = ("popen", "program", "os", "shutil", "reads")


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Any:
    asked = tmp_path_factory.mktemp("asked")
    for how in (*WAYS, "input"):
        cases.request(asked / how, SCRIPT, how, whole_job=False)
    return cases.dry_runs(asked)


@pytest.mark.parametrize("how", WAYS)
def test_a_script_that_asks_for_its_terminal_is_followed(answers: Any, how: str) -> None:
    assert "error" not in answers[how], answers[how]
    assert answers[how]["plan"]["fits"]


def test_a_script_that_asks_its_user_is_refused(answers: Any) -> None:
    assert "standard input" in answers["input"]["message"]
