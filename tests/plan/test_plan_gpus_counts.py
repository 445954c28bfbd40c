"""Plans over several GPUs: the training stays the one that was written, on as many GPUs as suffice."""

from __future__ import annotations

from typing import Any

import pytest
from plan_gpus_cases import LINK, a_step, planned, spread

from vram_guard import Parallel, plan, trace
from vram_guard.plan import PlanOptions
from vram_guard.plan.layout_facts import shares
from vram_guard.plan.layouts import LAYOUTS, layout_name, layouts_of

# --- the training stays ---------------------------------------------------------------------------------------------


def test_the_samples_of_a_step_stay_under_every_layout() -> None:
    for layout in layouts_of(16, 8, LAYOUTS, "32-true"):
        assert layout is not None
        assert shares(16, layout, 4 * 16) * layout.data_ranks == 4 * 16


@pytest.mark.torch_since(2, 6)
def test_accumulated_batches_are_samples_too() -> None:
    made = plan(a_step(accumulate=3), 4, "1GiB", gpus=8, options=PlanOptions(link=LINK, layouts=["fsdp2"]))

    assert (spread(made).samples, made.effective_batch_size, made.accumulate) == (96, 96, 3)


def test_weights_travel_in_the_precision_of_the_step() -> None:
    def dtypes(precision: str) -> set[tuple[str | None, str | None]]:
        layouts = layouts_of(16, 8, ["fsdp2", "hsdp"], precision)
        return {(layout.param_dtype, layout.reduce_dtype) for layout in layouts if layout is not None}

    assert dtypes("bf16-mixed") == {("bfloat16", "float32")}
    assert dtypes("32-true") == {(None, None)}


@pytest.mark.torch_since(2, 6)
def test_what_half_precision_weights_change_is_said() -> None:
    def said(precision: str, layout: str) -> str:
        made = plan(a_step(precision=precision), 4, "1GiB", gpus=8, options=PlanOptions(link=LINK, layouts=[layout]))
        return dict(spread(made).facts()).get("precision", "")

    assert "not equal" in said("bf16-mixed", "fsdp2")
    assert said("bf16-mixed", "ddp") == said("32-true", "fsdp2") == ""


def test_layouts_have_names() -> None:
    names = [layout_name(layout) for layout in layouts_of(8, 8, LAYOUTS, "32-true")]

    kept = "FSDP2, weights kept gathered"
    tensor = ["FSDP2 4 x TP 2", "FSDP2 2 x TP 4", "TP 8"]
    assert names == ["DDP", "ZeRO-1", kept, "FSDP2", *tensor, "FSDP2, in host memory"]
    assert [layout_name(layout) for layout in layouts_of(1, 8, LAYOUTS, "32-true")] == ["one GPU"]


# --- how many GPUs --------------------------------------------------------------------------------------------------


@pytest.mark.torch_since(2, 6)
def test_more_gpus_never_need_more_memory_for_the_same_samples_of_a_rank() -> None:
    peaks = []
    for count in (1, 2, 4, 8, 16, 64):
        layout = Parallel(gpus=count, kind="fsdp2", param_dtype="bf16", reduce_dtype="fp32")
        peaks.append(trace(a_step(parallel=layout), checked=False).at(4).peak_allocated)

    assert peaks[1:] == sorted(peaks[1:], reverse=True)
    assert peaks[-1] < peaks[1]


@pytest.mark.torch_since(2, 6)
def test_auto_finds_the_fewest() -> None:
    wishes: dict[str, Any] = {"layouts": ["fsdp2"], "margin": 0.0, "allow": ["accumulate"]}
    made = planned(8, "70MiB", gpus="auto", **wishes)
    found = spread(made)

    assert made.fits
    assert found.found
    assert found.gpus > 1
    assert found.samples == 8
    assert not planned(16 // found.gpus, "70MiB", gpus=found.gpus // 2, **wishes).fits


def test_auto_takes_one_gpu_where_that_suffices() -> None:
    made = planned(64, "4GiB", gpus="auto", allow=[])

    assert (spread(made).gpus, spread(made).layout) == (1, None)
    assert made.fits
    assert not made.changed


def test_one_gpu_is_planned_as_it_is_alone() -> None:
    wishes: dict[str, Any] = {"allow": ["accumulate"]}
    alone, among = plan(a_step(), 64, "200MiB", **wishes), planned(64, "200MiB", gpus=1, **wishes)

    assert among.changes() == alone.changes()
    assert among.estimate == alone.estimate
