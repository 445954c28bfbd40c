"""plan(): arguments, budgets and GPUs, and real steps traced under every option."""

from __future__ import annotations

import ast
import gc
import importlib
import inspect
import math
import string
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from each import each
from plan_arguments import in_options

from vram_guard import Budget, Job, Timeline, TrainingStep
from vram_guard.errors import InvalidInputError, NoDeviceError
from vram_guard.guard._verdict import judge
from vram_guard.job import Evaluation, Saving
from vram_guard.language import speaking
from vram_guard.limits import TRACES_KEPT
from vram_guard.plan import Plan, PlanOptions, Source, plan
from vram_guard.plan._cost_model import CostModel
from vram_guard.plan._option import Option
from vram_guard.plan.descriptions import Reason, Why
from vram_guard.plan.model import Rejected, nearest
from vram_guard.plan.source import TraceRequest, source_of
from vram_guard.plan.step_time import StepTime, assumed_gpu, step_seconds
from vram_guard.plan.techniques import resident_batch
from vram_guard.plan.tracing import Traces
from vram_guard.report.text import render
from vram_guard.simulate import trace
from vram_guard.techniques import Recipe
from vram_guard.units import Amount

ROOT = Path(__file__).parents[2]
MIB = 2**20


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Conv2d(3, 32, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(32)
        self.last = torch.nn.Conv2d(32, 3, 3, padding=1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.norm(self.first(images))))


def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(size, 3, 64, 64), torch.zeros(size, 3, 64, 64)


def loss(model: torch.nn.Module, images: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(images[0]), images[1])


STEP = TrainingStep(model=Net, batch=batch, loss=loss, optimizer=torch.optim.AdamW)


def test_what_fits_is_left_alone() -> None:
    made = plan(STEP, 16, "4GiB")
    assert made.fits
    assert not made.changed
    assert made.precision == "32-true"
    assert made.timeline is made.timeline_before


def test_a_tight_budget_is_met_and_the_prediction_is_that_of_a_direct_trace() -> None:
    made = plan(STEP, 64, "60MiB", margin=0)
    assert made.fits
    assert made.precision == "bf16-mixed"
    assert made.splits > 1
    assert made.effective_batch_size == 64
    assert made.estimate.peak_reserved <= 60 * MIB
    direct = trace(STEP.with_(precision="bf16-mixed", accumulate=made.splits, whole_batch=True))
    assert direct.at(made.micro_batch_size).peak_reserved == made.estimate.peak_reserved
    assert direct.at(made.micro_batch_size).breakdown == made.estimate.breakdown


def test_a_number_that_lacks_a_unit_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="24 bytes"):
        plan(STEP, 16, 24)


@pytest.mark.parametrize("budget", ["1GiB", "10MiB"])
def test_a_batch_that_is_the_same_for_every_size_is_remarked_on(budget: str) -> None:
    one = torch.zeros(4, 64)
    step = TrainingStep(torch.nn.Linear(64, 64), lambda _size: one, lambda net, x: net(x).sum(), torch.optim.AdamW)
    remark = "same memory with 4096 samples as with any other number"
    assert remark in plan(step, 4096, budget, allow=CHEAP).explain()
    assert (
        remark not in plan(step.with_(batch=lambda size: one[:1].expand(size, 64)), 4096, budget, allow=CHEAP).explain()
    )
    assert "any other number" not in plan(step, 1, budget, allow=CHEAP).explain()


def test_a_plan_names_the_gpu_that_its_step_times_are_of() -> None:
    def said(**budget: Any) -> str:
        return plan(STEP, 64, Budget.resolve(**budget, margin=0.0), allow=CHEAP).explain()

    assert "modelled on the slowest GPU of compute capability 8.0 (A30)." in said(budget="80MiB")
    assert "modelled on" not in said(budget="80MiB", gpu="RTX 4090")
    assert "modelled on" not in said(budget="4GiB")  # nothing changes, and no time is given


