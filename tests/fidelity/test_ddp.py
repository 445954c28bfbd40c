"""Two processes under DDP, with and without the guard: none differs in silence, on either rank."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import preloaded
import pytest

pytest.importorskip("lightning")
torch = pytest.importorskip("torch")

if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("torch was built without gloo", allow_module_level=True)

import fidelity_ddp_script as ddp  # noqa: E402 - what is tested has to be there

from fidelity.harness import SLICES, Verdict, fault, judge  # noqa: E402

PAIRS = [pair for case in ddp.CASES for pair in case.pairs]
LAUNCHED = ("LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
    command = [sys.executable, ddp.__file__, str(folder)]
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    environment = preloaded.environment({**environment, **own}, "lightning.pytorch")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    files = [Path(folder) / f"rank{rank}.pickle" for rank in (0, 1)]
    assert all(path.exists() for path in files), done.stderr[-3000:]
    return [pickle.loads(path.read_bytes()) for path in files]


@pytest.mark.parametrize(("case", "mode"), PAIRS, ids=[f"{case.name}-{mode}".replace(" ", "_") for case, mode in PAIRS])
def test_no_silent_difference(outcomes, case, mode):
    said = outcomes[0][case.name, mode].words  # rank 0 speaks for all
    for rank, found in enumerate(outcomes):
        guarded = found[case.name, mode]
        guarded.words = said
        control = outcomes[0][ddp.CASES[0].name, mode].words if case is not ddp.CASES[0] else []
        wrong = fault(case, mode, judge(case, mode, found[case.name, None], guarded, control))
        assert not wrong, f"rank {rank}: {wrong}"


def test_slices_on_both_ranks(outcomes):
    for found in outcomes:
        judged = judge(ddp.IN_SLICES, SLICES, found[ddp.IN_SLICES.name, None], found[ddp.IN_SLICES.name, SLICES], [])
        assert (judged.verdict, judged.applied) == (Verdict.EQUAL, True), judged
