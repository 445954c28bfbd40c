"""Compiled steps of several processes: DDP, where Dynamo divides graphs at the ends of buckets, and FSDP2 by blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiled_cases import MISSING, graphs_under_ddp
from parallel_cases import Net, batch, loss
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from vram_guard import TrainingStep
from vram_guard.parallel.spec import Parallel
from vram_guard.plan import PlanOptions, plan
from vram_guard.simulate.compiled import Compiler
from vram_guard.simulate.tracing.run import run_step
from vram_guard.timeline import Timeline

pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"this torch's compiler is not followed: {MISSING}"),
    pytest.mark.filterwarnings("ignore"),
]

#: Three blocks of 4 MiB each: more than DDP's first bucket of 1 MiB.
WIDTH = 512
SAMPLES = 2048
CAPABILITY = (8, 0)


def compiled(how: str, compiler: Callable[..., Any] = torch.compile) -> nn.Module:
    model: nn.Module = Net(3, WIDTH)
    if how == "blocks":
        for number, block in enumerate(model.blocks):
            model.blocks[number] = compiler(block)
    return compiler(model) if how == "whole" else model


def step_of(how: str, **settings: Any) -> TrainingStep:
    return TrainingStep(
        model=compiled(how), batch=batch, loss=loss, optimizer=lambda given: torch.optim.AdamW(given), **settings
    )


def followed(step: TrainingStep, size: int = SAMPLES) -> Timeline:
    return Compiler(lambda size: run_step(step, size, CAPABILITY, compiled=True), 300)(size)


def really_compiled(how: str) -> int:
    """Graphs of the forward in a real process group."""

    def made(compiler: Callable[..., Any]) -> nn.Module:
        replica = DistributedDataParallel(compiled(how, compiler))
        return compiler(replica) if how == "around" else replica

    return graphs_under_ddp(made, lambda model: loss(model, batch(2)))


def shifted(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A loss that makes a tensor by one of torch's functions, for which a trace puts its own."""
    torch._dynamo.trace_rules.get_torch_obj_rule_map()  # as what torch has wrapped for Dynamo does
    made: torch.Tensor = loss(model, torch.full_like(x, 0.5) * x)
    return made


def test_after_a_trace_of_a_rank_dynamo_knows_torchs_functions() -> None:
    """A process group that is made empties Dynamo's table of them; the trace's own are in it then."""
    run_step(step_of("eager", parallel=Parallel(2, kind="ddp")).with_(loss=shifted), SAMPLES, CAPABILITY)
    doubled = torch.compile(lambda x: torch.full_like(x, 2.0) * x, fullgraph=True, backend="eager")
    assert doubled(torch.ones(3)).tolist() == [2.0] * 3
    cast = torch.compile(lambda x: torch.Tensor.to(x, torch.float64), fullgraph=True, backend="eager")
    assert cast(torch.ones(3)).dtype == torch.float64


@pytest.mark.parametrize("how", ["blocks", "whole"])
def test_under_ddp_graphs_end_where_buckets_do_whoever_calls_the_wrapper(how: str) -> None:
    ours = followed(step_of(how, parallel=Parallel(2, kind="ddp")))
    frameworks = followed(step_of(how, data_parallel_ranks=2))
    assert ours.compiled is not None
    assert ours.compiled.breaks == ()
    assert ours.compiled.graphs == 2 * really_compiled(how) == 4  # each with its backward
    assert frameworks.compiled == ours.compiled
    peaks = {one.at(SAMPLES).peak_reserved for one in (ours, frameworks)}
    assert len(peaks) == 1
    assert peaks.pop() < run_step(step_of(how, data_parallel_ranks=2), SAMPLES, CAPABILITY).at(SAMPLES).peak_reserved


def test_blocks_compiled_under_fsdp2_gather_their_weights_outside_the_compiled_code() -> None:
    step = step_of("blocks", parallel=Parallel(2, kind="fsdp2"))
    small, large = followed(step), followed(step, 2 * SAMPLES)
    eager = run_step(step, SAMPLES, CAPABILITY)
    assert small.compiled is not None
    assert (small.compiled.graphs, small.compiled.breaks) == (2, ())
    assert [one.name for one in small.collectives] == [one.name for one in eager.collectives]
    assert small.at(SAMPLES).peak_reserved < eager.at(SAMPLES).peak_reserved
    assert small.events == large.events


def test_layouts_are_compared_uncompiled_and_the_one_that_is_taken_is_followed_compiled() -> None:
    told: list[str] = []
    made = plan(
        step_of("blocks"),
        SAMPLES,
        "RTX 4090",
        gpus=2,
        options=PlanOptions(layouts=("ddp", "fsdp2")),
        progress=told.append,
        allow=(),
    )
    assert made.spread is not None
    assert made.spread.layout is not None
    assert made.compiled is not None
    assert (made.compiled.why, bool(made.compiled.graphs)) == ("", True)
    assert sum("following the compiled step" in line for line in told) == 1
    assert made.estimate.peak_reserved < made.compiled.eager.peak_reserved
