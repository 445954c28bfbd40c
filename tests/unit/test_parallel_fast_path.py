"""Lists of DTensors on the short way: the same events as by DTensor's own dispatch, where it may be taken."""

from __future__ import annotations

import pytest
import torch
from parallel_cases import Net, Transformer, step

from vram_guard import Parallel
from vram_guard.simulate.parallel import dtensors
from vram_guard.simulate.tracing.run import run_step

pytestmark = pytest.mark.torch_since(2, 6)

OPTIMIZERS = {
    "adamw": lambda ps: torch.optim.AdamW(ps),
    "amsgrad": lambda ps: torch.optim.Adam(ps, amsgrad=True, weight_decay=0.1),
    "fused": lambda ps: torch.optim.AdamW(ps, fused=True),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, momentum=0.9, centered=True),
}


@pytest.fixture
def counted(monkeypatch):
    """How many operators took the short way."""
    taken = []

    def alike(*args):
        taken.append(original(*args))
        return taken[-1]

    original = dtensors._alike
    monkeypatch.setattr(dtensors, "_alike", alike)
    return taken


def both(monkeypatch, given):
    short = run_step(given, 2, (9, 0))
    with monkeypatch.context() as patch:
        patch.setattr(dtensors, "on_parts", lambda *_args: NotImplemented)
        return short, run_step(given, 2, (9, 0))


@pytest.mark.parametrize(
    ("layout", "model", "optimizer"),
    [
        *((Parallel(7, kind="fsdp2"), Net, name) for name in OPTIMIZERS),
        (Parallel(8, kind="fsdp2", offload=True), Net, "adamw"),
        (Parallel(16, kind="fsdp2", tensor=4, param_dtype="bf16"), Transformer, "adamw"),
        (Parallel(4, kind="fsdp2", tensor=4), Transformer, "sgd"),
    ],
)
def test_events_are_those_of_the_long_way(monkeypatch, counted, layout, model, optimizer):
    given = step(layout, model=model, optimizer=OPTIMIZERS[optimizer])
    short, long = both(monkeypatch, given)
    assert counted
    assert any(counted)
    assert short.events == long.events
    assert short.blocks == long.blocks
    assert short.host_events == long.host_events
    assert short.host_blocks == long.host_blocks
    assert short.collectives == long.collectives
    assert short.work == long.work


def test_what_may_move_data_goes_the_long_way(monkeypatch, counted):
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    seen = []

    def apply(model, mesh):
        shapes = {Shard(0): (1, 4), Shard(1): (4, 1)}

        def of(*placements):
            """Of four rows and columns each."""
            parts = [(torch.zeros(shapes.get(p, (4, 4)), device="cuda"), p) for p in placements]
            return [DTensor.from_local(part, mesh, [p], run_check=False) for part, p in parts]

        for one, other in (
            (of(Shard(0), Shard(0)), of(Shard(0), Shard(1))),
            (of(Shard(0), Shard(0)), of(Replicate(), Shard(0))),
            (of(Partial(), Partial()), of(Partial(), Partial())),
        ):
            torch._foreach_mul(one, other)
        seen.extend(torch._foreach_mul(of(Shard(0)), of(Replicate())[0].sum()))
        counted.append("then")
        return model.to_empty(device="cuda")

    run_step(step(Parallel(4, apply=apply)), 2, (9, 0))
    assert counted[: counted.index("then")] == [False, False, False, True]
    assert [tensor.placements for tensor in seen] == [(Shard(0),)]
    assert seen[0].shape == (4, 4)
