"""Blocks that are not pure: checkpointing puts back what they change, or plans leave them out and say why."""

from __future__ import annotations

import contextlib
import random
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from architectures import ARCHITECTURES, Architecture
from each import each
from torch import nn

from vram_guard.errors import RecomputationError, UnsupportedStepError
from vram_guard.plan import PlanOptions, plan
from vram_guard.plan.descriptions import Why
from vram_guard.plan.source import TraceRequest, source_of
from vram_guard.simulate.tracing.run import run_step, with_built_model
from vram_guard.step import TrainingStep
from vram_guard.techniques import Recipe, find_blocks, install
from vram_guard.timeline import StateChange

WIDTH = 8


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


class Block(nn.Module):
    """A pure one; others say in ``extra`` what else they do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.setup()

    def setup(self) -> None:
        pass

    def extra(self, x):
        return x

    def forward(self, x):
        # Not at the end: a recomputation stops once it has made what the backward pass asks for.
        return x + torch.tanh(self.norm(self.linear(self.extra(x))))


# --- what is put back ------------------------------------------------------------------------------------------------


class DrawsFromPython(Block):
    def extra(self, x):
        return x * random.random()


class DrawsFromNumPy(Block):
    def extra(self, x):
        return x * float(np.random.default_rng(np.random.randint(99)).random()) * np.random.rand()


class CountsCalls(Block):
    def setup(self):
        self.calls = 0

    def extra(self, x):
        self.calls += 1
        return x / self.calls


class CarriesState(Block):
    def setup(self):
        self.state = None

    def extra(self, x):
        mean = x.detach().mean(0)
        self.state = mean if self.state is None else 0.9 * self.state + 0.1 * mean
        return x - self.state


class WritesBuffer(Block):
    def setup(self):
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("spread", torch.ones(WIDTH))
        self.register_buffer("count", torch.zeros(()))

    def extra(self, x):
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        self.spread = 0.9 * self.spread + 0.1 * x.detach().square().mean(0)
        self.count += 1
        return (x - self.mean.clone()) * self.spread * self.count.sqrt()


class SpectralNorm(Block):
    def setup(self):
        self.inner = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def extra(self, x):
        return self.inner(x)


class SpectralNormByHook(SpectralNorm):
    def setup(self):
        self.inner = nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))


class Normalises(Block):
    def setup(self):
        self.batch, self.frozen = nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH).eval()
        self.cumulative = nn.BatchNorm1d(WIDTH, momentum=None)
        self.instance = nn.InstanceNorm1d(2, track_running_stats=True, affine=True)

    def extra(self, x):
        x = self.cumulative(self.frozen(self.batch(x)))
        return self.instance(x.unflatten(1, (2, -1))).flatten(1)


class DropsOut(Block):
    def extra(self, x):
        return nn.functional.alpha_dropout(torch.tanh(nn.functional.dropout(x, 0.3)), 0.1)


class MakesTablesAtItsFirstCall(Block):
    def setup(self):
        self.mask, self.tables, self.flag = None, {}, [True]

    def extra(self, x):
        if self.mask is None:
            self.mask = torch.ones(WIDTH, device=x.device)
        if len(x) not in self.tables:
            self.tables[len(x)] = torch.ones(WIDTH, device=x.device)
        self.flag[0] = True
        return x * self.mask * self.tables[len(x)]


class SeedsItsOwnGenerator(Block):
    def extra(self, x):
        return x * torch.rand(x.shape, generator=torch.Generator().manual_seed(3), device=x.device)


class WritesWhatItMade(Block):
    def extra(self, x):
        made = torch.zeros_like(x)
        made[:, :2] = x[:, :2]
        table = torch.tensor([1.0, 2.0])
        table[0] = 3.0
        return nn.functional.relu(made.add_(x), inplace=True) * float(table.sum())


class UpdatesATeacherWithoutGradients(Block):
    """The forward of the block itself runs without gradients: it does not run twice."""

    def setup(self):
        self.teacher = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x):
        if torch.is_grad_enabled():
            with torch.no_grad():
                self(x)
            return super().forward(x) + self.teacher(x)
        self.teacher.weight.mul_(0.9).add_(self.linear.weight, alpha=0.1)
        return x


PURE: tuple[type[Block], ...] = (
    *(Block, DropsOut, DrawsFromPython, DrawsFromNumPy, CountsCalls, CarriesState, WritesBuffer, SpectralNorm),
    *(SpectralNormByHook, Normalises, MakesTablesAtItsFirstCall, SeedsItsOwnGenerator, WritesWhatItMade),
)


# --- what is not -----------------------------------------------------------------------------------------------------


class WritesBufferUnseen(Block):
    """The codebook of a vector quantisation with moving averages."""

    def setup(self):
        self.register_buffer("codes", torch.zeros(WIDTH))

    def extra(self, x):
        self.codes.data.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x - self.codes.clone()


class WritesTensor(Block):
    def setup(self):
        self.scale = torch.ones(())

    def extra(self, x):
        self.scale.mul_(0.9)
        return x * self.scale.clone()


class UpdatesTeacher(Block):
    def setup(self):
        self.teacher = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def extra(self, x):
        with torch.no_grad():
            self.teacher.weight.lerp_(self.linear.weight, 0.5)
        return x + self.teacher(x.detach())


class DrawsFromItsOwn(Block):
    def setup(self):
        self.generator = torch.Generator().manual_seed(3)

    def extra(self, x):
        return x * torch.rand(x.shape, generator=self.generator, device=x.device)


GENERATOR = torch.Generator()


class DrawsFromAGlobalOne(Block):
    def extra(self, x):
        return x * torch.rand(x.shape, generator=GENERATOR, device=x.device)


class DrawsFromNumPysOwn(Block):
    def setup(self):
        self.generator = np.random.default_rng(0)

    def extra(self, x):
        return x * float(self.generator.random())


class DrawsFromPythonsOwn(Block):
    def setup(self):
        self.generator = random.Random(0)

    def extra(self, x):
        return x * self.generator.random()


class FillsQueue(Block):
    def setup(self):
        self.queue = deque([torch.zeros(())] * 3, maxlen=3)

    def extra(self, x):
        self.queue.append(self.queue[-1] + 1)
        return x * len(self.queue) + float(self.queue[0])


class CountsInDict(Block):
    def setup(self):
        self.seen = {"calls": 0}

    def extra(self, x):
        self.seen["calls"] += 1
        return x / self.seen["calls"]


class Meter:
    def __init__(self) -> None:
        self.total = 0.0


class CountsInHelper(Block):
    def setup(self):
        self.meter = Meter()

    def extra(self, x):
        self.meter.total = 0.5 * self.meter.total + 1.0
        return x / self.meter.total


class CountsInArray(Block):
    def setup(self):
        self.counts = np.zeros(2)

    def extra(self, x):
        self.counts += 1
        return x / float(self.counts[0])


class CountsInClass(Block):
    calls = 0

    def extra(self, x):
        CountsInClass.calls += 1
        return x / CountsInClass.calls


class CountsInHook(Block):
    def setup(self):
        calls: list[int] = []
        self.linear.register_forward_hook(lambda module, args, out: calls.append(1) or out / len(calls))


IMPURE: tuple[tuple[type[Block], str, str], ...] = (
    (WritesBufferUnseen, "buffer", "codes"),
    (WritesTensor, "tensor", "scale"),
    (UpdatesTeacher, "parameter", "teacher.weight"),
    (DrawsFromItsOwn, "generator", "generator"),
    (DrawsFromAGlobalOne, "generator", ""),
    (DrawsFromNumPysOwn, "generator", "generator"),
    (DrawsFromPythonsOwn, "generator", "generator"),
    (FillsQueue, "object", "queue"),
    (CountsInDict, "object", "seen"),
    (CountsInHelper, "object", "meter"),
    (CountsInArray, "object", "counts"),
    (CountsInClass, "object", "CountsInClass.calls"),
    (CountsInHook, "object", "calls"),
)


# --- the same training -----------------------------------------------------------------------------------------------


def stack(*kinds: type[Block]) -> nn.Module:
    return nn.Sequential(*(kind() for kind in kinds), nn.Linear(WIDTH, 1))


def square(model, batch):
    return model(batch).square().mean()


def step_of(*kinds: type[Block]) -> TrainingStep:
    torch.manual_seed(0)
    return TrainingStep(stack(*kinds), lambda size: torch.randn(size, WIDTH), square, sgd)


def trained(kinds: tuple[type[Block], ...], recipe: Recipe) -> dict[str, Any]:
    """Everything that three steps leave: weights, buffers, plain attributes, the process's generators."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    GENERATOR.manual_seed(0)
    CountsInClass.calls = 0
    model = stack(*kinds)
    install(model, recipe)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        square(model, torch.randn(4, WIDTH)).backward()
        optimizer.step()
    left: dict[str, Any] = dict(model.state_dict())
    for path, module in model.named_modules():
        plain = {name: value for name, value in vars(module).items() if isinstance(value, (int, float, torch.Tensor))}
        left |= {f"{path}.{name}": value for name, value in plain.items()}
    return {**left, "drawn": (random.random(), np.random.rand(), float(torch.rand(())))}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name]
        for name, value in one.items()
    )


