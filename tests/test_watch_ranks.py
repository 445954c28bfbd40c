"""The group over which ranks settle things ends before the interpreter does, whoever ends it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("torch was built without gloo", allow_module_level=True)

SCRIPT = Path(__file__).with_name("rank_coordinator_script.py")


@pytest.mark.parametrize(
    ("how", "after", "at_exit"), [("closed", 1, 1), ("dropped", 1, 1), ("left", 2, 1), ("destroyed", 0, 0)]
)
def test_the_group_is_gone_and_both_ranks_end_well(tmp_path: Path, how: str, after: int, at_exit: int) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(tmp_path), how],
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
    assert [rank.returncode for rank in ranks] == [0, 0], errors
    for rank in (0, 1):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        expected = {"groups": 2, "gradient": 0.5, "verdict": 1, "groups after": after, "groups at exit": at_exit}
        if how == "closed":  # what became of a rank that was late, before; they all go on together
            expected |= {"together": rank, "late": ["LostCopyError", True]}
        assert found == expected, errors[rank]