def test_a_plan_explains_what_its_bounds_are() -> None:
    def branching(model: torch.nn.Module, numbers: torch.Tensor) -> torch.Tensor:
        out = model(numbers)
        return out.sum() if out.mean() > 0 else out.square().sum()

    step = TrainingStep(torch.nn.Linear(64, 64), lambda size: torch.zeros(size, 64), branching, torch.optim.AdamW)
    said = plan(step, 16, "1GiB", allow=CHEAP).explain()
    assert "see the notes" in said
    assert "test_plan.py:" in said.partition("\nNotes:\n")[2]
    assert "Notes:" not in plan(STEP, 16, "4GiB", allow=CHEAP).explain()


def test_a_precision_of_the_steps_own_is_said_to_stay_whatever_is_allowed() -> None:
    for allow in (("accumulate",), ("accumulate", "precision")):
        said = plan(STEP.with_(precision="bf16-mixed"), 64, "8MiB", allow=allow).reasons
        assert "The precision bf16-mixed was chosen by the user and stays." in said
        assert not any("Mixed precision was not tried" in reason for reason in said)
    assert any("Mixed precision was not tried" in one for one in plan(STEP, 64, "8MiB", allow=["accumulate"]).reasons)


def test_the_closest_option_is_one_whose_peak_is_known() -> None:
    why = Reason(Why.NEEDS_STATES, amount=Amount(5))
    bounded, far, near = (Rejected(name, peak, missing, why) for name, peak, missing in NAMED_MISSES)
    assert nearest([bounded, far, near]) is near
    assert nearest([bounded]) is bounded


@pytest.mark.parametrize(("width", "budget", "known"), [(64, "10MiB", True), (2048, "20MiB", False)])
def test_a_shortfall_that_is_only_bounded_is_said_to_be(width: int, budget: str, known: bool) -> None:
    """Of the wide layer the optimizer's states alone are too large: no other way is traced."""
    step = TrainingStep(
        torch.nn.Linear(width, width),
        lambda size: torch.zeros(size, width),
        lambda net, x: net(x).sum(),
        torch.optim.AdamW,
    )
    made = plan(step, 64, budget, margin=0, allow=("precision", "accumulate"))
    written, *others = sorted(made.rejected, key=lambda one: one.option != "32-true, batch 64")
    assert written.peak_reserved == made.before.peak_reserved  # whatever the search made of it
    assert all((one.peak_reserved is not None) is known for one in others)
    (closest,) = (line for line in made.reasons if "Closest" in line)
    assert ("at least" not in closest) is known


NAMED_MISSES = (("bounded", None, 1), ("far", 90, 50), ("near", 60, 20))

#: Techniques whose timelines take little time.
CHEAP = ("precision", "accumulate", "checkpoint")


@pytest.mark.parametrize("with_job", [False, True])
@pytest.mark.parametrize("uneven", [False, True])
def test_a_plan_keeps_its_own_timelines_alone(uneven: bool, with_job: bool) -> None:
    """A guard keeps the plan for as long as the training runs; a search makes dozens of timelines."""
    validation = Evaluation(lambda size: torch.zeros(size, 512, 64), lambda model, numbers: model(numbers), 4)
    job = Job.of(validation, Saving()) if with_job else None
    gc.collect()
    before = {id(timeline) for timeline in timelines_alive()}
    made = plan(step_of_blocks(8, uneven=uneven).with_(job=job), 64, "60MiB", margin=0, allow=CHEAP)
    assert made.changed or uneven
    gc.collect()
    kept = [timeline for timeline in timelines_alive() if id(timeline) not in before]
    # Where each size is traced by itself, a timeline keeps the last ones that it was asked for.
    assert len(kept) <= (2 * TRACES_KEPT if uneven else 4)


def timelines_alive() -> list[Timeline]:
    return [one for one in gc.get_objects() if type(one) is Timeline]


def step_of_blocks(count: int, *, uneven: bool = False) -> TrainingStep:
    blocks = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(count)))

    def loss(model: torch.nn.Module, numbers: torch.Tensor) -> torch.Tensor:
        out = model(numbers)
        return (out.clone() if uneven and len(out) > 4 else out).square().mean()

    return TrainingStep(blocks, lambda size: torch.zeros(size, 512, 64), loss, torch.optim.AdamW)