@each("kind", PURE)
def test_what_can_be_put_back_is_and_the_block_stays_a_candidate(kind: type[Block]) -> None:
    kinds, recipe = (kind, kind, kind), Recipe(checkpoint=("0", "1", "2"))
    assert same(trained(kinds, Recipe()), trained(kinds, recipe))
    step = step_of(*kinds)
    assert run_step(step, 2, (8, 0), recipe.checkpoint).changes == ()
    assert plan(step, 64, "1GiB", pin={"checkpoint": "all"}).checkpointed_modules == ("0", "1", "2")


@each(("kind", "what", "name"), IMPURE)
def test_an_impure_block_is_left_out_or_put_back(kind: type[Block], what: str, name: str) -> None:
    kinds = (Block, kind, Block, kind)
    with contextlib.suppress(RecomputationError):  # or it differs in what it leaves alone, which is not compared
        left = trained(kinds, Recipe(checkpoint=("1", "3")))
        assert not same(trained(kinds, Recipe()), left), "there is nothing to find"
    step = step_of(*kinds)
    assert run_step(step, 2, (8, 0), ["1", "3"]).changes == (StateChange("1", what, name), StateChange("3", what, name))  # type: ignore[arg-type]
    made = plan(step, 64, "1GiB", options=PlanOptions(blocks=["0", "1", "2", "3"]), pin={"checkpoint": "all"})
    assert made.checkpointed_modules == ("0", "2")
    reason = next(reason for reason in made.reason_values if reason.kind is Why.NOT_CHECKPOINTED)
    assert str(reason).startswith("1, 3 cannot be checkpointed: the forward ")
    assert name in str(reason)
    assert same(trained(kinds, Recipe()), trained(kinds, made.recipe))


