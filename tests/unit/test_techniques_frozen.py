"""Frozen modules wait on the host: same results, what is refused, and what the trace sees."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vram_guard import TrainingStep
from vram_guard.errors import InvalidInputError, UnsupportedTechniqueError
from vram_guard.simulate.tracing.run import run_step
from vram_guard.techniques import Recipe
from vram_guard.techniques.frozen import frozen_candidates, keep_on_host

pytest.importorskip("accelerate")

WIDTH = 256


class Distilled(nn.Module):
    """A student and its teacher, which is run under no_grad or just not trained."""

    def __init__(self, guard: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.student = nn.Linear(WIDTH, WIDTH)
        self.teacher = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))
        self.teacher.requires_grad_(False)
        self.guard = guard

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(not self.guard):
            target = self.teacher(x)
        return (self.student(x) - target).square().mean()


def train(model: nn.Module, steps: int = 3) -> list[float]:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(8, WIDTH, generator=generator))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("guard", [True, False])
def test_training_with_a_teacher_on_the_host_is_bit_identical(guard):
    model, written = Distilled(guard), Distilled(guard)
    undo = keep_on_host(model, ["teacher"], "cpu")
    assert train(model) == train(written)
    for (name, mine), theirs in zip(model.state_dict().items(), written.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs), name  # running statistics of the teacher's BatchNorm as well
    undo()
    assert "forward" not in vars(model.teacher)
    assert "_apply" not in vars(model.teacher)
    assert not model.teacher._forward_hooks
    assert train(model) == train(written)


def test_candidates_are_the_outermost_frozen_modules_that_are_worth_it():
    class Model(Distilled):
        def __init__(self) -> None:
            super().__init__()
            self.tiny = nn.Linear(2, 2).requires_grad_(False)
            self.towers = nn.ModuleList([nn.Linear(WIDTH, WIDTH).requires_grad_(False), nn.Linear(WIDTH, WIDTH)])
            self.bare = nn.ReLU()
            self.tied = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
            self.other = nn.Linear(WIDTH, WIDTH)
            self.other.weight = self.tied.weight

    assert frozen_candidates(Model(), at_least=1000) == ("teacher", "towers.0")
    assert frozen_candidates(Model()) == ()  # under 3 MiB nothing is worth two transfers
    assert frozen_candidates(nn.Linear(WIDTH, WIDTH).requires_grad_(False), at_least=1) == ()


def test_what_cannot_wait_is_refused_and_nothing_is_changed():
    model = Distilled()
    for names, error, words in (
        (["student"], UnsupportedTechniqueError, r"student cannot be kept on the host.*weight is trained"),
        (["teacher", "nobody"], InvalidInputError, "nobody"),
        ([""], InvalidInputError, "no module named"),
        (["teacher", "teacher.0"], InvalidInputError, r"teacher\.0.*lies inside"),
    ):
        with pytest.raises(error, match=words):
            keep_on_host(model, names, "cpu")
    assert "forward" not in vars(model.teacher)
    model.head = nn.Linear(WIDTH, WIDTH)
    model.head.weight = model.teacher[0].weight
    with pytest.raises(UnsupportedTechniqueError, match=r"head\.weight"):
        keep_on_host(model, ["teacher"], "cpu")
    model.bare = nn.ReLU()
    with pytest.raises(UnsupportedTechniqueError):
        keep_on_host(model, ["bare"], "cpu")
    model.towers = nn.ModuleList([nn.Linear(2, 2)]).requires_grad_(False)
    with pytest.raises(UnsupportedTechniqueError):
        keep_on_host(model, ["towers"], "cpu")


class Perceptual(Distilled):
    """Gradients flow through the frozen module to what is trained below it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.teacher(self.student(x)).square().mean()


class Encoded(Distilled):
    """The frozen module is used by another way than its forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            latent = self.teacher[0](x)
        return (self.student(x) - latent).square().mean()


class Averaged(Distilled):
    """The teacher's weights follow the student's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.teacher[0].weight.lerp_(self.student.weight, 0.1)
        return super().forward(x)


# --- in the trace ----------------------------------------------------------------------------------------------------


def traced(kind: type[nn.Module] = Distilled, *names: str):
    return run_step(
        TrainingStep(
            model=kind(),
            batch=lambda size: torch.zeros(size, WIDTH),
            loss=lambda model, batch: model(batch),
            optimizer=lambda parameters: torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.1),
            recipe=Recipe(frozen_on_host=names),
        ),
        8,
        (8, 0),
    )


@pytest.mark.parametrize("kind", [Perceptual, Encoded, Averaged])
def test_the_trace_refuses_what_would_fail_on_the_gpu(kind):
    traced(kind)
    with pytest.raises(UnsupportedTechniqueError):
        traced(kind, "teacher")


def most_alive(timeline, wanted) -> int:
    live = most = 0
    for event in timeline.events:
        block = timeline.blocks[event if event >= 0 else ~event]
        if wanted(block):
            live += block.size.base if event >= 0 else -block.size.base
            most = max(most, live)
    return most


def alive_at_the_end_of_backward(timeline) -> int:
    """Bytes of parameters alive where the last optimizer step begins."""
    start = timeline.phases[-1].start
    gone = {~event for event in timeline.events[:start] if event < 0}
    return sum(
        timeline.blocks[event].size.base
        for event in timeline.events[:start]
        if event >= 0 and event not in gone and timeline.blocks[event].category == "parameters"
    )


def test_the_trace_takes_the_weights_for_the_forward_alone():
    weights = sum(p.numel() * 4 for p in Distilled().teacher.parameters())
    student = sum(p.numel() * 4 for p in Distilled().student.parameters())
    plain, waiting = traced(), traced(Distilled, "teacher")
    assert alive_at_the_end_of_backward(plain) == student + weights
    assert alive_at_the_end_of_backward(waiting) == student
    assert most_alive(waiting, lambda block: block.category == "parameters") == student + weights
    assert waiting.at(8).host_peak == weights
    assert plain.at(8).host_peak == 0
    # The peak is in the backward pass, or after it: exactly the teacher's weights are missing there.
    assert plain.at(8).peak_phase.name in ("backward", "optimizer")
    granted = sum(-(-p.numel() * 4 // 512) * 512 for p in Distilled().teacher.parameters())
    saved = plain.at(8).peak_allocated - waiting.at(8).peak_allocated
    assert 0 < saved <= granted


def test_after_an_exception_in_the_forward_the_weights_are_back(monkeypatch):
    model = Distilled()
    keep_on_host(model, ["teacher"], "cpu")
    waiting = [p.data_ptr() for p in model.teacher.parameters()]
    copied = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *args, **kwargs: copied(self, *args, **kwargs).clone())

    def fail(module, args, out):
        raise torch.OutOfMemoryError("CUDA out of memory")

    handle = model.teacher[2].register_forward_hook(fail)
    with pytest.raises(torch.OutOfMemoryError):
        model(torch.ones(4, WIDTH))
    assert [p.data_ptr() for p in model.teacher.parameters()] == waiting
    handle.remove()
    model(torch.ones(4, WIDTH))


def test_a_hook_that_was_there_before_stays():
    from accelerate.hooks import ModelHook, add_hook_to_module

    class Doubles(ModelHook):
        def post_forward(self, module, output):
            return 2 * output

    model, written = Distilled(), Distilled()
    add_hook_to_module(model.teacher, Doubles())
    add_hook_to_module(written.teacher, Doubles())
    undo = keep_on_host(model, ["teacher"], "cpu")
    assert train(model) == train(written)
    undo()
    assert train(model) == train(written)
