"""The optimizer in the backward pass: the same training, with no more than a few gradients at once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vram_guard import TrainingStep, plan
from vram_guard.errors import UnsupportedTechniqueError
from vram_guard.simulate import trace
from vram_guard.techniques import Recipe, incompatible, step_where

IN_BACKWARD = Recipe(optimizer_in_backward=True)

MAKERS = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
    "fused": lambda groups: torch.optim.AdamW(groups, lr=1e-2, fused=True),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9, nesterov=True),
    "Adafactor": lambda groups: torch.optim.Adafactor(groups, lr=1e-2),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-2, foreach=True),
}


def _net() -> nn.Sequential:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    net[4].weight = net[0].weight  # shared: its gradient is complete once both have added to it
    net[2].bias.requires_grad_(requires_grad=False)
    return net


def _trained(kind: str, *, in_backward: bool) -> tuple[list[torch.Tensor], object, list[float], int]:
    net, steps = _net(), 0
    groups = [{"params": [net[0].weight], "weight_decay": 0.1}, {"params": [net[0].bias, *net[2:].parameters()]}]
    groups[1]["params"] = [p for p in groups[1]["params"] if p is not net[0].weight]
    optimizer = MAKERS[kind](groups)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    undo = step_where([optimizer], IN_BACKWARD if in_backward else Recipe())
    optimizer.register_step_post_hook(lambda *_: None)
    rates = []

    def closure() -> torch.Tensor:
        loss: torch.Tensor = net(torch.ones(4, 8)).square().sum()
        optimizer.zero_grad()
        loss.backward()
        return loss

    for number in range(4):
        if number == 3:
            undo()  # as before from here on
        optimizer.step(closure)
        scheduler.step()
        steps += sum(p.grad is not None for p in net.parameters())
        rates.append(optimizer.param_groups[1]["lr"])
    return [p.detach() for p in net.parameters()], optimizer.state_dict(), rates, steps


@pytest.mark.parametrize(
    "kind", [*sorted(MAKERS.keys() - {"Adafactor"}), pytest.param("Adafactor", marks=pytest.mark.torch_since(2, 5))]
)
def test_it_is_the_same_training(kind: str) -> None:
    weights, states, rates, _count = _trained(kind, in_backward=False)
    again, own, same_rates, left = _trained(kind, in_backward=True)
    torch.testing.assert_close(again, weights, rtol=0, atol=0)
    torch.testing.assert_close(own, states, rtol=0, atol=0)
    assert rates == same_rates
    assert left == 4  # gradients of the last step alone, which was no longer made in the backward pass


def test_what_cannot_is_refused() -> None:
    weights = list(_net().parameters())
    for optimizer, why in (
        (torch.optim.LBFGS(weights), "LBFGS cannot step in the backward pass"),
        (type("AdamW", (torch.optim.AdamW,), {})(weights), "AdamW cannot step"),
    ):
        with pytest.raises(UnsupportedTechniqueError, match=why):
            step_where([optimizer], IN_BACKWARD)
    hooked = torch.optim.AdamW(weights)
    hooked.register_step_pre_hook(lambda *_: None)
    with pytest.raises(UnsupportedTechniqueError):
        step_where([torch.optim.SGD(weights), hooked], IN_BACKWARD)
    assert not any(getattr(weight, "_post_accumulate_grad_hooks", None) for weight in weights)


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"clip": True}, "clipped"),
        ({"precision": "16-mixed"}, "GradScaler"),
        ({"ranks": 2}, "processes"),
        ({"accumulate": 2}, "2 backward passes"),
        ({"optimizer_name": "LBFGS"}, "LBFGS"),
        ({}, ""),
        ({"optimizer_name": "AdamW8bit", "precision": "bf16-mixed"}, ""),
    ],
)
def test_steps_that_it_does_not_go_with(facts: dict[str, object], why: str) -> None:
    said = incompatible(IN_BACKWARD, **facts)  # type: ignore[arg-type]
    assert (why in said) if why else not said


def _step() -> TrainingStep:
    net = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(8)))
    return TrainingStep(net, torch.ones(2, 512), lambda net, batch: net(batch).sum(), torch.optim.SGD)


def test_the_trace_has_one_gradient_at_a_time() -> None:
    step = _step()
    whole, single = (trace(step.with_(recipe=recipe)).at(2).peak_allocated for recipe in (Recipe(), IN_BACKWARD))
    one = 512 * 512 * 4
    assert 6 * one <= whole - single <= 7 * one


def test_a_plan_takes_it_where_it_is_allowed() -> None:
    made = plan(_step(), 2, "32MiB", margin=0, allow=["optimizer_in_backward"])
    assert made.fits
    assert made.recipe == IN_BACKWARD
    assert ("optimizer", "as written", "in the backward pass") in made.changes()
    assert made.timeline is not None
    assert {block.category for block in made.timeline.blocks} >= {"gradients"}
    clipped = plan(_step().with_(clip_grad_norm=1.0), 2, "32MiB", margin=0, allow=["optimizer_in_backward"])
    assert not clipped.fits
