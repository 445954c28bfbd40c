"""The picture of a timeline, and the snapshot that PyTorch's memory_viz page opens."""

from __future__ import annotations

import copy
import pickle
import pickletools
import xml.etree.ElementTree as ET
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.cuda import _memory_viz

from vram_guard import Budget, TrainingStep
from vram_guard.errors import InvalidInputError
from vram_guard.plan import plan
from vram_guard.report import save
from vram_guard.report.picture import picture
from vram_guard.report.snapshot import PICKLE_PROTOCOL, snapshot
from vram_guard.simulate import trace
from vram_guard.timeline import Affine, Block, Phase, Timeline

if TYPE_CHECKING:
    from pathlib import Path

MIB = 2**20


def network() -> torch.nn.Module:
    layers = [torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(16, 3, 3, padding=1)]
    return torch.nn.Sequential(*layers)


STEP = TrainingStep(
    model=network,
    batch=lambda size: torch.zeros(size, 3, 64, 64),
    loss=lambda model, images: torch.nn.functional.mse_loss(model(images), images),
    optimizer=torch.optim.AdamW,
)


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    return trace(STEP)


# --- the picture ---


def texts(svg: str) -> str:
    """What the picture says; its XML is well-formed."""
    return " | ".join(element.text or "" for element in ET.fromstring(svg).iter() if element.text)


def test_a_picture_shows_peak_phases_and_budget(timeline: Timeline, tmp_path: Path) -> None:
    budget, estimate = Budget.of("64MiB", margin=0), timeline.at(16)
    save(estimate, tmp_path / "step.svg", timeline=timeline, budget=budget)
    drawn = (tmp_path / "step.svg").read_text("utf-8")
    said = texts(drawn)
    for part in ("step 1", "step 2", "forward", "backward", "activations", "reserved", "budget", "MiB"):
        assert part in said
    assert estimate.peak_operator in said
    assert estimate.peak_source in said
    assert "var(" not in drawn  # which image viewers do not know


def test_a_plan_is_drawn_before_and_after() -> None:
    made = plan(STEP, 64, "40MiB", margin=0, allow="accumulate")
    assert made.splits > 2
    said = texts(picture(made))
    assert "two are drawn" in said
    assert said.count("allocations and frees, in order") == 2
    assert texts(picture(plan(STEP, 2, "4GiB"))).count("allocations and frees, in order") == 1


def test_a_plan_without_timelines_is_refused() -> None:

    made = replace(plan(STEP, 2, "4GiB"), timeline=None)
    with pytest.raises(InvalidInputError, match="timelines"):
        picture(made)
    for name in ("s.pickle", "s.svg", "s.png"):
        with pytest.raises(InvalidInputError):
            save(made, name)


def test_an_empty_timeline_can_be_drawn() -> None:
    blocks = (Block(Affine(0, 0), "parameters", "", "", ""),)
    empty = Timeline(blocks, (0,), (Phase("setup", 0, 0),), (2, 3))
    assert texts(picture(empty.at(1), timeline=empty))


# --- the snapshot ---


def loaded(path: Path) -> dict[str, Any]:
    return pickle.loads(path.read_bytes())


@pytest.fixture
def viewed(timeline: Timeline, tmp_path: Path) -> dict[str, Any]:
    save(timeline.at(16), tmp_path / "step.pickle", timeline=timeline)
    return loaded(tmp_path / "step.pickle")


def test_the_pickle_holds_plain_values_in_a_protocol_that_the_page_reads(timeline: Timeline, tmp_path: Path) -> None:
    save(timeline.at(16), tmp_path / "step.pickle", timeline=timeline)
    operations = [operation for operation, *_ in pickletools.genops((tmp_path / "step.pickle").read_bytes())]
    assert max(operation.proto for operation in operations) <= PICKLE_PROTOCOL == 4
    # Nothing is imported or called on loading: only dicts, lists, tuples, text, numbers.
    assert not {"GLOBAL", "STACK_GLOBAL", "REDUCE", "NEWOBJ"} & {operation.name for operation in operations}


