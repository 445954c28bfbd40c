"""Parallel: what it says of a layout, and what it refuses before any work."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from each import each
from hypothesis import given
from hypothesis import strategies as st

from vram_guard import Parallel, TrainingStep
from vram_guard.errors import InvalidInputError
from vram_guard.limits import MOST_GPUS

NODES = st.sampled_from([1, 2, 4, 8])


@given(nodes=st.integers(1, 64), node=NODES, tensor=NODES, kind=st.sampled_from(["ddp", "fsdp2", "hsdp"]))
def test_the_mesh_has_every_gpu_once(nodes: int, node: int, tensor: int, kind: Any) -> None:
    if node % tensor:
        with pytest.raises(InvalidInputError):
            Parallel(nodes * node, node, kind, tensor)
        return
    if kind == "ddp" and tensor > 1 and nodes * node > tensor:
        with pytest.raises(InvalidInputError):
            Parallel(nodes * node, node, kind, tensor)
        return
    layout = Parallel(nodes * node, node, kind, tensor)
    size = 1
    for ranks in layout.dimensions.values():
        size *= ranks
    assert size == layout.gpus
    assert layout.nodes * layout.gpus_of_a_node == layout.gpus
    assert layout.data_ranks * layout.tensor == layout.gpus
    assert layout.shards * layout.replicas == (layout.data_ranks if kind != "ddp" else 1)


@each(
    ("given_", "dimensions", "shards"),
    [
        ({"gpus": 4}, {"data": 4}, 1),
        ({"gpus": 4, "kind": "zero1"}, {"data": 4}, 1),
        ({"gpus": 4, "kind": "deepspeed2"}, {"data": 4}, 1),
        ({"gpus": 4, "kind": "deepspeed3"}, {"data": 4}, 4),
        ({"gpus": 4, "kind": "fsdp1"}, {"shard": 4}, 4),
        ({"gpus": 64, "kind": "fsdp2", "tensor": 8}, {"shard": 8, "tensor": 8}, 8),
        ({"gpus": 16, "kind": "hsdp"}, {"replicate": 2, "shard": 8}, 8),
        ({"gpus": 16, "kind": "hsdp", "replicate": 8, "tensor": 2}, {"replicate": 8, "shard": 1, "tensor": 2}, 1),
        ({"gpus": 8, "apply": lambda model, mesh: model, "tensor": 2}, {"shard": 4, "tensor": 2}, 4),
        ({"gpus": 8, "apply": lambda model, mesh: model, "replicate": 2}, {"replicate": 2, "shard": 4}, 4),
    ],
)
def test_dimensions(given_: dict[str, Any], dimensions: dict[str, int], shards: int) -> None:
    layout = Parallel(**given_)
    assert list(layout.dimensions.items()) == list(dimensions.items())
    assert layout.shards == shards


@each(
    ("given_", "said"),
    [
        ({"gpus": 0}, "gpus must be between 1"),
        ({"gpus": 2.0}, "gpus must be a whole number"),
        ({"gpus": MOST_GPUS + 8}, "gpus must be at most"),
        ({"gpus": 12}, "12 GPUs are no whole number of nodes of 8"),
        ({"gpus": 8, "node": 0}, "node must be between 1"),
        ({"gpus": 8, "tensor": 3}, "tensor=3 does not divide the 8 GPUs of a node"),
        ({"gpus": 16, "tensor": 16}, "tensor=16 does not divide the 8 GPUs of a node"),
        ({"gpus": 8, "kind": "fsdp"}, "kind must be one of ddp, zero1, fsdp2"),
        ({"gpus": 8, "kind": "pipeline"}, "pipeline parallelism cannot be predicted"),
        ({"gpus": 8, "kind": "context"}, "context parallelism cannot be predicted"),
        ({"gpus": 8, "kind": "expert"}, "expert parallelism cannot be predicted"),
        ({"gpus": 8, "kind": "fsdp1", "tensor": 2}, "tensor parallelism goes with"),
        ({"gpus": 8, "kind": "fsdp2", "replicate": 2}, "replicate is for hsdp"),
        ({"gpus": 8, "kind": "hsdp", "replicate": 3}, "replicate=3 does not divide the 8 ranks"),
        ({"gpus": 8, "kind": "ddp", "reshard": False}, "take reshard; ddp does not"),
        ({"gpus": 8, "kind": "zero1", "offload": True, "blocks": ["a"]}, "take offload, blocks; zero1 does not"),
        ({"gpus": 8, "kind": "fsdp2", "reshard": 3}, "reshard=3 does not divide the 8 ranks"),
        ({"gpus": 8, "kind": "fsdp1", "reshard": 2}, "reshard is True or False for fsdp1"),
        ({"gpus": 8, "kind": "fsdp2", "param_dtype": "int8"}, "param_dtype must be one of"),
        ({"gpus": 8, "kind": "fsdp2", "blocks": "layers"}, "blocks must be a list"),
        ({"gpus": 8, "kind": "fsdp2", "blocks": []}, "blocks must be a list"),
        ({"gpus": 8, "kind": "fsdp2", "apply": lambda model, mesh: model}, "apply replaces kind"),
        ({"gpus": 8, "apply": 3}, "apply must be a callable"),
    ],
)
def test_bad_input_is_said_before_any_work(given_: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        Parallel(**given_)


def test_a_step_takes_a_parallel_and_nothing_else() -> None:
    step = TrainingStep(torch.nn.Linear(2, 2), torch.ones(2, 2), lambda model, batch: model(batch).sum())
    assert step.with_(parallel=Parallel(8)).parallel == Parallel(8, kind="ddp")
    with pytest.raises(InvalidInputError, match="parallel must be a Parallel"):
        step.with_(parallel=8)
