"""Trainings of a script in two processes that talk through gloo, for tests."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import preloaded
import torch
from guard_imports import PLANS

LIBRARIES = ("lightning.pytorch", "vram_guard_lightning._callback", *PLANS)


def run(
    script: Path,
    out: Path,
    cases: list[str],
    *,
    limit: float,
    libraries: tuple[str, ...] = LIBRARIES,
    survivors: tuple[int, ...] = (0, 1),
) -> dict[str, list[dict[str, Any]]]:
    """Both ranks' results and weights of every training, in the same two processes; ranks that hang fail the test.

    Args:
        script: trains the cases that it is named, one after another, and writes ``CASE-RANK.json`` and ``.pt``.
        out: its folder.
        cases: of the script.
        limit: seconds for all of them.
        libraries: that both processes begin with.
        survivors: ranks that have results.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "OMP_NUM_THREADS": "1"}
    address |= {"WORLD_SIZE": "2", "NODE_RANK": "0"}
    variables = preloaded.environment({**os.environ, **address}, *libraries)
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(out), *cases],
            env={**variables, "LOCAL_RANK": str(rank), "RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        errors = [rank.communicate(timeout=limit)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    found: dict[str, list[dict[str, Any]]] = {}
    for case in cases:
        paths = [out / f"{case}-{rank}.json" for rank in survivors]
        assert all(path.exists() for path in paths), errors[0][-2000:] + errors[1][-2000:]
        found[case] = [
            {**json.loads(path.read_text()), "weights": torch.load(path.with_suffix(".pt"), weights_only=True)}
            for path in paths
        ]
    return found