def test_a_timeline_of_one_size_is_traced_at_others_after_the_plan() -> None:
    def branching(model: torch.nn.Module, images: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        out = model(images[0])
        return (out.clone() if len(out) > 4 else out).square().mean()

    step = STEP.with_(loss=branching)
    made = plan(step, 16, "4GiB")
    assert made.timeline is not None
    assert made.timeline.retrace is not None  # it holds at one size
    for size in (3, 9):
        assert made.timeline.at(size).peak_reserved == trace(step).at(size).peak_reserved


@pytest.mark.parametrize("micro_batches", [3, 4, 8])
def test_a_larger_whole_batch_is_an_exact_transformation(micro_batches: int) -> None:
    two = trace(STEP.with_(accumulate=2, whole_batch=True))
    made = resident_batch(two, 2, micro_batches)
    direct = trace(STEP.with_(accumulate=micro_batches, whole_batch=True))
    for size in (1, 5, 32):
        assert made.at(size).peak_allocated == direct.at(size).peak_allocated
        assert made.at(size).peak_reserved == direct.at(size).peak_reserved
    assert made.at(32).peak_allocated > two.at(32).peak_allocated


@pytest.mark.parametrize(
    ("gpu", "precision"), [("T4", "16-mixed"), ("A100 40GB", "bf16-mixed"), ("GTX 1080 Ti", "32-true")]
)
def test_the_precision_is_one_that_the_gpu_has(gpu: str, precision: str) -> None:
    made = plan(STEP, 64, "110MiB", gpu=gpu, margin=0)
    assert made.fits
    assert made.precision == precision
    assert (made.splits == 1) == (precision != "32-true")


def test_allow_restricts() -> None:
    split = plan(STEP, 64, "110MiB", allow=["accumulate"])
    assert (split.precision, split.splits > 1) == ("32-true", True)
    mixed = plan(STEP, 64, "110MiB", allow="precision")
    assert (mixed.precision, mixed.splits) == ("bf16-mixed", 1)
    neither = plan(STEP, 64, "110MiB", allow=())
    assert not neither.fits
    assert not neither.changed


def test_a_precision_that_the_user_chose_stays() -> None:
    made = plan(STEP.with_(precision="16-mixed"), 64, "60MiB", gpu="A100 40GB")
    assert made.fits
    assert made.precision == "16-mixed"
    assert made.splits > 1


def test_inference_has_nothing_to_accumulate() -> None:
    made = plan(STEP.with_(optimizer=None), 64, "10MiB")
    assert not made.fits
    assert made.accumulate == 1
    assert any("no gradients to accumulate" in reason for reason in made.reasons)


def test_growth() -> None:
    made = plan(STEP, 4, "200MiB", grow=True, margin=0, options=PlanOptions(lr_rule="sqrt", dataset_size=10_000))
    assert made.batch_size > 4
    assert made.batch_size % 4 == 0
    assert made.estimate.peak_reserved <= 160 * MIB
    assert made.learning_rate_factor == math.sqrt(made.batch_size / 4)
    assert made.precision == "32-true"


def test_the_margin_is_kept_free() -> None:
    peak = plan(STEP, 16, "4GiB").estimate.peak_reserved
    assert not plan(STEP, 16, peak, margin=0).changed
    assert plan(STEP, 16, peak, margin=0.01).changed


def test_a_budget_object_is_taken_as_it_is() -> None:
    budget = Budget.of("4GiB", margin=0.1)
    assert plan(STEP, 16, budget).budget == budget


@pytest.mark.torch_since(2, 6)
def test_progress_names_every_trace_once() -> None:
    lines: list[str] = []
    plan(STEP, 64, "60MiB", progress=lines.append)
    assert len(lines) == len(set(lines)) >= 3


@each(
    ("changes", "message"),
    [
        ({"allow": ["acumulate"]}, "did you mean 'accumulate'"),
        ({"allow": "precision,checkpoints"}, "unknown 'checkpoints'"),
        ({"lr_rule": "cubic"}, "lr_rule"),
        ({"target_utilization": 0}, "target_utilization"),
        ({"target_utilization": 80}, "target_utilization"),
        ({"target_utilization": math.nan}, "target_utilization"),
        ({"target_utilization": True}, "target_utilization"),
        ({"target_utilization": "0.8"}, "target_utilization"),
        ({"dataset_size": 0}, "dataset_size"),
        ({"dataset_size": 1.5}, "dataset_size"),
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": -4}, "batch_size"),
        ({"batch_size": True}, "batch_size"),
        ({"batch_size": 8.0}, "batch_size"),
        ({"batch_size": math.nan}, "batch_size"),
        ({"batch_size": 2**63}, "batch_size"),
        ({"budget": "inf"}, "budget"),
        ({"budget": "-1GiB"}, "budget"),
        ({"margin": 5}, "margin"),
    ],
)
def test_nonsense_is_refused_before_any_work(changes: dict[str, object], message: str) -> None:
    def never() -> torch.nn.Module:
        raise AssertionError("the model was built")

    arguments = {"batch_size": 8, "budget": "4GiB", **changes}
    with pytest.raises(InvalidInputError, match=message):
        plan(STEP.with_(model=never), **in_options(arguments))


def test_without_a_device_a_budget_is_asked_for() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(NoDeviceError):
        plan(STEP, 8)


def test_a_bare_amount_takes_the_capability_of_the_device_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never bfloat16 on a GPU without it, also when only an amount was given."""
    at_hand = Budget.resolve(gpu="T4")
    real = Budget.resolve.__func__  # type: ignore[attr-defined]

    def resolve(cls: type[Budget], budget: object = None, **settings: object) -> Budget:
        return at_hand if budget is None else real(cls, budget, **settings)

    monkeypatch.setattr(Budget, "resolve", classmethod(resolve))
    assert plan(STEP, 64, "110MiB", margin=0).precision == "16-mixed"


def test_planning_imports_no_torch() -> None:
    code = "import sys, vram_guard.plan._search; sys.exit(bool({'torch', 'rich'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("first", ["import vram_guard.plan._search", "pass"])
def test_the_public_name_is_the_function(first: str) -> None:
    code = f"{first}\nfrom vram_guard import plan\nimport types\nassert isinstance(plan, types.FunctionType)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_plan_is_a_value() -> None:
    one, other = plan(STEP, 16, "4GiB"), plan(STEP, 16, "4GiB")
    assert isinstance(one, Plan)
    assert one == other


class Deep(torch.nn.Module):
    def __init__(self, depth: int = 6) -> None:
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer
        self.layers = torch.nn.ModuleList(layer(64, 4, 256, dropout=0.0, batch_first=True) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


DEEP = TrainingStep(
    model=Deep,
    batch=lambda size: torch.zeros(size, 128, 64),
    loss=lambda model, batch: model(batch).square().mean(),
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
)


@pytest.mark.parametrize("technique", ["checkpoint", "offload_activations"])
def test_as_many_blocks_as_needed_and_the_prediction_is_that_of_a_direct_trace(technique: str) -> None:
    made = plan(DEEP, 16, "60MiB", gpu="A100 80GB", margin=0, allow=technique)
    assert made.fits
    treated = getattr(made.recipe, technique)
    assert 0 < len(treated) < 6
    assert made.slowdown is not None
    assert made.slowdown >= 1  # copies may hide behind a launch-bound step
    direct = trace(DEEP.with_(recipe=made.recipe)).at(16)
    assert direct.peak_reserved == made.estimate.peak_reserved <= 60 * MIB
    one_less = made.recipe.with_(**{technique: treated[:-1]})
    assert trace(DEEP.with_(recipe=one_less)).at(16).peak_reserved > 60 * MIB
    if technique == "offload_activations":
        assert made.estimate.host_peak > 0
        poor = plan(
            DEEP, 16, "60MiB", gpu="A100 80GB", margin=0, allow=technique, options=PlanOptions(host_budget="1MiB")
        )
        assert not poor.fits
        assert any("host memory" in option.why for option in poor.rejected)


def test_blocks_that_the_user_names() -> None:
    made = plan(
        DEEP,
        16,
        "60MiB",
        margin=0,
        allow="checkpoint",
        options=PlanOptions(blocks=("layers.5", "layers.4", "layers.3")),
    )
    assert set(made.checkpointed_modules) <= {"layers.5", "layers.4", "layers.3"}
    with pytest.raises(InvalidInputError, match=r"layer\.5"):
        plan(DEEP, 16, "60MiB", margin=0, options=PlanOptions(blocks=("layer.5",)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pin": {"micro_batch_size": 3}}, "does not divide"),
        ({"pin": {"micro_batch_size": 4}, "grow": True}, "contradict"),
        ({"pin": {"precision": "bf16-mixed"}, "gpu": "T4", "budget": None}, "16-mixed"),
        ({"pin": {"checkpoint": 7}}, "has 6"),
        ({"correction": 0.9}, "correction"),
        ({"host_budget": "lots"}, "lots"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, object], message: str) -> None:
    arguments = {"batch_size": 16, "budget": "4GiB", **changes}
    with pytest.raises(InvalidInputError, match=message):
        plan(DEEP, **in_options(arguments))


def test_the_pinned_part_holds_and_the_rest_is_found() -> None:
    made = plan(DEEP, 16, "60MiB", margin=0, allow="precision,accumulate", pin={"precision": "32-true"})
    assert made.fits
    assert not made.checkpointed_modules
    assert made.precision == "32-true"
    assert made.splits > 1


def bounds(step: TrainingStep, option: Option, batch_size: int = 16) -> int:
    """What the option takes at the least, in bytes."""
    source = source_of(step, (8, 0))
    return CostModel(source, Traces(source, batch_size, lambda _line: None), batch_size, None).lower_bound(option).size


def test_eight_bit_states_are_counted_as_a_quarter() -> None:
    states = 2 * 4 * sum(parameter.numel() for parameter in Deep().parameters())  # AdamW: two of float32
    plain = bounds(DEEP, Option("32-true", 16))
    assert plain - bounds(DEEP, Option("32-true", 16, Recipe(optimizer="8bit"))) == states * 3 / 4


def test_weights_outside_fsdp2_s_units_wait_on_the_gpu_for_the_backward_pass() -> None:
    every, few = (Recipe(parameters_on_host=tuple(f"layers.{n}" for n in range(count))) for count in (6, 3))
    outside = sum(p.numel() for layer in Deep().layers[3:] for p in layer.parameters())
    for precision, width in (("32-true", 4), ("bf16-mixed", 2)):
        more = bounds(DEEP, Option(precision, 1, few)) - bounds(DEEP, Option(precision, 1, every))
        assert more == outside * width


@pytest.fixture(scope="module")
def priced() -> tuple[Traces, CostModel]:
    """Traces of a step of three layers and their prices, which all options share as in one search."""
    source = source_of(DEEP.with_(model=lambda: Deep(3)), (8, 0))
    traces = Traces(source, 16, lambda _line: None)
    return traces, CostModel(source, traces, 16, None)


@pytest.mark.torch_since(2, 6)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("splits", [1, 4])
def test_no_option_takes_less_than_its_lower_bound(priced, precision: str, splits: int) -> None:
    """The search leaves out what its lower bound says cannot fit: that must be true of each."""
    traces, cost_model = priced
    blocks = tuple(f"layers.{number}" for number in range(3))
    recipes = (
        Recipe(),
        Recipe(checkpoint=blocks[:2]),
        Recipe(offload_activations=blocks[:1], checkpoint=blocks[1:]),
        Recipe(optimizer="8bit"),
        Recipe(optimizer_on_host=True, checkpoint=blocks[:1]),
        Recipe(parameters_on_host=blocks),
        Recipe(parameters_on_host=blocks[:2]),
    )
    least = []
    for recipe in recipes:
        option = Option(precision, splits, recipe)
        bound = cost_model.lower_bound(option)
        assert 0 < bound.size <= traces.exact(option, 16 // splits).at(16 // splits).peak_allocated, option
        least.append(bound.size)
    assert least[0] == max(least)
    assert least[0] > least[1] > least[2], "less waits on the GPU for the backward pass"


@pytest.mark.torch_since(2, 6)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_an_optimizer_on_the_host_costs_what_its_own_trace_says(priced, precision: str) -> None:
    """Gradients go down beside the backward pass, weights beside the CPU's fused step, and the GPU makes none."""
    pytest.importorskip("torchao")
    option = Option(precision, 1, Recipe(optimizer_on_host=True))
    price, own = _price_and_own(priced, option)
    assert price.device + price.host == pytest.approx(own.device + own.host, rel=0.02)


@pytest.mark.torch_since(2, 6)
def test_parameters_on_the_host_cost_what_their_own_trace_says(priced) -> None:
    """Weights come up before what needs them, and gradients go down beside the backward pass.

    What FSDP2 itself computes is not in the price: kernels that matter for a model of this size alone.
    """
    option = Option("32-true", 1, Recipe(parameters_on_host=tuple(f"layers.{number}" for number in range(3))))
    price, own = _price_and_own(priced, option)
    assert price.host == pytest.approx(own.host, rel=0.02)
    assert price.transfers == pytest.approx(own.transfers, rel=0.1)


def _price_and_own(priced: tuple[Traces, CostModel], option: Option) -> tuple[StepTime, StepTime]:
    """The price of an option, and the time of its own trace."""
    traces, cost_model = priced
    return cost_model.seconds(option), step_seconds(traces.exact(option, 16), 16, assumed_gpu((8, 0)))


def test_a_step_that_cannot_be_followed_is_a_plan_that_promises_nothing() -> None:
    library = torch.library.Library("vram_guard_plan_test", "DEF")
    library.define("opaque(Tensor x) -> Tensor")
    try:
        step = TrainingStep(
            model=lambda: torch.nn.Linear(8, 8),
            batch=lambda size: torch.zeros(size, 8),
            loss=lambda model, x: torch.ops.vram_guard_plan_test.opaque(model(x)).sum(),
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        )
        made = plan(step, 64, gpu="RTX 4090")
    finally:
        library._destroy()
    assert not made.fits
    assert not made.changed
    assert made.estimate.tier == "formula"


def test_the_environment_s_allocator_settings_are_those_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    from vram_guard import AllocatorSettings

    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    made = plan(DEEP, 16, "4GiB", margin=0)
    settings = AllocatorSettings.from_conf("expandable_segments:True")
    assert made.estimate.peak_reserved == trace(DEEP).at(16, settings=settings).peak_reserved
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")
    assert plan(DEEP, 16, "4GiB", margin=0).estimate.peak_reserved == trace(DEEP).at(16).peak_reserved


# --- a loop of somebody else's ---


def test_a_source_is_asked_for_what_the_plan_needs_and_nothing_else() -> None:
    asked: list[TraceRequest] = []
    own = source_of(STEP, (8, 0))

    def follow(request: TraceRequest) -> Timeline:
        asked.append(request)
        return own.trace(replace(request, slices=min(request.slices, 2), sliced_by="loop"))

    source = Source(own.model, follow, sliced_by="model", forward_again=True)
    usable = own.trace(TraceRequest(8, "32-true")).at(8).peak_reserved - 1
    made = plan(source, 8, usable, margin=0, allow=["accumulate"])
    assert made.fits
    assert made.splits > 1
    whole, sliced = ([one for one in asked if (one.slices > 1) is many] for many in (False, True))
    assert {one.batch_size for one in whole} == {2, 3, 8}
    assert all(one == TraceRequest(one.batch_size, "32-true") for one in whole)
    assert all((one.sliced_by, one.forward_again, one.slices_of_model) == ("model", True, one.slices) for one in sliced)
    assert {one.slices for one in sliced} <= {2, 4, 8}, "where the model slices, each number is followed by itself"


def test_a_step_without_a_law_is_followed_once_at_each_size() -> None:
    asked: list[TraceRequest] = []

    def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        out = model(batch)
        for _ in range(len(batch)):  # one allocation more for every sample
            out = out + 1
        return out.square().mean()

    own = source_of(
        TrainingStep(lambda: torch.nn.Linear(64, 4096), lambda b: torch.randn(b, 64), loss, torch.optim.AdamW), (8, 0)
    )

    def follow(request: TraceRequest) -> Timeline:
        asked.append(request)
        return own.trace(request)

    usable = own.trace(TraceRequest(64, "32-true")).at(64).peak_reserved - 1
    made = plan(replace(own, trace=follow), 64, usable, margin=0, allow=["accumulate"])
    assert made.fits
    assert made.splits > 1
    assert len(asked) == len(set(asked))


# --- why ---


def test_a_pin_on_a_step_that_fits_does_not_say_that_it_does_not() -> None:
    pinned = plan(STEP, 8, "4GiB", pin={"micro_batch_size": 2})
    assert pinned.changed
    assert pinned.fits_as_written
    assert not plan(STEP, 64, "60MiB", margin=0).fits_as_written


def test_two_usable_amounts_are_explained_by_their_margins() -> None:
    """float32 convolutions and bf16 have margins of their own, so the step as written may use less than the plan."""
    made = plan(STEP, 64, "110MiB")
    before = made.budget.for_tier(made.before.tier, made.before.network)
    assert made.precision == "bf16-mixed"
    assert before.usable != made.budget.usable
    (said,) = (str(one) for one in made.reason_values if one.kind is Why.MARGINS)
    assert f"{before.margin:.1%} as written, {made.budget.margin:.1%} as planned" in said
    for one in (plan(STEP, 64, "110MiB", margin=0.1), plan(STEP, 64, "110MiB", allow=["accumulate"])):
        assert one.changed
        assert Why.MARGINS not in {reason.kind for reason in one.reason_values}


@pytest.mark.parametrize(
    ("pin", "changes", "why"),
    [
        ({"parameters_on_host": True}, {}, "parameters on the host need torch 2.6 or later"),
        ({"optimizer_on_host": True, "optimizer": "8bit"}, {}, "an optimizer on the host has no other form"),
        ({"optimizer_in_backward": True}, {"accumulate": 2}, "a step has 2 backward passes"),
    ],
)
def test_pins_that_the_step_does_not_admit_are_said_with_the_reason(
    pin: dict[str, Any], changes: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.import_module("vram_guard.plan._of_source"), "torch_release", lambda: (2, 4))
    made = plan(STEP.with_(**changes), 8, "1GiB", pin=pin)
    assert (made.fits, made.fits_as_written, made.changed) == (False, True, False)
    assert [reason.kind for reason in made.reason_values] == [Why.PINS_REFUSED, Why.UNCHANGED]
    assert made.reasons[0].startswith(f"The pinned settings are not possible in this step: {why}")
    short = plan(STEP.with_(**changes), 1, "4MiB", pin=pin)
    assert [reason.kind for reason in short.reason_values] == [Why.SHORTAGE, Why.PINS_REFUSED, Why.UNCHANGED]


def test_a_pin_that_does_not_fit_is_not_called_applied() -> None:
    """It contradicted itself: "the pinned settings are applied nevertheless ... Nothing was changed."."""
    made = plan(STEP, 8, "1GiB", pin={"offload_activations": ("first",)}, options=PlanOptions(host_budget="1KiB"))
    assert (made.fits, made.fits_as_written, made.changed) == (False, True, False)
    assert [reason.kind for reason in made.reason_values] == [Why.PINS_DO_NOT_FIT, Why.UNCHANGED]
    assert made.explain().startswith("Fits as written (")
    assert made.verdict() == "fits as written, not as pinned"
    shown = render(made, width=200)
    assert "NOT AS PINNED" in shown
    assert "applied" not in shown
    warning = judge(made, "fit")
    assert warning.startswith("the pinned settings are not applied. The step fits as written;")
    assert "not known to fit" not in warning


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({}, Why.NO_ACCUMULATION),
        ({"allow": ["accumulate"], "trains": False}, Why.NO_GRADIENTS),
        ({"allow": ["accumulate"], "pin": {"micro_batch_size": 64}}, Why.SIZE_PINNED),
    ],
)
def test_why_there_are_no_smaller_micro_batches(how: dict[str, Any], why: Why) -> None:
    """Not allowed is said of what was not allowed, and of nothing else."""
    step = STEP if how.pop("trains", True) else replace(STEP, optimizer=None)
    made = plan(step, 64, "1MiB", margin=0, **{"allow": [], **how})
    assert not made.fits
    found = {Why.NO_ACCUMULATION, Why.NO_GRADIENTS, Why.SIZE_PINNED} & {one.kind for one in made.reason_values}
    assert found == {why}


