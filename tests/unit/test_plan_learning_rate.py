"""The learning rate under growth: the rule, and scaled schedules against natively built ones."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from each import each
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler as lrs
from torch.optim.swa_utils import SWALR

from vram_guard import TrainingStep, plan
from vram_guard.apply.learning_rate import scale_learning_rates
from vram_guard.errors import InvalidInputError
from vram_guard.plan import PlanOptions
from vram_guard.plan.learning_rate import learning_rate_factor

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS = 40
K = 3.0


def optimizer(scale: float) -> torch.optim.SGD:
    groups = [
        {"params": [torch.nn.Parameter(torch.zeros(2))]},
        {"params": [torch.nn.Parameter(torch.zeros(2))], "lr": 0.02 * scale},
    ]
    return torch.optim.SGD(groups, lr=0.1 * scale, momentum=0.9)


def sequential(opt: Any, scale: float) -> Any:
    warm = lrs.LinearLR(opt, start_factor=0.1, total_iters=5)
    cosine = lrs.CosineAnnealingLR(opt, T_max=25, eta_min=0.001 * scale)
    return lrs.SequentialLR(opt, [warm, cosine, lrs.ExponentialLR(opt, 0.9)], milestones=[5, 30])


def chained(opt: Any, scale: float) -> Any:
    return lrs.ChainedScheduler([lrs.ConstantLR(opt, 0.2, total_iters=4), lrs.ExponentialLR(opt, 0.9)])


def nested(opt: Any, scale: float) -> Any:
    inner = sequential(opt, scale)
    return lrs.ChainedScheduler([inner, lrs.StepLR(opt, 11)])


#: Each builds its scheduler with every absolute learning rate multiplied by ``scale``.
SCHEDULERS: dict[str, Callable[[Any, float], Any]] = {
    "LambdaLR": lambda o, s: lrs.LambdaLR(o, lambda t: 0.95**t),
    "MultiplicativeLR": lambda o, s: lrs.MultiplicativeLR(o, lambda t: 0.97),
    "StepLR": lambda o, s: lrs.StepLR(o, 7, 0.5),
    "MultiStepLR": lambda o, s: lrs.MultiStepLR(o, [5, 20], 0.3),
    "ConstantLR": lambda o, s: lrs.ConstantLR(o, 0.25, 25),
    "LinearLR": lambda o, s: lrs.LinearLR(o, 0.1, 0.7, 15),
    "ExponentialLR": lambda o, s: lrs.ExponentialLR(o, 0.93),
    "PolynomialLR": lambda o, s: lrs.PolynomialLR(o, 30, 2.0),
    "CosineAnnealingLR": lambda o, s: lrs.CosineAnnealingLR(o, 12, eta_min=0.003 * s),
    "CosineAnnealingWarmRestarts": lambda o, s: lrs.CosineAnnealingWarmRestarts(o, 6, 2, eta_min=0.002 * s),
    "OneCycleLR": lambda o, s: lrs.OneCycleLR(o, [0.5 * s, 0.2 * s], total_steps=STEPS + 2),
    "OneCycleLR three phases": lambda o, s: lrs.OneCycleLR(
        o, 0.5 * s, total_steps=STEPS + 2, three_phase=True, anneal_strategy="linear"
    ),
    "CyclicLR": lambda o, s: lrs.CyclicLR(o, 0.01 * s, 0.3 * s, step_size_up=6, mode="triangular2"),
    "CyclicLR exp_range": lambda o, s: lrs.CyclicLR(o, 0.01 * s, 0.3 * s, step_size_up=6, mode="exp_range", gamma=0.97),
    "SWALR": lambda o, s: SWALR(o, swa_lr=0.01 * s, anneal_epochs=30),
    "SequentialLR": sequential,
    "ChainedScheduler": chained,
    "ChainedScheduler of SequentialLR": nested,
    "ReduceLROnPlateau": lambda o, s: lrs.ReduceLROnPlateau(o, factor=0.5, patience=5, min_lr=[0.004 * s, 0.003 * s]),
}


def rates(opt: Any, scheduler: Any, steps: int) -> list[list[float]]:
    """The learning rates that the next ``steps`` optimizer steps use."""
    used = []
    for _ in range(steps):
        used.append([float(group["lr"]) for group in opt.param_groups])
        opt.step()
        if isinstance(scheduler, lrs.ReduceLROnPlateau):
            scheduler.step(1.0)  # a loss that never gets better
        else:
            scheduler.step()
    return used


@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")
@pytest.mark.parametrize("already_run", [0, 13])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_scaled_schedule_equals_one_built_at_the_new_rate(name: str, already_run: int) -> None:
    native_optimizer = optimizer(K)
    native = SCHEDULERS[name](native_optimizer, K)
    scaled_optimizer = optimizer(1)
    scaled = SCHEDULERS[name](scaled_optimizer, 1)
    rates(native_optimizer, native, already_run)
    rates(scaled_optimizer, scaled, already_run)

    assert scale_learning_rates(scaled_optimizer, [scaled], K) == ()

    expected = rates(native_optimizer, native, STEPS - already_run)
    actual = rates(scaled_optimizer, scaled, STEPS - already_run)
    assert len({tuple(row) for row in expected}) > 1  # the schedule really moves
    torch.testing.assert_close(torch.tensor(actual), torch.tensor(expected), rtol=1e-6, atol=0)
    if hasattr(native, "get_last_lr"):
        assert scaled.get_last_lr() == pytest.approx(native.get_last_lr(), rel=1e-9)


#: transformers' schedules, by the arguments that its get_scheduler takes; absolute rates times ``scale``.
HUGGING_FACE: dict[str, Callable[[float], dict[str, Any]]] = {
    "constant_with_warmup": lambda s: {},
    "linear": lambda s: {},
    "cosine": lambda s: {},
    "cosine_with_restarts": lambda s: {"num_cycles": 2},
    "polynomial": lambda s: {"lr_end": 1e-3 * s},
    "inverse_sqrt": lambda s: {},
    "cosine_with_min_lr": lambda s: {"min_lr": 2e-3 * s},
    "warmup_stable_decay": lambda s: {"num_decay_steps": 10},
}


def hugging_face(name: str, opt: Any, scale: float) -> Any:
    optimization = pytest.importorskip("transformers.optimization")
    extra = HUGGING_FACE[name](scale)
    return optimization.get_scheduler(name, opt, 5, STEPS, scheduler_specific_kwargs=extra)


@pytest.mark.parametrize("already_run", [0, 3])
@pytest.mark.parametrize("name", HUGGING_FACE)
def test_scaled_hugging_face_schedules(name: str, already_run: int) -> None:
    native_optimizer, scaled_optimizer = optimizer(K), optimizer(1)
    native = hugging_face(name, native_optimizer, K)
    scaled = hugging_face(name, scaled_optimizer, 1)
    rates(native_optimizer, native, already_run)
    rates(scaled_optimizer, scaled, already_run)
    scale_learning_rates(scaled_optimizer, [scaled], K)
    expected = torch.tensor(rates(native_optimizer, native, STEPS - already_run))
    actual = torch.tensor(rates(scaled_optimizer, scaled, STEPS - already_run))
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-12)


def test_a_wrapper_is_looked_through() -> None:
    class Wrapper:
        def __init__(self, scheduler: Any) -> None:
            self.scheduler = scheduler

        def __getattr__(self, name: str) -> Any:
            return getattr(self.scheduler, name)

    opt = optimizer(1)
    inner = lrs.StepLR(opt, 5)
    assert scale_learning_rates(opt, [Wrapper(inner), inner], 2.0) == ()
    assert inner.base_lrs == pytest.approx([0.2, 0.04])


def test_a_learning_rate_tensor_shared_by_groups_and_defaults_is_multiplied_once() -> None:
    shared = torch.tensor(0.1)
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    opt = torch.optim.Adam([{"params": [p]} for p in parameters], lr=shared, capturable=False, foreach=False)
    assert opt.param_groups[0]["lr"] is opt.param_groups[1]["lr"]
    scale_learning_rates(opt, [], 4.0)
    assert opt.param_groups[0]["lr"] is shared  # in place: a captured graph reads this very tensor
    assert float(shared) == pytest.approx(0.4)


def test_what_cannot_be_scaled_is_named() -> None:
    class Unknown:
        def step(self) -> None: ...

    opt = optimizer(1)
    opt.param_groups[1]["lr"] = None
    assert scale_learning_rates(opt, [Unknown()], 2.0) == (
        "parameter group 1 has no learning rate of its own (lr=None)",
        "no learning rates were recognised in Unknown",
    )
    assert opt.param_groups[0]["lr"] == pytest.approx(0.2)


@each("factor", [0, -1.0, math.nan, math.inf, True, "2", None])
def test_nonsense_factors_change_nothing(factor: Any) -> None:
    opt = optimizer(1)
    with pytest.raises(InvalidInputError, match="factor"):
        scale_learning_rates(opt, [], factor)
    assert opt.param_groups[0]["lr"] == 0.1


def test_rules() -> None:
    assert learning_rate_factor("linear", 32, 128) == 4.0
    assert learning_rate_factor("sqrt", 32, 128) == 2.0
    assert learning_rate_factor("none", 32, 128) == 1.0


@given(st.sampled_from(["linear", "sqrt", "none"]), *[st.integers(1, 10**6)] * 3)
def test_factors_compose_and_leave_an_unchanged_batch_alone(rule: str, a: int, b: int, c: int) -> None:
    assert learning_rate_factor(rule, a, a) == 1.0
    there = learning_rate_factor(rule, a, b) * learning_rate_factor(rule, b, c)
    assert there == pytest.approx(learning_rate_factor(rule, a, c))


@pytest.mark.parametrize(
    ("made", "rule", "found"),
    [
        (lambda parameters: torch.optim.SGD(parameters, momentum=0.9), "linear", "arXiv:1706.02677"),
        (torch.optim.AdamW, "sqrt", "arXiv:2205.10287"),
        pytest.param(
            getattr(torch.optim, "Muon", None),
            "linear",
            "",
            marks=pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon"),
        ),
    ],
)
def test_auto_takes_the_rule_of_the_optimizer_that_the_step_has(made: Any, rule: str, found: str) -> None:
    step = TrainingStep(
        model=lambda: torch.nn.Sequential(torch.nn.Linear(256, 256, bias=False)),
        batch=lambda size: torch.zeros(size, 256),
        loss=lambda net, x: net(x).sum(),
        optimizer=made,
    )
    grown = plan(step, 4, "200MiB", grow=True, margin=0, options=PlanOptions(lr_rule="auto"))
    share = grown.effective_batch_size / grown.effective_batch_size_before
    assert share > 1
    assert grown.learning_rate_factor == (math.sqrt(share) if rule == "sqrt" else share)
    said = " ".join(grown.reasons)
    assert f"(rule: {rule})" in said
    assert found in said
    assert ("arXiv:" in said) == bool(found)


def test_what_is_given_twice_is_multiplied_once() -> None:
    opt = optimizer(1)
    inner = lrs.CosineAnnealingLR(opt, 12, eta_min=0.003)
    outer = lrs.ChainedScheduler([inner])
    scale_learning_rates(opt, [outer, inner, outer], 2.0)
    assert inner.base_lrs == pytest.approx([0.2, 0.04])
    assert inner.eta_min == pytest.approx(0.006)


@pytest.mark.parametrize(("rule", "before", "after"), [("cubic", 1, 2), ("linear", 0, 2), ("linear", 2, 1.5)])
def test_rules_refuse_nonsense(rule: str, before: Any, after: Any) -> None:
    with pytest.raises(InvalidInputError):
        learning_rate_factor(rule, before, after)
