"""DeepSpeed's own engine in a trace: stages 1 to 3 of ZeRO. Most of it runs where DeepSpeed is installed."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from deepspeed_cases import engine
from each import each
from parallel_cases import Net, step

from vram_guard import Parallel, trace
from vram_guard.errors import InvalidInputError, MissingLibraryError, UnsupportedTechniqueError
from vram_guard.parallel.deepspeed import STAGES, TESTED, check_config, layout_of, placeholder
from vram_guard.simulate import holds_at
from vram_guard.simulate.tracing.run import run_step

#: Elements: small, so that the buckets are not all there is. Persistent are parameters that stage 3 leaves whole.
SMALL = {"reduce_bucket_size": 2000, "allgather_bucket_size": 2000}
DIVIDED = {
    **SMALL,
    "stage3_param_persistence_threshold": 0,
    "stage3_prefetch_bucket_size": 4000,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
}


def given(kind, ranks=8, section=None, **settings):
    config = {"zero_optimization": section or (DIVIDED if kind == "deepspeed3" else SMALL)}
    return step(Parallel(ranks, kind=kind), **{"precision": "bf16-mixed", "deepspeed_config": config, **settings})


def most(timeline, category):
    live = peak = 0
    for event in timeline.events:
        block = timeline.blocks[max(event, ~event)]
        if block.category == category:
            live += block.size.base if event >= 0 else -block.size.base
            peak = max(peak, live)
    return peak


def elements(model=Net):
    return sum(parameter.numel() for parameter in model().parameters())


def test_without_deepspeed_its_kinds_name_what_to_install(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "deepspeed" else find(name))
    with pytest.raises(MissingLibraryError, match=rf"pip install deepspeed=={TESTED[-1]}"):
        run_step(step(Parallel(8, kind="deepspeed2")), 2, (9, 0))


@engine
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("deepspeed1", {}),
        ("deepspeed2", {"accumulate": 2}),
        ("deepspeed2", {"precision": "16-mixed"}),
        ("deepspeed3", {}),
        ("deepspeed3", {"precision": "32-true", "model": Net()}),
    ],
)
def test_batches_of_two_and_three_say_what_seven_takes_event_by_event(kind, settings):
    timeline = trace(given(kind, **settings), check_at=7)
    assert timeline.traced == (2, 3, 7)
    assert not timeline.notes
    assert holds_at(run_step(given(kind, **settings), 7, (8, 0)), timeline, 7)


@engine
@pytest.mark.parametrize("kind", STAGES)
def test_master_weights_and_states_are_divided(kind):
    """12 bytes a parameter: master, and Adam's two averages (ZeRO, Rajbhandari et al., 2020, section 3.1)."""
    taken = {ranks: most(run_step(given(kind, ranks), 2, (9, 0)), "optimizer_states") for ranks in (2, 8)}
    assert taken[2] == pytest.approx(12 * elements() / 2, rel=0.02)
    assert taken[8] == pytest.approx(12 * elements() / 8, rel=0.02)


@engine
def test_stage_three_has_its_part_of_the_weights_and_gathers_the_rest():
    whole, divided = (run_step(given(kind), 2, (9, 0)) for kind in ("deepspeed2", "deepspeed3"))
    assert whole.at(2).breakdown["parameters"] >= 2 * elements()
    gathers = [c for c in divided.collectives if c.step == 2 and c.name == "all_gather_into_tensor"]
    assert {c.phase for c in gathers} >= {"forward", "backward"}
    assert {(c.ranks, c.dimension) for c in gathers} == {(8, "data")}
    assert divided.streams is not None
    assert max(divided.streams) > 0
    held = {kind: most(one, "parameters") for kind, one in (("deepspeed2", whole), ("deepspeed3", divided))}
    assert held["deepspeed3"] < held["deepspeed2"]


@engine
def test_the_section_on_zero_is_the_users():
    def buckets(size):
        timeline = run_step(given("deepspeed2", section={**SMALL, "reduce_bucket_size": size}), 2, (9, 0))
        return Counter(c.phase for c in timeline.collectives if c.step == 2)["backward"]

    assert buckets(2000) > buckets(100_000) == 1


def cpu_adam(parameters):
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(parameters, lr=1e-3)


def on_host(kind="deepspeed2", **more):
    """A step whose states DeepSpeed keeps on the host: GPU and host memory, and what of the latter is pinned."""
    section = {**(DIVIDED if kind == "deepspeed3" else SMALL), "offload_optimizer": {"device": "cpu"}, **more}
    timeline = run_step(given(kind, 2, section, optimizer=cpu_adam), 2, (9, 0))
    held = most_held = 0
    for event in timeline.host_events:
        size = timeline.host_blocks[max(event, ~event)].size.base
        held += size if event >= 0 else -size
        most_held = max(most_held, held)
    return timeline, most_held, sum(block.size.base for block in timeline.host_blocks if block.pinned)


@engine
@pytest.mark.parametrize("kind", STAGES)
def test_states_may_lie_in_host_memory(kind):
    """Master, gradient, two averages and the weights to send back: 4 + 4 + 8 + 2 bytes a parameter (ZeRO-Offload)."""
    timeline, held, pinned = on_host(kind)
    assert most(timeline, "optimizer_states") == 0
    assert most(run_step(given(kind, 2), 2, (9, 0)), "optimizer_states") > 12 * elements() / 2 * 0.98
    assert held == pytest.approx(18 * elements() / 2, rel=0.04)
    unpinned = on_host(kind, offload_optimizer={"device": "cpu", "pin_memory": False})
    assert pinned >= 6 * elements() / 2 > unpinned[2] == 0
    assert unpinned[1] == pytest.approx(held, rel=0.03)
    assert unpinned[0].at(2).peak_allocated == timeline.at(2).peak_allocated


