"""Optimizer states on the host: torchao's real optimizer against the plain one, and the trace of it.

torchao's CPUOffloadOptimizer starts on a machine with a GPU only: it asks for CUDA streams and pinned memory. The
``gpu`` fixture (what a proof runs under) stands for those two; everything else, the arithmetic above all, is real.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from test_techniques_optimizers import MAKERS, WIDTH, net
from torch import nn

from vram_guard import TrainingStep
from vram_guard.errors import UnsupportedTechniqueError
from vram_guard.simulate.tracing.run import run_step
from vram_guard.techniques import Recipe, optimizer_for
from vram_guard.techniques.cpu_as_gpu import cpu_as_gpu
from vram_guard.techniques.optimizers import repoint

pytest.importorskip("torchao")
# torchao says on import which of its CUDA extensions it cannot load.
pytestmark = pytest.mark.filterwarnings("ignore")


def on_host(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    return optimizer_for(optimizer, Recipe(optimizer_on_host=True))


@pytest.fixture
def gpu() -> Iterator[None]:
    with cpu_as_gpu(Recipe(optimizer_on_host=True)):
        yield


def steps(model, optimizer, count=3, accumulate=1, scheduler=None, seed=1):
    generator = torch.Generator().manual_seed(seed)
    rates = []
    for _ in range(count):
        for _ in range(accumulate):
            (model(torch.randn(8, WIDTH, generator=generator)).square().mean() / accumulate).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
        rates.append([group["lr"] for group in optimizer.param_groups])
    return rates


def same(one: nn.Module, other: nn.Module) -> None:
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_training_equals_the_plain_one(name, accumulate):
    model, written = net(), net()
    optimizer = on_host(MAKERS[name](model.parameters()))
    assert len(optimizer.param_d2h_map) == 2  # the weights; the biases are too small
    steps(model, optimizer, accumulate=accumulate)
    steps(written, MAKERS[name](written.parameters()), accumulate=accumulate)
    same(model, written)
    assert all(p.grad is None for p in model.parameters())


def halved(weight: nn.Parameter) -> None:
    weight.grad.mul_(0.5)


def replaced(weight: nn.Parameter) -> None:
    weight.grad = torch.ones_like(weight)


def dropped(weight: nn.Parameter) -> None:
    weight.grad = None


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("edit", [halved, replaced, dropped])
def test_gradients_that_are_edited_before_the_step_count_as_they_are_then(edit: Callable[[nn.Parameter], None]) -> None:
    def trained(moved: Callable[[torch.optim.Optimizer], torch.optim.Optimizer]) -> nn.Module:
        model = net()
        optimizer = moved(torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9))
        for scale in (1.0, 2.0, 3.0):
            optimizer.zero_grad()
            model(torch.full((8, WIDTH), scale)).square().mean().backward()
            edit(model[0].weight)
            optimizer.step()
        optimizer.step()  # once more with the gradients that are there
        model[2].weight.grad = None
        optimizer.step()
        return model

    same(trained(on_host), trained(lambda optimizer: optimizer))


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("where", ["after the step", "before the step", "never"])
def test_weights_that_are_written_through_data_are_stepped_from_there(name: str, where: str) -> None:
    def written(model: nn.Module) -> None:
        for p in model.parameters():
            p.data.clamp_(-0.05, 0.05)
        model[2].weight.data = model[2].weight.data.flip(0)  # the same values elsewhere

    def trained(moved: Callable[[torch.optim.Optimizer], torch.optim.Optimizer]) -> nn.Module:
        model = net()
        optimizer = moved(MAKERS[name](model.parameters()))
        for scale in (1.0, 2.0, 3.0, 4.0):
            optimizer.zero_grad()
            model(torch.full((8, WIDTH), scale)).square().mean().backward()
            if where == "before the step":
                written(model)
            optimizer.step()
            if where == "after the step":
                written(model)
        return model

    same(trained(on_host), trained(lambda optimizer: optimizer))


@pytest.mark.usefixtures("gpu")
def test_groups_schedulers_and_what_is_written_to_groups_keep_working():
    def make():
        model = net()
        groups = [{"params": [p for p in model.parameters() if p.dim() > 1], "lr": 1e-2}]
        groups.append({"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0})
        return model, torch.optim.AdamW(groups, lr=1e-3)

    model, plain = make()
    written, reference = make()
    early = torch.optim.lr_scheduler.ExponentialLR(plain, 0.5)  # built over the old one
    optimizer = on_host(plain)
    assert optimizer.param_groups is plain.param_groups
    assert optimizer.defaults == reference.defaults
    expected = torch.optim.lr_scheduler.ExponentialLR(reference, 0.5)
    repoint(early, optimizer)
    assert steps(model, optimizer, scheduler=early) == steps(written, reference, scheduler=expected)
    same(model, written)

    late = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[1e-2, 1e-3], total_steps=10)
    other = torch.optim.lr_scheduler.OneCycleLR(reference, max_lr=[1e-2, 1e-3], total_steps=10)
    assert steps(model, optimizer, scheduler=late) == steps(written, reference, scheduler=other)
    same(model, written)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_checkpoints_go_from_plain_to_host_and_back(name):
    model, written = net(), net()
    plain = MAKERS[name](written.parameters())
    optimizer = on_host(MAKERS[name](model.parameters()))
    steps(model, optimizer)
    steps(written, plain)
    saved, reference = optimizer.state_dict(), plain.state_dict()
    assert saved["state"].keys() == reference["state"].keys()
    assert [group["params"] for group in saved["param_groups"]] == [g["params"] for g in reference["param_groups"]]
    for number, state in saved["state"].items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(value, reference["state"][number][key], rtol=1e-5, atol=1e-7)

    resumed, back = net(), net()
    taken = on_host(MAKERS[name](resumed.parameters()))
    resumed.load_state_dict(written.state_dict())  # after the host's copies were made
    taken.load_state_dict(copy.deepcopy(reference))
    back.load_state_dict(model.state_dict())
    returned = MAKERS[name](back.parameters())
    returned.load_state_dict(copy.deepcopy(saved))
    for one, two in ((model, optimizer), (written, plain), (resumed, taken), (back, returned)):
        steps(one, two, seed=5)
    same(resumed, written)
    same(back, model)
    same(model, written)


@pytest.mark.usefixtures("gpu")
def test_what_frameworks_ask_of_an_optimizer_is_answered():
    model = net()
    optimizer = on_host(torch.optim.AdamW(model.parameters()))
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.state == {}
    called = []
    optimizer.register_step_pre_hook(lambda *args: called.append("pre"))
    loss = optimizer.step(lambda: model(torch.ones(2, WIDTH)).sum().backward() or torch.ones(()))
    assert loss.item() == 1
    assert set(optimizer.state) == set(model.parameters())
    assert {state["exp_avg"].shape for state in optimizer.state.values()} == {(WIDTH, WIDTH), (WIDTH,)}
    with pytest.raises(UnsupportedTechniqueError):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    with pytest.raises(ValueError, match="parameter groups"):
        optimizer.load_state_dict(torch.optim.AdamW([nn.Parameter(torch.zeros(1))]).state_dict())
    assert "AdamW" in repr(optimizer)


def test_optimizers_that_cannot_step_there_are_refused():
    class Mine(torch.optim.AdamW):
        pass

    parameters = list(net().parameters())
    for optimizer in (torch.optim.RMSprop(parameters), Mine(parameters)):
        with pytest.raises(UnsupportedTechniqueError, match=f"{type(optimizer).__name__} cannot step on the host"):
            on_host(optimizer)
    with pytest.raises(UnsupportedTechniqueError, match="differentiable"):
        on_host(torch.optim.AdamW(parameters, differentiable=True))


# --- in the trace ----------------------------------------------------------------------------------------------------


def traced(recipe: Recipe, **settings):
    return run_step(
        TrainingStep(
            model=net,
            batch=lambda size: torch.zeros(size, WIDTH),
            loss=lambda model, batch: model(batch).square().mean(),
            optimizer=lambda parameters: torch.optim.AdamW(parameters),
            recipe=recipe,
            **settings,
        ),
        4,
        (8, 0),
    )


def held(timeline, category: str) -> int:
    """Bytes of a category, over all blocks that are never freed."""
    gone = {~event for event in timeline.events if event < 0}
    return sum(b.size.base for i, b in enumerate(timeline.blocks) if b.category == category and i not in gone)


def test_the_trace_counts_what_torchao_allocates():
    timeline, plain = traced(Recipe(optimizer_on_host=True)), traced(Recipe())
    weight, bias = WIDTH * WIDTH * 4, WIDTH * 4
    assert held(plain, "optimizer_states") == 2 * 2 * (weight + bias)
    # The biases' two states, and the fused kernel's count of steps beside each.
    assert held(timeline, "optimizer_states") == 2 * (2 * bias + 4)
    assert held(timeline, "parameters") == held(plain, "parameters") == 2 * (weight + bias)
    # On the host: a copy of each weight, of its gradient, and its two states; these are powers of two already, as
    # which CUDA hands out pinned memory.
    assert timeline.at(4).host_peak == 2 * 4 * weight
    assert timeline.tier == "symbolic"


def test_copies_are_on_a_stream_of_their_own_and_the_step_on_the_host():
    work = [(one.phase, one.stream, one.transfer.base) for one in traced(Recipe(optimizer_on_host=True)).work]
    weight = WIDTH * WIDTH * 4
    gradients = [moved for phase, stream, moved in work if phase == "backward" and stream]
    assert gradients == [weight, weight]
    weights = [moved for phase, stream, moved in work if phase == "optimizer" and stream]
    assert weights == [weight] * 4, "down, since other code may have written to them, and back"
    assert {one.stream for one in traced(Recipe()).work} == {0}


@pytest.mark.usefixtures("gpu")
def test_frozen_parameters_are_left_alone():
    model = net()
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    steps(model, on_host(torch.optim.AdamW(model.parameters())))
    assert torch.equal(model[0].weight, before)
