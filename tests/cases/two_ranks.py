"""Two processes that talk through gloo, for tests; ranks that hang fail the test."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import preloaded
import torch
from guard_imports import PLANS

HERE = Path(__file__).parent
LIBRARIES = ("lightning.pytorch", "vram_guard_lightning._callback", *PLANS)


def ended(
    *command: object,
    limit: float = 120,
    waited_for: Sequence[int] = (0, 1),
    libraries: Sequence[str] = (),
    cwd: Path | None = None,
    **variables: str,
) -> list[tuple[int, str]]:
    """The exit code of each rank, and all that it has said.

    Args:
        command: what Python is given; the ranks differ in their variables alone.
        limit: seconds for each.
        waited_for: others are killed when these have ended.
        libraries: that both processes begin with.
        cwd: where they run, if not here.
        variables: more of the environment.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"}
    given = preloaded.environment({**os.environ, **shared, "NODE_RANK": "0", **variables}, *libraries)
    # Not pipes, which fill up while the other one is waited for.
    told = [tempfile.TemporaryFile("w+") for _rank in (0, 1)]  # noqa: SIM115 - closed where they are read
    ranks = [
        subprocess.Popen(
            [sys.executable, *map(str, command)],
            env={**given, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=told[rank],
            stderr=subprocess.STDOUT,
        )
        for rank in (0, 1)
    ]
    try:
        for rank in waited_for:
            ranks[rank].wait(limit)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return [(process.returncode, _read(file)) for process, file in zip(ranks, told, strict=True)]


def _read(file: IO[str]) -> str:
    with file:
        file.seek(0)
        return file.read()


def trainings(
    script: str,
    out: Path,
    cases: list[str],
    *,
    limit: float,
    libraries: Sequence[str] = LIBRARIES,
) -> dict[str, list[dict[str, Any]]]:
    """Both ranks' results and weights of every training, in the same two processes.

    Args:
        script: beside this file; it trains the cases that it is named, one after another, and writes ``CASE-RANK.json``
            and ``.pt``.
        out: its folder.
        cases: of the script.
        limit: seconds for all of them.
        libraries: that both processes begin with.
    """
    ranks = ended(HERE / script, out, *cases, limit=limit, libraries=libraries)
    found: dict[str, list[dict[str, Any]]] = {}
    for case in cases:
        paths = [out / f"{case}-{rank}.json" for rank in (0, 1)]
        assert all(path.exists() for path in paths), [said[-2000:] for _code, said in ranks]
        found[case] = [
            {**json.loads(path.read_text()), "weights": torch.load(path.with_suffix(".pt"), weights_only=True)}
            for path in paths
        ]
    return found


def answers(script: str, out: Path, *, limit: float) -> list[dict[str, Any]]:
    """What each rank of a script with MMEngine has written as ``RANK.json``; ranks that fail fail the test.

    Args:
        script: beside this file; it is given the folder.
        out: that folder.
        limit: seconds for each rank.
    """
    paths = os.pathsep.join(filter(None, [str(HERE), *sys.path]))
    ranks = ended(HERE / script, out, limit=limit, libraries=("mmengine.runner",), PYTHONPATH=paths)
    assert [code for code, _said in ranks] == [0, 0], "\n".join(said for _code, said in ranks)
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)]
