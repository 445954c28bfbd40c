"""DistributedDataParallel, ZeroRedundancyOptimizer and FSDP1 over pretended ranks, and beside real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import parallel_ddp_script as script
import pytest
import torch
from parallel_cases import Net, step

from vram_guard import Parallel, Timeline
from vram_guard.errors import UnsupportedStepError, UnsupportedTechniqueError
from vram_guard.parallel.data_parallel import chosen_options, options_of
from vram_guard.simulate.tracing.run import run_step

pytestmark = pytest.mark.torch_since(2, 6)

AMPERE = (8, 0)
BYTES = sum(parameter.numel() * 4 for parameter in Net().parameters())
DDP = Parallel(4, kind="ddp")


def traced(rank: int | None = None, **settings: Any) -> Timeline:
    return run_step(step(**settings), 2, AMPERE, rank=rank)


def made_by(timeline: Timeline, operators: tuple[str, ...]) -> list[int]:
    """Bytes of what these operators take, in order."""
    blocks = (timeline.blocks[event] for event in timeline.events if event >= 0)
    return [block.size.base for block in blocks if block.operator in operators]


def held(timeline: Timeline, category: str) -> int:
    return sum(block.size.base for block in timeline.alive_at(len(timeline.events)) if block.category == category)


# --- beside real processes --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What two real processes under gloo took, by case and rank."""
    if sys.platform == "win32":
        pytest.skip("processes are forked")
    folder = tmp_path_factory.mktemp("ddp")
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run(
        [sys.executable, script.__file__, str(folder)],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {
        name: [json.loads((folder / f"{name}.{rank}.json").read_text()) for rank in range(script.RANKS)]
        for name in script.CASES
    }


@pytest.mark.parametrize("name", script.CASES)
def test_what_is_sent_is_what_real_processes_send_in_that_order(real: Any, name: str) -> None:
    model, options = script.CASES[name]
    timeline = traced(0, model=model, parallel=script.layout_of(name), ddp_options=options, clip_grad_norm=None)
    sent = [one.bytes.base for one in timeline.collectives]
    assert sent == real[name][0]["sent"] == real[name][1]["sent"]
    assert len(sent) > 4


@pytest.mark.parametrize("name", [name for name in script.CASES if name != script.FLAT])
def test_the_reducer_takes_what_it_takes_in_real_processes_in_that_order(real: Any, name: str) -> None:
    model, options = script.CASES[name]
    timeline = traced(model=model, parallel=script.layout_of(name), ddp_options=options)
    taken = real[name][0]["sizes"]
    assert made_by(timeline, script.OPERATORS) == taken == real[name][1]["sizes"]
    # torch's own account of its buckets, which no operator has told.
    assert set(real[name][0]["buckets"]) <= set(taken)
    assert set(real[name][0]["rebuilt"]) <= {*taken, 0}
    if name == "many buckets":
        assert len(real[name][0]["rebuilt"]) == 4


@pytest.mark.parametrize("name", [name for name in script.CASES if name != script.FLAT])
def test_installed_in_real_processes_ranks_hold_equal_weights(real: Any, name: str) -> None:
    one, two = (found["weights"] for found in real[name])
    assert one == two


@pytest.mark.parametrize("rank", range(script.RANKS))
def test_each_rank_has_the_states_that_it_has_in_real_processes(real: Any, rank: int) -> None:
    timeline = traced(rank, parallel=Parallel(script.RANKS, kind="zero1"))
    states = {block.size.base for block in timeline.blocks if block.category == "optimizer_states"}
    assert states == set(real[script.DIVIDED][rank]["states"])
    assert held(timeline, "optimizer_states") == sum(real[script.DIVIDED][rank]["states"])


# --- ddp --------------------------------------------------------------------------------------------------------------


def test_buckets_are_gradients_and_views_of_them_are_no_more() -> None:
    alone, copied = traced(), traced(parallel=DDP)
    viewed = traced(parallel=DDP, ddp_options={"gradient_as_bucket_view": True})
    assert copied.at(2).breakdown["gradients"] == pytest.approx(2 * alone.at(2).breakdown["gradients"], rel=0.03)
    assert viewed.at(2).breakdown["gradients"] == pytest.approx(alone.at(2).breakdown["gradients"], rel=0.05)
    assert held(copied, "gradients") == BYTES  # the buckets stay, the gradients are freed after the step


def test_collectives_are_logged_with_their_bytes_and_whose_they_are() -> None:
    def loss(model: Any, words: torch.Tensor) -> torch.Tensor:
        out = model(words).float().mean()
        torch.distributed.all_reduce(out.detach().clone())
        return out

    timeline = traced(parallel=DDP, loss=loss, ddp_options={"bucket_cap_mb": 0.02})
    mine = [one for one in timeline.collectives if not one.by_layout]
    assert [(one.name, one.phase, one.step) for one in mine] == [
        ("all_reduce", "forward", 1),
        ("all_reduce", "forward", 2),
    ]
    buckets = [one for one in timeline.collectives if one.by_layout and one.name == "all_reduce" and one.step == 2]
    assert len(buckets) == 4
    assert sum(one.bytes.base for one in buckets) == BYTES
    assert {(one.ranks, one.dimension) for one in buckets} == {(4, "data")}
    assert [one.position for one in buckets] == sorted(one.position for one in buckets)


def test_users_own_wrapper_is_traced_with_its_hook() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    def apply(model: torch.nn.Module, mesh: Any) -> torch.nn.Module:
        made = torch.nn.parallel.DistributedDataParallel(model)
        made.register_comm_hook(None, fp16_compress_hook)
        return made

    timeline = traced(parallel=Parallel(2, apply=apply, init="cuda"))
    assert {one.bytes.base for one in timeline.collectives if one.name == "all_reduce"} == {BYTES // 2}


def test_a_trace_leaves_no_trace() -> None:
    import torch.nn.parallel.distributed as ddp

    model = Net()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    reducer, logger = ddp._verify_param_shape_across_processes, torch.distributed.Logger
    for settings in (
        {"data_parallel_ranks": 2},
        {"parallel": DDP},
        {"parallel": Parallel(2, kind="fsdp1", init="cuda")},
    ):
        traced(model=model, **settings)
    assert not torch.distributed.is_initialized()
    assert (ddp._verify_param_shape_across_processes, torch.distributed.Logger) == (reducer, logger)
    assert {name: list(vars(module)) for name, module in model.named_modules()} == {
        name: list(values) for name, values in before.items()
    }
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_parameters_without_a_gradient_are_said() -> None:
    with pytest.raises(UnsupportedStepError, match="find_unused_parameters=True"):
        traced(model=script.Partly, parallel=DDP)
    found = {"find_unused_parameters": True}
    assert not traced(model=script.Partly, parallel=DDP, ddp_options=found).notes
    # A framework may average gradients in its own way.
    counted = traced(model=script.Partly, data_parallel_ranks=2)
    assert "find_unused_parameters" in counted.notes[-1].message
    told = traced(model=script.Partly, data_parallel_ranks=2, ddp_options=found)
    assert (counted.events, told.notes) == (told.events, ())


def test_options_are_read_off_a_wrapper_and_off_arguments() -> None:
    class Wrapper:
        find_unused_parameters, gradient_as_bucket_view, static_graph = True, False, True
        bucket_bytes_cap_default, bucket_bytes_cap = False, 3 * 2**20
        broadcast_buffers = False

    found = options_of(Wrapper())  # type: ignore[arg-type]
    assert {name: found[name] for name in ("find_unused_parameters", "static_graph", "bucket_cap_mb")} == {
        "find_unused_parameters": True,
        "static_graph": True,
        "bucket_cap_mb": 3,
    }
    assert "gradient_as_bucket_view" not in found
    assert len(found) == 4
    given = {"broadcast_buffers": False, "bucket_cap_mb": 3, "process_group": object(), "static_graph": True}
    assert chosen_options({**given, "find_unused_parameters": True}) == found
    timeline = traced(data_parallel_ranks=2, ddp_options=chosen_options({"broadcast_buffers": False}))
    assert not [one for one in timeline.collectives if one.name == "broadcast" and one.step == 1]
    assert chosen_options({}) == {}


# --- zero1 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 7])
def test_states_are_divided_as_the_optimizer_divides_them(ranks: int) -> None:
    layout = Parallel(ranks, kind="zero1")
    each = [held(traced(rank, parallel=layout), "optimizer_states") for rank in range(ranks)]
    steps = 4 * len(list(Net().parameters()))  # AdamW counts its steps on the host or in a number each
    assert sum(each) == pytest.approx(2 * BYTES, abs=steps)
    assert held(traced(parallel=layout), "optimizer_states") == max(each)


def test_an_optimizer_that_cannot_be_built_anew_is_refused() -> None:
    class Own(torch.optim.SGD):
        def __init__(self, params: Any, secret: int) -> None:
            super().__init__(params, lr=0.1)

    with pytest.raises(UnsupportedTechniqueError):
        traced(parallel=Parallel(2, kind="zero1"), optimizer=lambda parameters: Own(parameters, 3))


def test_an_optimizer_that_evaluates_the_loss_itself_is_refused() -> None:
    with pytest.raises(UnsupportedTechniqueError, match="LBFGS"):
        traced(parallel=Parallel(2, kind="zero1"), optimizer=torch.optim.LBFGS)


# --- fsdp1 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("init", ["meta", "cpu", "cuda"])
def test_fsdp1_holds_a_flat_shard_of_each_block_and_frees_with_other_streams(init: Any) -> None:
    timeline = traced(parallel=Parallel(4, kind="fsdp1", init=init))
    estimate = timeline.at(2)
    assert held(timeline, "parameters") == pytest.approx(BYTES / 4, rel=0.01)
    assert held(timeline, "optimizer_states") == pytest.approx(2 * BYTES / 4, rel=0.15)
    assert estimate.upper_reasons == ("streams",)
    assert estimate.peak_upper >= estimate.peak_reserved
    # The rate limiter: the CPU gathers no more than two blocks ahead, and waits until an earlier one is freed.
    phases = {phase.start for phase in timeline.phases}
    waited = [one for one in timeline.deferred if one.until not in (*phases, len(timeline.events))]
    assert len(waited) >= 6


def test_fsdp1_with_offload_keeps_flat_shards_and_their_gradients_in_pinned_host_memory() -> None:
    written, offloaded = (traced(parallel=Parallel(4, kind="fsdp1", offload=offload)) for offload in (False, True))
    assert held(offloaded, "parameters") == held(offloaded, "optimizer_states") == 0
    pinned = sorted(block.size.base for block in offloaded.host_blocks if block.pinned)
    shards = sorted(block.size.base for block in written.blocks if block.category == "optimizer_states")
    # Of each flat parameter two states are on the GPU as written; its shard and its gradient are pinned otherwise.
    assert sum(pinned) == pytest.approx(2 * BYTES / 4, rel=0.01)
    assert sum(shards) == pytest.approx(sum(pinned), rel=0.15)
    gathers = [sum(one.name.startswith("all_gather") for one in each.collectives) for each in (written, offloaded)]
    assert gathers[0] == gathers[1]


def test_methods_of_the_model_are_reduced_too() -> None:
    """A framework's loss calls ``training_step``: no forward of the model itself runs."""

    class Module(Net):
        def training_step(self, words: torch.Tensor) -> torch.Tensor:
            return self.forward(words).float().mean()

    def loss(model: Any, words: torch.Tensor) -> torch.Tensor:
        return model.training_step(words)

    timeline = traced(model=Module, loss=loss, data_parallel_ranks=2, accumulate=3)
    reduced = [one for one in timeline.collectives if one.name == "all_reduce"]
    # As frameworks do: only the last micro-batch's.
    assert [(one.step, one.micro_batch) for one in reduced] == [(1, 1), (2, 1)]
    assert all(one.bytes.base == BYTES for one in reduced)