def test_what_an_adapter_refuses_is_the_reason_that_is_given() -> None:
    refused = {"precision": "the plugin was set by the user", "accumulate": "the loss compares samples", "grow": "no"}
    made = plan(STEP, 64, "60MiB", margin=0, allow=["precision", "accumulate"], options=PlanOptions(refused=refused))
    assert not made.fits
    said = " ".join(made.reasons)
    assert "mixed precision is not possible here: the plugin was set by the user" in said
    assert "smaller micro-batches are not possible here: the loss compares samples" in said
    assert "not allowed" not in said
    kinds = [reason.kind for reason in made.reason_values]
    assert kinds == [Why.SHORTAGE, Why.REFUSED, Why.REFUSED_SEVERAL, Why.UNCHANGED]
    alone = plan(
        STEP, 64, "60MiB", margin=0, allow=["accumulate"], options=PlanOptions(refused={"precision": "never asked for"})
    )
    assert "never asked for" not in alone.explain()
    grown = plan(STEP, 8, "4GiB", grow=True, options=PlanOptions(refused=refused))
    assert grown.batch_size == 8


def test_a_pinned_precision_is_not_called_forbidden() -> None:
    made = plan(STEP, 8, "4GiB", allow=[], pin={"precision": "bf16-mixed"})
    assert "The precision is pinned." in made.reasons


