"""Plans over several GPUs: the layout that is taken, what stays as written, and what is refused before any work."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from each import each

torch = pytest.importorskip("torch")

from plan_arguments import in_options  # noqa: E402
from plan_gpus_cases import LINK, PLAIN, a_step, build, planned, spread  # noqa: E402

from vram_guard import Parallel, Plan, TrainingStep, plan, trace  # noqa: E402
from vram_guard.errors import InvalidInputError  # noqa: E402
from vram_guard.parallel.links import topology  # noqa: E402
from vram_guard.plan import PlanOptions  # noqa: E402
from vram_guard.plan.communication import communication  # noqa: E402
from vram_guard.plan.layouts import ModelSize, layout_name, layouts_of  # noqa: E402
from vram_guard.plan.step_time import card_of, step_seconds  # noqa: E402
from vram_guard.report.as_json import as_dict  # noqa: E402
from vram_guard.report.html import html_report  # noqa: E402
from vram_guard.report.text import render  # noqa: E402

# --- what is taken --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def roomy() -> Plan:
    return planned()


def seconds_of(layout: Parallel, batch_size: int) -> float:
    """Traced and timed by itself."""
    timeline = trace(a_step(parallel=layout), compute_capability=(8, 0), checked=False)
    card, wires = card_of(None, (8, 0)), topology(LINK, gpus=layout.gpus, node=8)
    time = step_seconds(timeline, batch_size, card)
    return (time + communication(timeline, batch_size, card, wires).step_time).seconds


@pytest.mark.torch_since(2, 6)
def test_of_those_that_fit_the_fastest_is_taken(roomy: Plan) -> None:
    """None that fits and is faster was passed over: each was traced again, by itself."""
    layouts = [layout for layout in layouts_of(16, 8, PLAIN, "bf16-mixed") if layout is not None]
    alone = {layout: seconds_of(layout, 4) for layout in layouts}

    assert len(alone) == 6
    assert roomy.fits
    taken = spread(roomy).layout
    assert alone[taken] <= 1.001 * min(alone.values())
    assert spread(roomy).seconds == pytest.approx(alone[taken], rel=0.01)
    assert [way.layout for way in spread(roomy).ways] == layouts


@pytest.mark.torch_since(2, 6)
def test_less_memory_takes_what_needs_less(roomy: Plan) -> None:
    """A budget between two layouts: the faster one no longer fits as it is."""
    keeps = next(way for way in spread(roomy).ways if way.layout.reshard is False)
    divides = next(way for way in spread(roomy).ways if way.layout.reshard and way.layout.kind == "fsdp2")
    assert divides.peak < keeps.peak
    tight = planned(budget=str((divides.peak + keeps.peak) // 2), margin=0.0, allow=[])

    assert tight.fits
    assert spread(tight).layout == divides.layout
    assert tight.peak <= tight.budget.usable


@pytest.mark.torch_since(2, 6)
def test_the_change_within_a_layout_is_the_planners_own() -> None:
    """What does not fit in any layout as it is, is changed as on one GPU, and named."""
    made = planned(64, "160MiB", margin=0.0, layouts=["fsdp2"], allow=["accumulate"])

    assert made.fits
    assert made.splits > 1
    assert made.peak <= made.budget.usable < made.before.peak_reserved
    assert spread(made).samples == 64 * 16
    taken = next(way for way in spread(made).ways if way.layout == spread(made).layout)
    assert taken.changes == f"{made.splits} micro-batches of {64 // made.splits}"


@pytest.mark.torch_since(2, 6)
def test_nothing_fits_is_said_with_the_nearest() -> None:
    made = planned(4, "2MiB", layouts=["fsdp2"], allow=[])

    assert not made.fits
    assert made.peak > made.budget.usable
    assert all(not way.fits and str(way.why) for way in spread(made).ways)


# --- beside the plan ------------------------------------------------------------------------------------------------


@pytest.mark.torch_since(2, 6)
def test_a_whole_card_leaves_room_for_nccl() -> None:
    made = plan(a_step(), 4, gpu="A100 80GB", gpus=16, options=PlanOptions(link=LINK, layouts=["fsdp2"]))
    alone = plan(a_step(), 4, gpu="A100 80GB")
    taken = spread(made).outside

    assert taken.high > 0
    assert alone.budget.available - made.budget.available == taken.high
    assert planned(layouts=["fsdp2"]).budget.available == 2**30  # an amount is PyTorch's own


def test_a_card_of_data_parallel_processes_leaves_room_for_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = a_step(data_parallel_ranks=4)
    alone, four = (plan(step, 4, gpu="A100 80GB").budget for step in (a_step(), ranks))
    taken = alone.available - four.available
    assert taken > 2**29
    assert "NCCL" in four.explain()
    assert plan(ranks, 4, "1GiB").budget.available == 2**30
    # What is free on a device of this machine: less once the processes talk, and what they have taken is not free.
    free = replace(alone, free=alone.available, source="cuda:0")
    assert plan(ranks, 4, free).budget.available == alone.available - taken
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert plan(ranks, 4, free).budget.available == alone.available
    assert plan(ranks, 4, gpu="A100 80GB").budget.available == four.available


@pytest.mark.torch_since(2, 6)
def test_host_memory_is_that_of_a_node() -> None:
    made = planned(layouts=["offload"])

    assert spread(made).host_per_node == made.estimate.host_peak * 8 > 0


@pytest.mark.torch_since(2, 6)
def test_a_layout_of_ones_own_is_planned_as_it_is() -> None:
    layout = Parallel(gpus=8, kind="fsdp2")
    made = plan(a_step(parallel=layout), 64, "160MiB", options=PlanOptions(link=LINK), allow=["accumulate"])

    assert made.timeline is not None
    assert made.timeline.parallel == layout
    assert made.effective_batch_size == 64 * 8
    assert "any other number" not in " ".join(made.reasons)  # it is traced with one number of samples alone
    assert made.fits
    assert made.splits > 1


@pytest.mark.torch_since(2, 6)
def test_the_report_and_the_json_say_all_of_it(roomy: Plan) -> None:
    made = roomy
    text, found = render(made, width=100), json.loads(json.dumps(as_dict(made)))["spread"]

    page = html_report(made)
    assert "HSDP 2 x 8" in page
    assert "16 on 2 nodes" in page
    assert '<td>HSDP 2 x 8</td><td class="n">' in page, "figures are not broken"
    # As written it is not spread: what is drawn and measured is the step under the layout that is taken.
    assert ">planned: bf16-mixed, batch 4</text>" in page
    assert "as written:" not in page
    for words in ("16 on 2 nodes", "64 over all GPUs", "FSDP2, weights kept gathered", "HSDP 2 x 8", "NCCL", "taken"):
        assert words in text
    assert found["gpus"] == 16
    assert found["samples_per_step"] == 64
    assert found["layout"]["kind"] == spread(made).layout.kind
    assert found["outside_allocator"]["low"] <= found["outside_allocator"]["high"]
    assert {"fits", "why", "peak_reserved", "seconds_per_step", "words"} <= found["ways"][0].keys()
    assert "spread" not in as_dict(plan(a_step(), 4, "1GiB", allow=[]))


@pytest.mark.torch_since(2, 6)
def test_least_memory_is_a_lower_bound() -> None:
    size = ModelSize.of(build())
    for layout in layouts_of(16, 8, PLAIN, "bf16-mixed"):
        assert layout is not None
        taken = trace(a_step(parallel=layout), checked=False).at(2).peak_reserved
        assert size.least(layout) <= taken, layout_name(layout)


# --- refused before any work ----------------------------------------------------------------------------------------


def untouched() -> torch.nn.Module:
    raise AssertionError("a model was built")


@each(
    ("wishes", "said"),
    [
        ({"gpus": 12}, "12 GPUs are no whole number of nodes of 8"),
        ({"gpus": 0}, "gpus must be between 1"),
        ({"gpus": True}, "gpus must be a whole number"),
        ({"gpus": 2.0}, "gpus must be a whole number"),
        ({"gpus": "many"}, "gpus must be a whole number"),
        ({"gpus": 2**18}, "gpus must be at most"),
        ({"gpus": 16, "node": 0}, "node must be between 1"),
        ({"gpus": 16, "link": "token-ring"}, "unknown link"),
        ({"gpus": 16, "gpu": "RTX 4090", "link": "nvlink"}, "RTX 4090"),
        ({"gpus": 16, "layouts": ["fsdp3"]}, "did you mean 'fsdp2'"),
        ({"gpus": 16, "layouts": []}, "layouts is empty"),
        ({"gpus": 12}, "12 GPUs are no whole number"),
        ({"gpus": 16, "grow": True}, "grow and gpus"),
        ({"node": 8}, "give gpus as well"),
        ({"layouts": ["ddp"]}, "give gpus as well"),
        ({"link": "nvlink"}, "give gpus as well"),
        ({"gpus": 8, "layouts": 3}, "layouts must be names"),
    ],
)
def test_what_makes_no_sense_is_refused(wishes: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        plan(a_step(model=untouched), 4, **in_options({"gpu": "A100 80GB", **wishes}))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda step: step.with_(parallel=Parallel(gpus=2)), "spread over GPUs already"),
        (lambda step: step.with_(optimizer=None), "no optimizer"),
        (lambda step: step.with_(data_parallel_ranks=4), "data_parallel_ranks=4"),
    ],
)
def test_a_step_that_cannot_be_spread_is_refused(change: Callable[[TrainingStep], TrainingStep], said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        plan(change(a_step(model=untouched)), 4, "1GiB", gpus=16)


def test_a_layout_that_the_machine_cannot_have_is_not_blamed_on_the_batch() -> None:
    with pytest.raises(InvalidInputError):
        planned(gpus=8, layouts=("hsdp",))
    with pytest.raises(InvalidInputError, match="even number of GPUs"):
        planned(gpus=3, layouts=("tensor",))
