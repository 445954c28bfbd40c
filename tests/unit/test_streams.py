"""CUDA streams in a prediction: which one a block is taken on, pools that are apart, and frees that wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from vram_guard import Timeline, TrainingStep, trace
from vram_guard.report.text import render
from vram_guard.simulate.tracing.run import run_step

AMPERE = (8, 0)
WIDTH = 256
Code = Callable[["Net", torch.Tensor], torch.Tensor]


class Net(nn.Module):
    """Two layers, and code that runs them on streams of its own."""

    def __init__(self, code: Code) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.side: Any = None
        self.code = code

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.code(self, inputs)


def step(code: Code, optimizer: Any = torch.optim.Adam) -> TrainingStep:
    return TrainingStep(Net(code), lambda size: torch.ones(size, WIDTH), lambda m, b: m(b).sum(), optimizer)


def traced(code: Code, size: int = 512) -> Timeline:
    return run_step(step(code), size, AMPERE)


def side(net: Net) -> Any:
    """The stream that the model keeps."""
    if net.side is None:
        net.side = torch.cuda.Stream()
    return net.side


def as_written(net: Net, inputs: torch.Tensor) -> torch.Tensor:
    return net.one(inputs) + net.two(inputs)


def beside(net: Net, inputs: torch.Tensor) -> torch.Tensor:
    """The second layer beside the first one."""
    here = torch.cuda.current_stream()
    side(net).wait_stream(here)
    with torch.cuda.stream(side(net)):
        other = net.two(inputs)
    here.wait_stream(side(net))
    other.record_stream(here)
    return net.one(inputs) + other


def operators_on(timeline: Timeline, stream: int) -> set[tuple[str, str]]:
    return {
        (timeline.phase_of(at).name, timeline.blocks[event].operator)
        for at, event in enumerate(timeline.events)
        if event >= 0 and timeline.blocks[event].stream == stream
    }


def test_one_stream_is_as_before() -> None:
    timeline = traced(as_written)
    assert timeline.streams is None
    assert timeline.deferred == ()
    estimate = timeline.at(512)
    assert (estimate.by_stream, estimate.peak_upper, estimate.upper_reasons) == ((), 0, ())
    assert "stream 1" not in render(estimate)


def test_a_hook_in_the_backward_pass_may_select_another_stream() -> None:
    def code(net: Net, inputs: torch.Tensor) -> torch.Tensor:
        made = net.one(inputs)

        def on_side(gradient: torch.Tensor) -> torch.Tensor:
            with torch.cuda.stream(side(net)):
                return gradient * 2

        made.register_hook(on_side)
        return made

    assert operators_on(traced(code), 1) == {("backward", "aten.mul.Tensor")}


def test_the_pools_of_streams_are_apart() -> None:
    def reuse(net: Net, inputs: torch.Tensor) -> torch.Tensor:
        inputs.mul(2)  # taken and freed: a block of this size is in the default stream's pool
        with torch.cuda.stream(side(net)):
            return inputs.mul(3)

    def same(net: Net, inputs: torch.Tensor) -> torch.Tensor:
        inputs.mul(2)
        return inputs.mul(3)

    size = 2**15  # 32 MiB: segments of their own
    apart, together = (run_step(step(code, optimizer=None), size, AMPERE).at(size) for code in (reuse, same))
    assert apart.peak_allocated == together.peak_allocated
    assert apart.peak_reserved > together.peak_reserved


def test_traces_are_the_same_each_time_and_follow_the_law() -> None:
    assert traced(beside) == traced(beside)
    timeline = trace(step(beside))
    assert timeline.retrace is None
    direct = traced(beside, 100)
    assert timeline.at(100).by_stream == direct.at(100).by_stream
    assert (timeline.streams, timeline.deferred) == (direct.streams, direct.deferred)


@pytest.mark.parametrize("most", [2, 3], ids=["seen by the law", "seen by its check"])
@pytest.mark.parametrize("how", ["selected", "noted"])
def test_a_step_whose_streams_depend_on_the_batch_has_no_law(most: int, how: str) -> None:
    """Traces have 2 and 3 samples; what follows from them is compared with one of 7."""

    def code(net: Net, inputs: torch.Tensor) -> torch.Tensor:
        larger = len(inputs) > most
        with torch.cuda.stream(side(net) if larger and how == "selected" else torch.cuda.default_stream()):
            taken = inputs.mul(2)
        if larger and how == "noted":
            taken.record_stream(side(net))
        del taken
        return as_written(net, inputs)

    whole = step(code)
    assert len({run_step(whole, size, AMPERE).events for size in (2, 3, 7)}) == 1  # nothing else differs
    assert trace(whole, check_at=7, checked=most > 2).retrace is not None


# --- record_stream: frees that wait -----------------------------------------------------------------------------------


def recorded(waits: Callable[[Any, Any], None]) -> Code:
    """A tensor that another stream uses dies; then something happens; then as much is taken again."""

    def code(net: Net, inputs: torch.Tensor) -> torch.Tensor:
        taken = inputs.mul(2)
        taken.record_stream(side(net))
        del taken
        waits(net, inputs)
        return inputs.mul(3)

    return code


def ends(waits: Callable[[Any, Any], Any]) -> tuple[Timeline, list[int]]:
    """The step without training, and the event before which each free that may wait has surely happened."""
    timeline = run_step(step(recorded(waits), optimizer=None), 512, AMPERE)
    return timeline, [one.until for one in timeline.deferred]


def nothing(_net: Any, _inputs: Any) -> None:
    pass


def test_without_a_wait_a_free_is_certain_in_the_next_batch_phase() -> None:
    timeline, (first, second) = ends(nothing)
    assert first == next(phase.start for phase in timeline.phases if (phase.name, phase.step) == ("batch", 2))
    assert second == len(timeline.events)


@pytest.mark.parametrize(
    "wait",
    [
        pytest.param(lambda net, inputs: side(net).synchronize(), id="stream"),
        pytest.param(lambda net, inputs: side(net).record_event().synchronize(), id="event"),
        pytest.param(lambda net, inputs: torch.cuda.synchronize(), id="device"),
        pytest.param(
            lambda net, inputs: (torch.cuda.current_stream().wait_stream(side(net)), inputs.sum().item()), id="item"
        ),
        pytest.param(
            lambda net, inputs: (torch.cuda.current_stream().wait_stream(side(net)), inputs.sum().cpu()), id="copy"
        ),
    ],
)
def test_a_wait_of_the_cpu_for_that_stream_ends_it(wait: Callable[[Any, Any], Any]) -> None:
    def later(net: Any, inputs: torch.Tensor) -> None:
        inputs.mul(4)  # taken and freed between the free and the wait
        wait(net, inputs)

    timeline, found = ends(later)
    assert len(found) == 2
    for free, until in zip([one.free for one in timeline.deferred], found, strict=True):
        between = [timeline.blocks[max(event, ~event)].operator for event in timeline.events[free + 1 : until]]
        assert between[:2] == ["aten.mul.Tensor"] * 2
        assert set(between[2:]) <= {"aten.sum.default"}


@pytest.mark.parametrize(
    "wait",
    [
        pytest.param(lambda net, inputs: torch.cuda.current_stream().synchronize(), id="another stream"),
        pytest.param(lambda net, inputs: inputs.sum().item(), id="item of another stream"),
        pytest.param(lambda net, inputs: torch.cuda.Event().synchronize(), id="an event that was never recorded"),
        pytest.param(lambda net, inputs: side(net).wait_stream(torch.cuda.current_stream()), id="the GPU waits"),
    ],
)
def test_other_waits_do_not(wait: Callable[[Any, Any], Any]) -> None:
    timeline, found = ends(wait)
    assert found[-1] == len(timeline.events)


def test_a_wait_for_an_event_that_came_before_the_free_does_not() -> None:
    def code(net: Net, inputs: torch.Tensor) -> torch.Tensor:
        taken = inputs.mul(2)
        taken.record_stream(side(net))
        early = side(net).record_event()
        del taken
        early.synchronize()
        return inputs.mul(3)

    timeline = run_step(step(code, optimizer=None), 512, AMPERE)
    assert timeline.deferred[-1].until == len(timeline.events)


def test_a_free_that_is_waited_for_at_once_has_no_range() -> None:
    assert ends(lambda net, _inputs: side(net).synchronize())[1] == []


def test_its_own_stream_does_not_hold_a_block() -> None:
    def code(net: Net, inputs: torch.Tensor) -> torch.Tensor:
        taken = inputs.mul(2)
        taken.record_stream(torch.cuda.current_stream())
        return inputs + 1

    assert run_step(step(code, optimizer=None), 512, AMPERE).deferred == ()


def prefetching(_net: Net, inputs: torch.Tensor) -> torch.Tensor:
    """Nothing but the loss: the batch comes from a prefetcher."""
    return _net.two(_net.one(inputs))


def test_a_prefetcher_copies_on_its_own_stream() -> None:
    class Prefetcher:
        def __init__(self) -> None:
            self.stream = torch.cuda.Stream()

        def fetch(self, batch: torch.Tensor) -> torch.Tensor:
            with torch.cuda.stream(self.stream):
                copied = batch.to("cuda", non_blocking=True).float()
                copied = copied * 2
            torch.cuda.current_stream().wait_stream(self.stream)
            copied.record_stream(torch.cuda.current_stream())
            return copied

    def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
        return model(Prefetcher().fetch(batch)).sum()

    whole = TrainingStep(Net(prefetching), lambda size: torch.ones(size, WIDTH), loss, torch.optim.Adam)
    timeline = trace(whole)
    assert timeline.retrace is None
    assert ("forward", "aten.mul.Tensor") in operators_on(timeline, 1)
    assert timeline.deferred
    assert timeline.at(64).peak_upper >= timeline.at(64).peak_reserved