# --- no block is refused by mistake ----------------------------------------------------------------------------------


def assert_pure(step: TrainingStep, least: int = 0) -> None:
    step = with_built_model(step, (8, 0))
    names = [*(block.name for block in find_blocks(step.model)), ""]  # type: ignore[arg-type]
    assert len(names) > least
    watched = run_step(step, 2, (8, 0), names)
    assert watched.changes == ()
    assert watched == run_step(step, 2, (8, 0)), "watching a forward leaves its allocations alone"


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda architecture: architecture.name)
def test_ordinary_models_are_pure(architecture: Architecture) -> None:
    assert_pure(architecture.step())


def words(size: int) -> torch.Tensor:
    return torch.ones(size, 16, dtype=torch.long)


def images(size: int) -> torch.Tensor:
    return torch.randn(size, 3, 64, 64)


def language(model, ids):
    return model(input_ids=ids, labels=ids).loss


def vision(model, pixels):
    return model(pixel_values=pixels).logits.square().mean()


@pytest.mark.parametrize(
    ("kind", "settings", "batch", "loss"),
    [
        ("GPT2LMHeadModel", {"n_layer": 3}, words, language),
        ("ViTForImageClassification", {"num_hidden_layers": 3, "image_size": 64}, images, vision),
        ("MixtralForCausalLM", {"num_hidden_layers": 2, "hidden_size": 64, "num_local_experts": 2}, words, language),
    ],
)
def test_models_of_hugging_face_are_pure(kind: str, settings: dict[str, Any], batch: Any, loss: Any) -> None:
    transformers = pytest.importorskip("transformers")
    made = getattr(transformers, kind)
    config = made.config_class(**settings)
    assert_pure(TrainingStep(lambda: made(config), batch, loss, sgd), least=2)