def test_segments_are_covered_by_their_blocks(viewed: dict[str, Any], timeline: Timeline) -> None:
    for segment in viewed["segments"]:
        ends = [segment["address"]] + [block["address"] + block["size"] for block in segment["blocks"]]
        assert [block["address"] for block in segment["blocks"]] == ends[:-1]
        assert ends[-1] == segment["address"] + segment["total_size"]
        live = [block for block in segment["blocks"] if block["state"] == "active_allocated"]
        assert sum(block["size"] for block in live) == segment["allocated_size"] == segment["active_size"]
        assert all(block["frames"] for block in live)
    assert sum(segment["total_size"] for segment in viewed["segments"]) == timeline.at(16).peak_reserved


def test_the_trace_never_hands_out_a_live_address_and_reaches_the_peak(
    viewed: dict[str, Any], timeline: Timeline
) -> None:
    live: dict[int, int] = {}
    reserved = peak = peak_reserved = 0
    for entry in viewed["device_traces"][0]:
        if entry["action"] == "alloc":
            assert all(entry["addr"] + entry["size"] <= at or at + size <= entry["addr"] for at, size in live.items())
            live[entry["addr"]] = entry["size"]
            peak = max(peak, sum(live.values()))
        elif entry["action"] == "free_completed":
            assert live.pop(entry["addr"]) == entry["size"]
        elif entry["action"] == "segment_alloc":
            reserved += entry["size"]
            peak_reserved = max(peak_reserved, reserved)
    assert peak_reserved == timeline.at(16).peak_reserved
    assert 0 <= timeline.at(16).peak_allocated - peak < len(timeline.blocks) * 512  # only rounding lies between
    left = {block["address"] for segment in viewed["segments"] for block in segment["blocks"] if block["frames"]}
    assert left == set(live)


def test_frames_name_operator_line_module_and_category(viewed: dict[str, Any]) -> None:
    names = [
        tuple(frame["name"] for frame in entry["frames"])
        for entry in viewed["device_traces"][0]
        if entry["action"] == "alloc"
    ]
    assert any(name[0].startswith("aten.") and name[-1] == "activations" for name in names)
    lines = {frame["line"] for entry in viewed["device_traces"][0] for frame in entry["frames"]}
    assert len(lines) > 1


def test_torch_s_own_viewer_reads_it(viewed: dict[str, Any]) -> None:
    page = _memory_viz.trace_plot(copy.deepcopy(viewed))
    assert "snapshot.pickle" in page
    assert "snapshot.pickle" in _memory_viz.segment_plot(viewed)
    told = _memory_viz.trace(viewed)
    assert "cudaMalloc" in told
    assert "aten" not in told.splitlines()[0]
    assert told.count(" = cudaMalloc(") == len(viewed["segments"])
    summary = _memory_viz.segsum(viewed)
    assert f"segments: {len(viewed['segments'])}" in summary
    for flames in (_memory_viz.segments, _memory_viz.memory):
        drawn = flames(viewed, format_flamegraph=lambda lines: lines)
        assert "active_allocated" in drawn
        assert "parameters" in drawn
    if not hasattr(_memory_viz, "filter_alloc_free_pairs"):  # before torch 2.5
        return
    kept = _memory_viz.filter_alloc_free_pairs(copy.deepcopy(viewed))["device_traces"][0]
    live = sum(block["state"] == "active_allocated" for seg in viewed["segments"] for block in seg["blocks"])
    assert sum(entry["action"] == "alloc" for entry in kept) == live


def test_sources_on_windows_and_without_lines_survive() -> None:
    sources = ("C:\\work\\net.py:12", "", "no line here", "a:b.py:7")
    blocks = tuple(Block(Affine(1024, 0), "activations", "m", source, "aten.add.Tensor") for source in sources)
    told = snapshot(Timeline(blocks, (0, 1, 2, 3), (Phase("forward", 1, 0),), (2, 3)), 1)
    places = [entry["frames"][1] for entry in told["device_traces"][0] if entry["action"] == "alloc"]
    assert [(place["filename"], place["line"]) for place in places] == [
        ("C:\\work\\net.py", 12),
        ("", 0),
        ("no line here", 0),
        ("a:b.py", 7),
    ]
