"""plan(): arguments, budgets and GPUs, and real steps traced under every option."""

from __future__ import annotations

import ast
import gc
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
from vram_guard.job import Evaluation, Saving
from vram_guard.language import speaking
from vram_guard.limits import TRACES_KEPT
from vram_guard.plan import PlanOptions, plan
from vram_guard.plan.descriptions import Why
from vram_guard.plan.techniques import resident_batch
from vram_guard.report.text import render
from vram_guard.simulate import trace

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


#: Techniques whose timelines take little time.
CHEAP = ("precision", "accumulate", "checkpoint")


@pytest.mark.parametrize("uneven", [False, True])
def test_a_plan_keeps_its_own_timelines_alone(uneven: bool) -> None:
    """A guard keeps the plan for as long as the training runs; a search makes dozens of timelines."""
    validation = Evaluation(lambda size: torch.zeros(size, 512, 64), lambda model, numbers: model(numbers), 4)
    job = Job.of(validation, Saving())
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


@pytest.mark.parametrize("micro_batches", [3, 8])
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


def test_inference_has_nothing_to_accumulate() -> None:
    made = plan(STEP.with_(optimizer=None), 64, "10MiB")
    assert not made.fits
    assert made.accumulate == 1
    assert Why.NO_GRADIENTS in {reason.kind for reason in made.reason_values}


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


@pytest.mark.parametrize("first", ["import vram_guard.plan.tracing", "pass"])
def test_the_public_name_is_the_function(first: str) -> None:
    code = f"{first}\nfrom vram_guard import plan\nimport types\nassert isinstance(plan, types.FunctionType)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


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


@each(
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


@pytest.mark.torch_since(2, 6)
@pytest.mark.parametrize(
    "pin",
    [
        {"checkpoint": 2},
        {"offload_activations": 1},
        {"optimizer_on_host": True, "checkpoint": 1},
        {"parameters_on_host": True},
    ],
)
def test_what_an_option_takes_is_enough_for_it(pin: dict[str, Any]) -> None:
    """The search leaves out what its lower bound says cannot fit: that must be true of each."""
    step, quiet = DEEP.with_(model=lambda: Deep(3)), {"allow": (), "margin": 0}
    for precision, size in (("32-true", 16), ("bf16-mixed", 4)):
        pinned = {**pin, "precision": precision, "micro_batch_size": size}
        taken = plan(step, 16, "4GiB", pin=pinned, **quiet).peak
        assert plan(step, 16, taken, pin=pinned, **quiet).fits, pinned


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


def test_where_only_fragments_are_too_much_the_plan_says_that_segments_could_grow() -> None:
    """2600 samples reserve 406 MiB, of which 325 MiB are ever used at once; in segments that grow, 362 MiB."""
    layers = [part for _ in range(8) for part in (torch.nn.Linear(1024, 1024), torch.nn.GELU())]
    step = TrainingStep(
        torch.nn.Sequential(*layers),
        lambda size: torch.ones(size, 1024),
        lambda model, x: model(x).square().mean(),
        torch.optim.AdamW,
    )
    would_fit = {
        allow: [one.kind for one in plan(step, 2600, "380MiB", margin=0, allow=allow).reason_values].count(
            Why.EXPANDABLE_WOULD_FIT
        )
        for allow in ((), ("accumulate",), ("expandable_segments",))
    }
    assert list(would_fit.values()) == [1, 1, 0]
    grown = plan(step, 2600, "380MiB", margin=0, allow=["expandable_segments"])
    assert grown.fits
    assert grown.recipe.expandable_segments
    for budget in ("300MiB", "500MiB"):
        other = plan(step, 2600, budget, margin=0, allow=[])
        assert Why.EXPANDABLE_WOULD_FIT not in [one.kind for one in other.reason_values]


# --- why ---


def test_a_pin_on_a_step_that_fits_does_not_say_that_it_does_not() -> None:
    pinned = plan(STEP, 8, "4GiB", pin={"micro_batch_size": 2})
    assert pinned.changed
    assert pinned.fits_as_written
    assert not plan(STEP, 64, "60MiB", margin=0).fits_as_written


@pytest.mark.parametrize(
    ("pin", "changes"),
    [
        ({"optimizer_on_host": True, "optimizer": "8bit"}, {}),
        ({"optimizer_in_backward": True}, {"accumulate": 2}),
    ],
)
def test_pins_that_the_step_does_not_admit_are_said(pin: dict[str, Any], changes: dict[str, Any]) -> None:
    made = plan(STEP.with_(**changes), 8, "1GiB", pin=pin)
    assert (made.fits, made.fits_as_written, made.changed) == (False, True, False)
    assert [reason.kind for reason in made.reason_values] == [Why.PINS_REFUSED, Why.UNCHANGED]
    short = plan(STEP.with_(**changes), 1, "4MiB", pin=pin)
    assert [reason.kind for reason in short.reason_values] == [Why.SHORTAGE, Why.PINS_REFUSED, Why.UNCHANGED]


def test_a_pin_that_does_not_fit_is_not_called_applied() -> None:
    made = plan(STEP, 8, "1GiB", pin={"offload_activations": ("first",)}, options=PlanOptions(host_budget="1KiB"))
    assert (made.fits, made.fits_as_written, made.changed) == (False, True, False)
    assert [reason.kind for reason in made.reason_values] == [Why.PINS_DO_NOT_FIT, Why.UNCHANGED]


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
    kinds = [reason.kind for reason in made.reason_values]
    assert kinds == [Why.SHORTAGE, Why.REFUSED, Why.REFUSED_SEVERAL, Why.UNCHANGED]
    grown = plan(STEP, 8, "4GiB", grow=True, options=PlanOptions(refused=refused))
    assert grown.batch_size == 8


def test_a_plan_is_read_in_the_language_of_its_reader() -> None:
    made = plan(STEP, 64, "60MiB", margin=0)
    with speaking("en"):
        english = render(made)
    with speaking("zh"):
        chinese = render(made)
        assert any("微批" in reason for reason in made.reasons)
    with speaking("en"):
        assert render(made) == english != chinese


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


def test_a_number_that_lacks_a_unit_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="24 bytes"):
        plan(STEP, 16, 24)