def test_a_block_that_is_called_several_times_and_one_whose_part_is_shared() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([MakesTablesAtItsFirstCall(), Normalises(), FillsQueue()])
            self.blocks[0].linear = self.blocks[1].linear

        def forward(self, x):
            for block in (*self.blocks, self.blocks[0], self.blocks[2]):
                x = block(torch.cat([x, x]))
            return x

    step = TrainingStep(Recurrent(), lambda size: torch.randn(size, WIDTH), square, sgd)
    changes = run_step(step, 2, (8, 0), ["blocks.0", "blocks.1", "blocks.2"]).changes
    assert changes == (StateChange("blocks.2", "object", "queue"),)


def test_a_forward_without_gradients_does_not_run_twice_and_may_write() -> None:
    step = step_of(UpdatesATeacherWithoutGradients, Block)
    step.model[0].eval()  # type: ignore[index]
    assert run_step(step, 2, (8, 0), ["0"]).changes == ()
    step.model[0].train()  # type: ignore[index]
    assert run_step(step, 2, (8, 0), ["0"]).changes == (StateChange("0", "parameter", "teacher.weight"),)


# --- plans -----------------------------------------------------------------------------------------------------------


def test_a_pin_of_an_impure_block_is_refused_before_anything_is_searched() -> None:
    step = step_of(Block, FillsQueue, Block)
    for pin in (("1",), ("0", "1"), 3):
        with pytest.raises(UnsupportedStepError):
            plan(step, 64, "1GiB", options=PlanOptions(blocks=["0", "1", "2"]), pin={"checkpoint": pin})
    assert plan(
        step, 64, "1GiB", options=PlanOptions(blocks=["0", "1", "2"]), pin={"checkpoint": 2}
    ).checkpointed_modules == ("0", "2")
    with pytest.raises(UnsupportedStepError):
        plan(step_of(FillsQueue, FillsQueue), 64, "1GiB", pin={"checkpoint": "all"})


def test_impure_blocks_are_offloaded_and_the_others_are_checkpointed() -> None:
    step = step_of(Block, FillsQueue, Block, FillsQueue, Block)
    pinned = plan(
        step,
        64,
        "1GiB",
        options=PlanOptions(blocks=list("01234")),
        pin={"offload_activations": ("1",), "checkpoint": ("0",)},
    )
    assert (pinned.recipe.offload_activations, pinned.checkpointed_modules) == (("1",), ("0",))
    usable = source_of(step, (8, 0)).trace(TraceRequest(30000, "32-true")).at(30000).peak_reserved - 1
    made = plan(step, 30000, usable, margin=0, allow=["checkpoint"], options=PlanOptions(blocks=list("01234")))
    assert made.fits
    assert set(made.checkpointed_modules) <= {"0", "2", "4"}
    assert "1, 3 cannot be checkpointed" in " ".join(made.reasons)


TABLES: list[torch.Tensor] = []


def test_what_a_forward_writes_of_others() -> None:
    class WritesInput(Block):
        def forward(self, x):
            return self.linear(x.add_(1))

    class WritesTable(Block):
        def extra(self, x):
            return x + TABLES[0].add_(1).clone()

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = WritesInput(), WritesTable()

        def forward(self, x):
            TABLES[:] = [torch.zeros(WIDTH, device=x.device)]
            return self.second(self.first(x * 1.0))

    step = TrainingStep(Whole(), lambda size: torch.randn(size, WIDTH), square, sgd)
    changes = run_step(step, 2, (8, 0), ["first", "second"]).changes
    assert changes == (StateChange("first", "input", ""), StateChange("second", "elsewhere", ""))
