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
def test_events_are_those_of_the_long_way(monkeypatch, layout, model, optimizer):
    given = step(layout, model=model, optimizer=OPTIMIZERS[optimizer])
    short, long = both(monkeypatch, given)
    assert short.events == long.events
    assert short.blocks == long.blocks
    assert short.host_events == long.host_events
    assert short.host_blocks == long.host_blocks
    assert short.collectives == long.collectives
    assert short.work == long.work