@engine
def test_a_layout_may_keep_any_optimizers_states_there():
    """The user's AdamW stays; DeepSpeed, which asks for its own one, is told that another one is meant."""
    layout = Parallel(2, kind="deepspeed2", offload=True)
    timeline = run_step(given("deepspeed2", 2).with_(parallel=layout), 2, (9, 0))
    assert most(timeline, "optimizer_states") == 0
    with pytest.raises(InvalidInputError, match="DeepSpeedCPUAdam"):
        run_step(given("deepspeed2", 2, {**SMALL, "offload_optimizer": {"device": "cpu"}}), 2, (9, 0))


@engine
def test_deepspeed_makes_the_optimizer_that_its_config_names():
    """Its fused Adam is C++: nothing is compiled, and its states are those of torch's."""
    config = {"zero_optimization": SMALL, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    made = run_step(given("deepspeed2", 2, optimizer=placeholder).with_(deepspeed_config=config), 2, (9, 0))
    torchs = run_step(given("deepspeed2", 2), 2, (9, 0))
    assert most(made, "optimizer_states") == pytest.approx(most(torchs, "optimizer_states"), abs=1024)
    lamb = {**config, "optimizer": {"type": "Lamb", "params": {}}}
    # Without a GPU, DeepSpeed knows none of its extensions for one, and says so itself.
    with pytest.raises(
        (UnsupportedTechniqueError, InvalidInputError), match=r"extension fused_lamb|not been implemented"
    ):
        run_step(given("deepspeed2", 2, optimizer=placeholder).with_(deepspeed_config=lamb), 2, (9, 0))


def section(**more):
    return {"zero_optimization": more}


@each(
    ("config", "error", "words"),
    [
        (section(reduce_bucket_size="auto"), InvalidInputError, r"set zero_optimization\.reduce_bucket_size"),
        ({"optimizer": {"params": {"lr": "auto"}}}, InvalidInputError, r"set optimizer\.params\.lr"),
        (section(stage=3), InvalidInputError, "asks for stage 3, and kind for stage 2"),
        (section(offload_param={"device": "cpu"}), InvalidInputError, "offload_param needs stage 3, not 2"),
        (section(offload_optimizer={"device": "disk"}), InvalidInputError, r"offload_optimizer\.device"),
        (section(offload_optimizer={"device": "nvme"}), UnsupportedTechniqueError, "offload_optimizer to nvme"),
        ({"zero_optimization": 2}, InvalidInputError, "must be a section, not 2"),
        (section(zero_quantized_weights=True), UnsupportedTechniqueError, "zero_quantized_weights"),
        (section(mics_shard_size=4), UnsupportedTechniqueError, "mics_shard_size"),
        ({"torch_autocast": {"enabled": True}}, UnsupportedTechniqueError, "torch_autocast"),
        ({"managed_gradient_accumulation": False}, UnsupportedTechniqueError, "managed_gradient_accumulation"),
    ],
)
def test_a_config_that_cannot_be_used_is_refused_before_any_work(config, error, words):
    with pytest.raises(error, match=words):
        check_config(config, 2)


@engine
def test_a_step_that_deepspeed_does_not_train_so_is_refused():
    with pytest.raises(UnsupportedTechniqueError):
        run_step(given("deepspeed2", clip_grad_value=1.0), 2, (9, 0))
    with pytest.raises(UnsupportedTechniqueError):
        run_step(given("deepspeed2", optimizer=None), 2, (9, 0))
    model = Net()
    model.head.weight.ds_id = 0
    with pytest.raises(UnsupportedTechniqueError, match=r"deepspeed\.zero\.Init"):
        run_step(given("deepspeed3", model=model), 2, (9, 0))


@engine
@pytest.mark.parametrize("kind", STAGES)
def test_a_trace_leaves_nothing_behind(kind):
    model = Net()
    before = {name: (id(p), p.clone()) for name, p in model.named_parameters()}
    environment, linear = dict(os.environ), torch.nn.functional.linear
    first = run_step(given(kind, model=model), 2, (9, 0))
    assert all(id(p) == before[n][0] and torch.equal(p, before[n][1]) for n, p in model.named_parameters())
    assert not dist.is_initialized()
    assert dict(os.environ) == environment
    assert torch.nn.functional.linear is linear
    assert run_step(given(kind, model=model), 2, (9, 0)).events == first.events
    model(torch.zeros(2, 8, dtype=torch.long)).sum().backward()


def test_a_release_that_was_not_tested_is_refused(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: object())
    monkeypatch.setattr(importlib.metadata, "version", lambda _name: "0.1.0")
    with pytest.raises(UnsupportedTechniqueError, match=r"0\.19\.8"):
        run_step(step(Parallel(8, kind="deepspeed2")), 2, (9, 0))


@pytest.mark.parametrize(
    ("stage", "error"),
    [(0, UnsupportedTechniqueError), (4, InvalidInputError), ("2", InvalidInputError), (True, InvalidInputError)],
)
def test_a_stage_that_nobody_knows_is_refused(stage, error):
    with pytest.raises(error, match="stage"):
        layout_of(section(stage=stage), gpus=4)
    assert layout_of(section(stage=3), gpus=4).kind == "deepspeed3"
