"""A script with MMEngine in two processes that talk through gloo, for tests."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import preloaded

HERE = Path(__file__).parent


def answers(script: str, out: Path, *, limit: float) -> list[dict[str, Any]]:
    """What each rank has written; ranks that fail or hang fail the test.

    Args:
        script: beside this file; it writes ``RANK.json`` into the folder that it is given.
        out: that folder.
        limit: seconds for each rank.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    paths = os.pathsep.join(filter(None, [str(HERE), *sys.path]))
    runs = []
    for rank in range(2):
        env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1",
               "MASTER_PORT": str(port), "WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank)}  # fmt: skip
        env = preloaded.environment(env, "mmengine.runner")
        runs.append(subprocess.Popen([sys.executable, str(HERE / script), str(out)], env=env,
                                     stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))  # fmt: skip
    try:
        outputs = [run.communicate(timeout=limit)[0] for run in runs]
    finally:
        for run in runs:
            run.kill()
    assert [run.returncode for run in runs] == [0, 0], "\n".join(outputs)
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)]