def test_a_plan_is_read_in_the_language_of_its_reader() -> None:
    made = plan(STEP, 64, "60MiB", margin=0)
    with speaking("en"):
        english = made.explain()
    with speaking("zh"):
        chinese = made.explain()
        assert any("微批" in reason for reason in made.reasons)
    with speaking("en"):
        assert made.explain() == english != chinese


def test_every_reason_has_the_figures_that_its_sentence_names() -> None:
    """The calls, wherever they are: a sentence without its value would show a bare ``{peak}``."""
    called = set()
    for path in (ROOT / folder for folder in ("vram_guard", "integrations")):
        for file in path.rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Reason"):
                    continue
                kind = node.args[0]
                given = {keyword.arg for keyword in node.keywords}
                if isinstance(kind, ast.Attribute) and kind.attr in Why.__members__ and None not in given:
                    named = {name for _, name, _, _ in string.Formatter().parse(Why[kind.attr].value) if name}
                    assert named == given, f"{file}:{node.lineno}"
                    called.add(kind.attr)
    assert len(called) > 20


def test_an_old_argument_works_with_a_warning_that_says_where_it_is_now() -> None:
    with pytest.warns(FutureWarning, match=r"options=PlanOptions\(blocks="):
        made = plan(DEEP, 16, "60MiB", margin=0, blocks=("layers.5",), options=PlanOptions(lr_rule="sqrt"))  # type: ignore[call-arg]
    assert set(made.checkpointed_modules) <= {"layers.5"}
    with pytest.raises(TypeError, match="blockz"):
        plan(DEEP, 16, "60MiB", blockz=("layers.5",))  # type: ignore[call-arg]


def test_plan_has_few_arguments() -> None:
    assert len(inspect.signature(plan).parameters) <= 12
