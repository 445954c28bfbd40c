"""Timelines composed of a few traces, held against direct ones; and plans that rest on them."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from each import each
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_arguments import in_options
from torch import nn

from vram_guard import Budget, Parallel, TrainingStep, plan
from vram_guard.parallel.links import topology
from vram_guard.plan import Pins, deep_source
from vram_guard.plan.search_space import Option
from vram_guard.plan.source import TraceRequest, source_of
from vram_guard.plan.tracing import Traces
from vram_guard.techniques.blocks import find_blocks
from vram_guard.techniques.recipe import Recipe
from vram_guard.timeline import Timeline

AMPERE = (8, 0)
BATCH = 12


class Layer(nn.Module):
    """A transformer's layer without its heads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Convolutions(nn.Module):
    """A residual block with running statistics, whose result is saved by its own activation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.one, self.other = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.other(self.second(torch.relu(self.one(self.first(x))))))


class Hourglass(nn.Module):
    """Blocks on the way down whose results are used again on the way up."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(Layer(96) for _ in range(3))
        self.up = nn.ModuleList(Layer(96) for _ in range(3))
        self.head = nn.Linear(96, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for layer in self.down:
            x = layer(x)
            kept.append(x)
        for layer in self.up:
            x = layer(x + kept.pop())
        return self.head(x)


class InPlace(Convolutions):
    """A residual block as torchvision's: its activations write over what they are given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.relu(self.one(self.first(x)), inplace=True)
        y = self.other(self.second(y))
        y += x
        return nn.functional.relu(y, inplace=True)


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 128), *(Layer(128) for _ in range(5)), nn.Linear(128, 8))


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 24, 3), *(Convolutions(24) for _ in range(4)), nn.Flatten(), nn.Linear(21600, 8))


def in_place() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 24, 3), *(InPlace(24) for _ in range(4)), nn.Flatten(), nn.Linear(21600, 8))


MODELS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "layers": (layers, (40, 32)),
    "convolutions": (convolutions, (3, 32, 32)),
    "in_place": (in_place, (3, 32, 32)),
    "hourglass": (Hourglass, (40, 96)),
}


def step(model: Any, shape: tuple[int, ...], **changes: Any) -> TrainingStep:
    made = TrainingStep(
        model=model,
        batch=lambda size: torch.zeros(size, *shape),
        loss=lambda net, x: net(x).float().square().mean(),
        optimizer=torch.optim.AdamW,
    )
    return made.with_(**changes)


def ready(asked: TrainingStep, batch: int = BATCH, **changes: Any) -> tuple[Traces, tuple[str, ...]]:
    """Timelines that may be composed, and the blocks."""
    source = replace(source_of(asked, AMPERE, **changes))
    traces = Traces(source, batch, lambda _line: None)
    blocks = tuple(block.name for block in find_blocks(source.model))
    traces.compose_with(blocks, blocks)
    return traces, blocks


def compared(traces: Traces, option: Option, batch: int = BATCH) -> tuple[int, int]:
    """Reserved peaks of an option as composed and as traced."""
    size = batch // option.splits
    composed = traces.exact(option, size).at(size).peak_reserved
    assert traces.composed(option, size)
    direct = traces.direct(option, size).at(size).peak_reserved
    assert not traces.composed(option, size)
    return composed, direct


@pytest.fixture(scope="module", params=list(MODELS))
def model(request: pytest.FixtureRequest) -> dict[tuple[str, bool], tuple[Traces, tuple[str, ...]]]:
    """Of one model, by what frees gradients and whether they are clipped."""
    made, shape = MODELS[request.param]
    return {
        ("after_step", False): ready(step(made, shape)),
        ("before_backward", True): ready(step(made, shape, zero_grad="before_backward", clip_grad_norm=1.0)),
    }


DRAWN: set[tuple[Traces, Option]] = set()


@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_what_is_composed_takes_what_a_trace_says(model: Any, data: st.DataObject) -> None:
    traces, blocks = model[data.draw(st.sampled_from(sorted(model)))]
    checkpoint = tuple(data.draw(st.lists(st.sampled_from(blocks), unique=True)))
    form: Any = data.draw(st.sampled_from(["as-written", "for-loop"]))
    precision = data.draw(st.sampled_from(["32-true", "bf16-mixed", "16-mixed"]))
    option = Option(precision, data.draw(st.sampled_from([1, 2, 3, 6])), Recipe(checkpoint=checkpoint, optimizer=form))
    if (traces, option.unordered) not in DRAWN:
        DRAWN.add((traces, option.unordered))
        composed, direct = compared(traces, option)
        assert composed == direct


class Taught(nn.Module):
    """Layers that learn to differ from frozen ones."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Sequential(*(Layer(96) for _ in range(3))).requires_grad_(False)
        self.layers = nn.ModuleList(Layer(96) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            known = self.teacher(x)
        for layer in self.layers:
            x = layer(x)
        return x - known


@pytest.mark.parametrize(("precision", "zero_grad"), [("16-mixed", "after_step"), ("bf16-true", "before_backward")])
def test_what_waits_on_the_host_is_composed_of_traces_in_which_nothing_else_is_changed(
    precision: Any, zero_grad: Any
) -> None:
    pytest.importorskip("torchao", reason="keeps optimizers on the host; optional")
    traces, _every = ready(step(Taught, (40, 96), zero_grad=zero_grad, clip_grad_norm=1.0))
    blocks = tuple(f"layers.{number}" for number in range(4))
    traces.compose_with(blocks, blocks)
    asked = (
        {"checkpoint": ()},
        {"checkpoint": blocks[:2]},
        {"checkpoint": blocks},
        {"offload_activations": blocks[:2]},
    )
    for splits, treated, on_host, frozen in itertools.product((1, 3), asked, (False, True), ((), ("teacher",))):
        option = Option(precision, splits, Recipe(**treated, optimizer_on_host=on_host, frozen_on_host=frozen))
        size = BATCH // splits
        on_the_host = traces.exact(option, size).host_peak(size)
        composed, direct = compared(traces, option)
        assert composed == direct
        assert on_the_host == traces.direct(option, size).host_peak(size)
        assert (on_the_host > 0) == bool(on_host or frozen or "offload_activations" in treated)


class Spared(nn.Module):
    """A head of it is never used, and gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Layer(96) for _ in range(4)))
        self.spare = nn.Linear(96, 9600)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@pytest.mark.parametrize(
    ("made", "optimizer"),
    [
        (Spared, torch.optim.AdamW),
        (Taught, torch.optim.Adagrad),  # its states are made with the optimizer
    ],
)
@pytest.mark.parametrize("recipe", [Recipe(optimizer_on_host=True), Recipe(optimizer="for-loop")])
def test_an_optimizer_is_composed_of_none_that_has_other_states(made: Any, optimizer: Any, recipe: Recipe) -> None:
    pytest.importorskip("torchao", reason="keeps optimizers on the host; optional")
    traces, blocks = ready(step(made, (40, 96), optimizer=optimizer))
    option = Option("32-true", 1, recipe.with_(checkpoint=blocks[-2:]))
    said, direct = (ask(option, BATCH) for ask in (traces.exact, traces.direct))
    assert said.at(BATCH).peak_reserved == direct.at(BATCH).peak_reserved
    assert said.host_peak(BATCH) == direct.host_peak(BATCH)


class Weighed(Taught):
    """Reads a weight of its teacher where the teacher does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Sequential(nn.Linear(96, 96000), nn.Linear(96000, 96)).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + nn.functional.linear(x, self.teacher[0].weight).mean()


def test_a_frozen_module_that_is_used_elsewhere_is_not_kept_on_the_host() -> None:
    """What is composed does not see it; the proof does, and says why."""
    written = step(Weighed, (40, 96))
    held = source_of(written, AMPERE).trace(TraceRequest(1, "32-true")).at(1).peak_reserved
    made = plan(written, 1, held - 1, margin=0, allow=["offload_frozen"])
    assert not made.fits
    assert any("outside its forward" in str(one.reason) for one in made.rejected)


@pytest.mark.parametrize("count", [1, 3, 4])
def test_activations_on_the_host_are_composed_of_a_chain(count: int) -> None:
    traces, blocks = ready(step(*MODELS["layers"]))
    offloaded = Option("32-true", 1, Recipe(offload_activations=blocks[:count]))
    both = Option("32-true", 1, Recipe(offload_activations=blocks[:count], checkpoint=blocks[count:]))
    for option in (offloaded, both):
        composed, direct = compared(traces, option)
        assert composed == direct
    said = [traces.exact(option, BATCH).host_peak(BATCH) for option in (offloaded, both)]
    assert all(said)
    traces, _blocks = ready(step(*MODELS["layers"]))
    assert said == [traces.direct(option, BATCH).host_peak(BATCH) for option in (offloaded, both)]


@pytest.mark.parametrize("made", ["convolutions", "in_place", "hourglass"])
def test_a_tensor_that_two_blocks_save_stays_while_one_of_them_needs_it(made: str) -> None:
    """A block's result is saved by its own activation and by the next block; one of the two copies it to the host."""
    traces, blocks = ready(step(*MODELS[made]))
    for offloaded in (blocks[::2], blocks[1::2], blocks[:2]):
        for precision in ("32-true", "16-mixed"):
            option = Option(precision, 1, Recipe(offload_activations=offloaded))
            composed, direct = compared(traces, option)
            assert composed == direct


@pytest.mark.torch_since(2, 6)
@pytest.mark.parametrize("kind", ["fsdp2", "ddp", "zero1"])
def test_one_rank_of_several_is_composed(kind: Any) -> None:
    layout = Parallel(gpus=4, kind=kind)
    wires = topology(None, gpus=4, node=4)
    traces, blocks = ready(step(*MODELS["layers"], parallel=layout), batch=3, topology=wires)
    for recipe in (Recipe(checkpoint=blocks[:2]), Recipe(checkpoint=blocks[1:4], optimizer="for-loop")):
        for option in (Option("32-true", 1, recipe), Option("32-true", 3, recipe)):
            composed, direct = compared(traces, option, 3)
            assert composed == direct


def test_a_model_that_takes_no_single_sample_is_planned_for_more() -> None:
    def normalised() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 96), *(Layer(96) for _ in range(4)), nn.BatchNorm1d(96), nn.Linear(96, 8))

    asked = step(normalised, (64,))
    written = source_of(asked, AMPERE).trace(TraceRequest(8, "32-true")).at(8).peak_reserved
    made = plan(asked, 8, written // 2, margin=0, allow=["accumulate", "checkpoint"])
    assert not made.fits
    assert made.micro_batch_size == 8


# --- what cannot be composed ---


class Twice(nn.Module):
    """Each layer runs two times."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(96) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in [*self.layers, *self.layers]:
            x = layer(x)
        return x


class Skipping(nn.Module):
    """Each layer runs, or does not, as chance has it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(96) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if random.random() < 0.6:
                x = layer(x)
        return x + sum(parameter.sum() for parameter in self.parameters())


class Nested(nn.Module):
    """Layers within layers."""

    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.ModuleList(nn.Sequential(Layer(96), Layer(96)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.outer:
            x = layer(x)
        return x


CHEAP = ["checkpoint", "accumulate", "foreach"]
NESTED = ("outer.0", "outer.0.1", "outer.1", "outer.2.0")


@pytest.mark.parametrize(
    ("made", "how"),
    [
        (lambda: nn.Sequential(nn.Linear(96, 900), nn.ReLU(), nn.Linear(900, 96)), {}),
        (Twice, {}),
        (Skipping, {"allow": ["checkpoint"]}),
        (Nested, {"blocks": NESTED}),
    ],
    ids=["no repeated block", "called twice", "skipped", "nested"],
)
def test_what_cannot_be_composed_is_planned_as_before(made: Any, how: dict[str, Any]) -> None:
    written = step(made, (40, 96))
    source = source_of(written, AMPERE)
    random.seed(3)
    whole = source.trace(source.request("32-true", 1, Recipe(), BATCH)).at(BATCH).peak_reserved
    found = []
    for marks in (True, False):
        random.seed(3)
        found.append(
            plan(replace(source, marks=marks), BATCH, int(whole * 0.8), margin=0, **in_options({"allow": CHEAP, **how}))
        )
    composed, direct = found
    assert (composed.fits, composed.precision, composed.splits, composed.recipe) == (
        direct.fits,
        direct.precision,
        direct.splits,
        direct.recipe,
    )
    assert composed.estimate.peak_reserved == direct.estimate.peak_reserved


def test_a_plan_of_few_traces_is_the_one_of_many() -> None:
    """And what it says of the chosen option is what a direct trace of that size says."""
    source = source_of(step(*MODELS["hourglass"]), AMPERE)
    budget = int(source.trace(source.request("32-true", 1, Recipe(), 48)).at(48).peak_reserved * 0.6)
    asked: dict[bool, int] = {}
    found = {}
    for marks in (True, False):

        def counted(request: Any, marks: bool = marks) -> Any:
            asked[marks] = asked.get(marks, 0) + 1
            return source.trace(request)

        found[marks] = plan(replace(source, trace=counted, marks=marks), 48, budget, margin=0, allow=CHEAP)
    assert found[True].changed
    assert found[True].recipe == found[False].recipe
    assert found[True].splits == found[False].splits
    assert found[True].estimate == found[False].estimate
    assert found[True].timeline is not None
    assert found[True].timeline.work, "a trace's, not a composed one's"
    assert asked[True] < asked[False]


@pytest.mark.torch_since(2, 6)
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_parameters_on_the_host_are_composed_of_two_traces_at_their_own_size() -> None:
    source = source_of(step(*MODELS["layers"]), AMPERE)
    asked: list[int] = []

    def counted(request: Any) -> Timeline:
        asked.append(request.batch_size)
        return source.trace(request)

    traces = Traces(replace(source, trace=counted), BATCH, lambda _line: None)
    blocks = tuple(block.name for block in find_blocks(source.model))
    traces.compose_with(blocks, blocks)
    options = [Option("32-true", 1, Recipe(checkpoint=blocks[:n], parameters_on_host=blocks)) for n in (2, 4)]
    said = [traces.exact(option, BATCH).at(BATCH).peak_reserved for option in options]
    assert asked == [BATCH] * 2
    assert all(traces.composed(option, BATCH) for option in options)
    assert said == [traces.direct(option, BATCH).at(BATCH).peak_reserved for option in options]
    traces.distrust(options[0])
    assert not traces.known(Option("32-true", 1, Recipe(checkpoint=blocks[:3], parameters_on_host=blocks)), BATCH)


@pytest.mark.torch_since(2, 6)
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@each("splits", [1, 3])
@each("changes", [{}, {"zero_grad": "before_backward", "clip_grad_norm": 1.0}])
@each("treated", ["", "checkpoint", "offload_activations"])
def test_one_step_with_parameters_on_the_host_says_what_two_take(treated: str, changes: Any, splits: int) -> None:
    traces, blocks = ready(step(*MODELS["layers"], **changes))
    chosen = {treated: blocks} if treated else {}
    option, size = Option("bf16-mixed", splits, Recipe(parameters_on_host=blocks, **chosen)), BATCH // splits
    said = traces.exact(option, size).at(size)
    assert traces.composed(option, size)
    direct = traces.direct(option, size).at(size)
    assert (said.peak_reserved, said.peak_allocated) == (direct.peak_reserved, direct.peak_allocated)
    assert said.host_peak == direct.host_peak


def deep(treated: str, count: int) -> tuple[Traces, Option]:
    """Twelve equal blocks whose parameters lie on the host, and an option that treats so many of them."""
    asked = step(lambda: nn.Sequential(nn.Embedding(999, 96), nn.Sequential(*(Layer(96) for _ in range(12)))), ())
    asked = asked.with_(batch=lambda size: torch.zeros(size, 50, dtype=torch.long))
    source = deep_source(asked, Budget.of("A100 80GB"), None, Pins())
    assert source.shallow is not None
    blocks = tuple(block.name for block in find_blocks(source.model))
    chosen = {treated: blocks[:count]} if treated else {}
    traces = Traces(source, BATCH, lambda _line: None)
    traces.compose_with(blocks, blocks)
    traces(Option("32-true", 1))
    return traces, Option("32-true", 2, Recipe(parameters_on_host=blocks, **chosen))


@pytest.mark.torch_since(2, 6)
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@each(("treated", "count"), [("", 0), ("checkpoint", 12), ("checkpoint", 7), ("offload_activations", 12)])
def test_few_blocks_take_no_more_than_all_of_them(treated: str, count: int) -> None:
    traces, option = deep(treated, count)
    size = BATCH // option.splits
    least = traces.least(option, size)
    assert 0 < least <= traces.direct(option, size).at(size).peak_allocated
    assert traces.least(option, size) == 0, "it is traced: nothing more is to be known"


@pytest.mark.torch_since(2, 6)
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_what_few_blocks_exceed_is_not_traced_with_all_of_them() -> None:
    source, asked = deep("", 0)[0].source, list[Any]()

    def counted(request: Any) -> Timeline:
        asked.append(request)
        return source.trace(request)

    allowed = ["checkpoint", "accumulate", "offload_parameters", "offload_activations"]
    made = plan(replace(source, trace=counted), BATCH, "2MiB", margin=0.0, gpu="A100 80GB", allow=allowed)
    assert not made.fits
    assert not [request for request in asked if request.recipe.parameters_on_host]
    assert any("three of its equal blocks" in option.why for option in made.rejected)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_micro_batches_with_parameters_on_the_host_grow_as_without_other_techniques() -> None:
    source = source_of(step(*MODELS["layers"]), AMPERE)
    asked: list[int] = []

    def counted(request: Any) -> Timeline:
        asked.append(request.batch_size)
        return source.trace(request)

    traces = Traces(replace(source, trace=counted), BATCH, lambda _line: None)
    blocks = tuple(block.name for block in find_blocks(source.model))
    traces.compose_with(blocks, blocks)
    options = [Option("32-true", splits, Recipe(checkpoint=blocks[:2], parameters_on_host=blocks)) for splits in (2, 4)]
    said = [traces(option).at(BATCH // option.splits) for option in options]
    assert len(asked) == 3  # two without checkpointed blocks, and one with all
    assert said == [traces.direct(option, BATCH // option.splits).at(BATCH // option.splits) for option in options]


class Conditioned(nn.Module):
    """Layers that learn, behind frozen ones that run twice."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.ModuleList(Layer(96) for _ in range(3)).requires_grad_(False)
        self.layers = nn.ModuleList(Layer(96) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (*self.frozen, *self.frozen):
            x = layer(x)
        x = x.clone()  # otherwise the last frozen one would be what keeps it
        for layer in self.layers:
            x = layer(x)
        return x


def test_blocks_that_save_nothing_do_not_stand_in_the_way_of_composing() -> None:
    source = source_of(step(Conditioned, (40, 96)), AMPERE)
    budget = int(source.trace(source.request("32-true", 1, Recipe(), 48)).at(48).peak_reserved * 0.8)
    asked: list[tuple[str, ...]] = []

    def noted(request: Any) -> Any:
        asked.append(request.recipe.checkpoint)
        return source.trace(request)

    made = plan(replace(source, trace=noted), 48, budget, margin=0, allow=["checkpoint"])
    assert made.checkpointed_modules
    assert all(name.startswith("layers") for blocks in asked for name in blocks)
    every = tuple(f"layers.{number}" for number in range(4))
    # As written at three sizes, all checkpointed at one, the plan, and the nearest miss.
    assert len(asked) <= 3 + 1 + 1 + 1
    assert every in asked
