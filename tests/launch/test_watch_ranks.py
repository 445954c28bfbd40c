"""The group over which ranks settle things ends before the interpreter does, whoever ends it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import two_ranks

torch = pytest.importorskip("torch")

if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("torch was built without gloo", allow_module_level=True)

SCRIPT = two_ranks.HERE / "rank_coordinator_script.py"


def ranks(folder: Path, how: str) -> tuple[list[int], list[str]]:
    """Exit codes and words of two processes that nobody but this test has started."""
    codes, said = zip(*two_ranks.ended(SCRIPT, folder, how), strict=True)
    return list(codes), list(said)


def test_the_rank_with_the_store_ends_the_other_if_it_is_killed_while_planning(tmp_path: Path) -> None:
    codes, errors = ranks(tmp_path, "killed 0")
    assert codes[0] == -signal.SIGKILL
    assert codes[1] == 1, errors
    assert "LostRankError: the process through which the ranks talk" in errors[1]
    assert "All ranks end" in errors[1]


def test_launchers_end_the_others_themselves(tmp_path: Path) -> None:
    """As torchrun, which ``accelerate launch`` is made of, does; one message says which was killed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    done = subprocess.run(
        [*command, str(tmp_path), "killed 1"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert "Signal 9 (SIGKILL) received by PID" in done.stderr


@pytest.mark.parametrize(
    ("how", "after", "at_exit"), [("closed", 1, 1), ("dropped", 1, 1), ("left", 2, 1), ("destroyed", 0, 0)]
)
def test_the_group_is_gone_and_both_ranks_end_well(tmp_path: Path, how: str, after: int, at_exit: int) -> None:
    codes, errors = ranks(tmp_path, how)
    assert codes == [0, 0], errors
    for rank in (0, 1):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        expected = {"groups": 2, "parts": [2, 5], "groups after": after, "groups at exit": at_exit}
        if how == "closed":  # what became of a rank that was late, before; they all go on together
            expected |= {"together": rank, "late": ["LostCopyError", True]}
        assert found == expected, errors[rank]
