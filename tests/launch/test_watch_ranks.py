"""The group over which ranks settle things ends before the interpreter does, whoever ends it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("torch was built without gloo", allow_module_level=True)

SCRIPT = Path(__file__).parents[1] / "cases" / "rank_coordinator_script.py"


def two_ranks(folder: Path, how: str) -> tuple[list[int], list[str]]:
    """Exit codes and errors of two processes that nobody but this test has started."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(folder), how],
            env={**os.environ, **address, "WORLD_SIZE": "2", "RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        errors = [rank.communicate(timeout=120)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [rank.returncode for rank in ranks], errors


@pytest.mark.parametrize("killed", [1, 0])
def test_a_rank_that_is_killed_while_planning_ends_the_other(tmp_path: Path, killed: int) -> None:
    """The one that is killed last is waited for ten minutes, if it is not noticed; with rank 0 goes the store."""
    codes, errors = two_ranks(tmp_path, f"killed {killed}")
    assert codes[killed] == -signal.SIGKILL
    assert codes[1 - killed] == 1, errors
    words = "the process of rank 1 ended" if killed else "the process through which the ranks talk"
    assert f"LostRankError: {words}" in errors[1 - killed]
    assert "All ranks end" in errors[1 - killed]


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
    codes, errors = two_ranks(tmp_path, how)
    assert codes == [0, 0], errors
    for rank in (0, 1):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        expected = {"groups": 2, "parts": [2, 5], "groups after": after, "groups at exit": at_exit}
        if how == "closed":  # what became of a rank that was late, before; they all go on together
            expected |= {"together": rank, "late": ["LostCopyError", True]}
        assert found == expected, errors[rank]
