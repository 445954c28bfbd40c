"""A step that calls collectives is traced without its peers, and what it calls is written down."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import two_ranks

torch = pytest.importorskip("torch")

from vram_guard.guard.collectives import (  # noqa: E402
    collectives_of,
    repeated_in_parts,
    static_graph,
)
from vram_guard.timeline import SYNCHRONISED_NORM, Collective  # noqa: E402
from vram_guard.torch_release import torch_release  # noqa: E402


@pytest.mark.torch_since(2, 6)
@pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
    reason="torch was built without gloo",
)
def test_a_trace_talks_to_no_peer(tmp_path: Path) -> None:
    pytest.importorskip("torchmetrics")
    pytest.importorskip("mmengine")
    code, said = two_ranks.ended(two_ranks.HERE / "collectives_script.py", tmp_path, limit=250, waited_for=(0,))[0]
    assert code == 0, said
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["mean"] == []
    assert found["all_reduce"] == [["all_reduce", "forward"]]
    assert found["all_gather"] == [["all_gather", "forward"]]
    gather = "all_gather_into_tensor" if torch_release() >= (2, 15) else "all_gather"
    assert found["objects"] == [[gather, "forward"]] * 2  # their lengths, and what they hold
    assert found["host"] == [["all_reduce", "forward"], ["barrier", "forward"]]
    assert found["through"][0] == ["all_gather", "forward"]
    assert {phase for _name, phase in found["through"][1:]} == {"backward"}
    assert found["SyncBatchNorm"] == [["SyncBatchNorm", "forward"]]
    assert ["all_gather", "forward"] in found["metric"]
    assert found["mmengine"] == [["all_reduce", "forward"], *[[gather, "forward"]] * 2]


def test_what_a_step_calls_decides_on_micro_batches() -> None:
    own = Collective("all_reduce", "train.py:7", "forward", 2)
    norm = Collective(SYNCHRONISED_NORM, "train.py:3", "forward", 2)
    later = Collective("broadcast", "", "optimizer", 2)
    refusal = repeated_in_parts([own, own, norm])
    assert refusal is not None
    assert refusal.technique == "accumulate"
    assert "calls all_reduce (train.py:7), for which" in refusal.reason
    assert repeated_in_parts([norm, later]) is None
    assert repeated_in_parts([]) is None
    assert collectives_of(None) == ()
    assert "static_graph" in static_graph().reason
