"""Slices: a module over some rows of its batch at a time, whatever the loss; and which module of a step that may be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from each import each
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from vram_guard import TrainingStep, plan
from vram_guard.errors import InvalidInputError, RecomputationError, UnsupportedTechniqueError
from vram_guard.proof.bodies import find_body
from vram_guard.proof.samples_apart import SamplesApart
from vram_guard.techniques import Body, Recipe, Slices, install

ROWS = 12


class Net(nn.Module):
    """A perceptron, whose body is what the tests slice."""

    def __init__(self, body: nn.Module | None = None, width: int = 6) -> None:
        super().__init__()
        self.body = body or nn.Sequential(nn.Linear(width, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.body(*args, **kwargs)


def gradients(net: nn.Module, loss: Callable[[nn.Module], torch.Tensor]) -> list[torch.Tensor]:
    net.zero_grad()
    loss(net).backward()
    return [one.grad.clone() for one in net.parameters() if one.grad is not None]


def sliced(net: nn.Module, loss: Callable[[nn.Module], torch.Tensor], total: int, again: int, **body: Any) -> Any:
    """Gradients in slices; the optimizer's step looks at what was computed again."""
    undo = install(net, Recipe(slices=Slices(Body("body", **{"cut": ("0",), **body}), total, again)))
    try:
        found = gradients(net, loss)
        torch.optim.SGD(net.parameters(), 0.0).step()
    finally:
        undo()
    return found


def flooding(p: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return ((p - y).square().mean() - 3.0).abs() + 3.0


LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "flooding": flooding,
    "a bound on the mean": lambda p, y: (p - y).square().mean().clamp(max=1.2),
    "root of the mean": lambda p, y: (p - y).square().mean().sqrt(),
    "contrastive": lambda p, y: F.cross_entropy(p @ p.T / 0.1, torch.arange(len(p))),
    "missing targets": lambda p, y: (p[y[:, 0] > 0] - y[y[:, 0] > 0]).square().mean(),
    "hardest examples": lambda p, y: (p - y).square().mean(1).topk(5).values.mean(),
    "trimmed mean": lambda p, y: (p - y).square().mean(1).sort().values[:9].mean(),
}


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(sorted(LOSSES)),
    total=st.integers(2, 16),
    again=st.integers(1, 16),
    rows=st.integers(5, ROWS),
    seed=st.integers(0, 1000),
)
def test_gradients_are_those_of_the_whole_batch(name: str, total: int, again: int, rows: int, seed: int) -> None:
    torch.manual_seed(seed)
    net = Net().double()
    x, y = torch.randn(rows, 6).double(), torch.randn(rows, 4).double()
    y[:5, 0] = 1.0

    def loss(net: nn.Module) -> torch.Tensor:
        return LOSSES[name](net(x), y[:rows])

    wanted = gradients(net, loss)
    torch.testing.assert_close(sliced(net, loss, total, min(again, total)), wanted, rtol=1e-10, atol=1e-12)


class Containers(nn.Module):
    """Named arguments, a mask for every sample, and results in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 4)
        self.dropout = nn.Dropout(0.5)

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor], *, scale: torch.Tensor, name: str = "x") -> Any:
        out = self.inner(pair[0] + pair[1]) * scale
        return {"out": self.dropout(out), "more": [out.sum(1)], "name": name}


def test_arguments_and_results_in_containers() -> None:
    torch.manual_seed(0)
    net, pair, scale = Net(Containers()).double(), (torch.randn(ROWS, 6).double(),) * 2, torch.randn(4).double()
    returned: list[Any] = []

    def loss(net: nn.Module) -> torch.Tensor:
        returned.append(net(pair, scale=scale))
        return returned[-1]["more"][0].logsumexp(0) + returned[-1]["out"].square().mean().sqrt() * 0

    wanted = gradients(net, loss)
    torch.testing.assert_close(sliced(net, loss, 4, 3, whole=("scale",)), wanted)
    assert returned[1]["name"] == "x"
    assert returned[1]["out"].shape == (ROWS, 4)


def test_gradients_reach_the_arguments() -> None:
    torch.manual_seed(0)
    net, x = Net().double(), torch.randn(ROWS, 6, dtype=torch.float64, requires_grad=True)

    def loss(net: nn.Module) -> torch.Tensor:
        x.grad = None
        return net(x).square().mean().sqrt()

    gradients(net, loss)
    assert x.grad is not None
    wanted = x.grad.clone()
    sliced(net, loss, 4, 2)
    torch.testing.assert_close(x.grad, wanted)


def test_an_evaluation_and_other_arguments_run_as_written() -> None:
    net = Net()
    calls: list[int] = []
    net.body[0].register_forward_hook(lambda _module, args, _out: calls.append(len(args[0])))
    undo = install(net, Recipe(slices=Slices(Body("body", ("x",)), 4, 2)))
    net(torch.randn(ROWS, 6))
    net.eval()(torch.randn(ROWS, 6))
    with torch.no_grad():
        net.train()(torch.randn(ROWS, 6))
    undo()
    assert calls == [ROWS] * 3
    assert "forward" not in vars(net.body)


def test_an_empty_batch_runs_as_written() -> None:
    net = Net()
    undo = install(net, Recipe(slices=Slices(Body("body", ("0",)), 4, 2)))
    assert net(torch.randn(0, 6)).shape == (0, 4)
    undo()


def test_a_second_forward_that_differs_stops_the_training() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.scales = nn.Linear(6, 4), [1.0]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x * self.scales[0]).tanh()

    net = Net(Scaled())

    def loss(net: nn.Module) -> torch.Tensor:
        net.body.scales[0] = 1.0
        out = net(torch.ones(ROWS, 6)).square().mean()
        net.body.scales[0] = 2.0
        return out

    with pytest.raises(RecomputationError, match="body"):
        sliced(net, loss, 4, 2)


@each(("total", "again", "checkpoint"), [(1, 1, ()), (4, 0, ()), (4, 5, ()), (4, 2, ("body.0",))])
def test_recipes_that_make_no_sense(total: int, again: int, checkpoint: tuple[str, ...]) -> None:
    with pytest.raises(InvalidInputError):
        Recipe(slices=Slices(Body("body", ("0",)), total, again), checkpoint=checkpoint)


# --- the body of a step -----------------------------------------------------------------------------------------------


def step_of(net: nn.Module, loss: Callable[[Any, Any], Any] | None = None) -> TrainingStep:
    def flooded(net: nn.Module, batch: Any) -> torch.Tensor:
        return flooding(net(batch[0]), batch[1])

    def batch(size: int) -> Any:
        return torch.randn(size, 6), torch.randn(size, 4)

    return TrainingStep(net, batch, loss or flooded, torch.optim.SGD)


class ReturnsLoss(nn.Module):
    """As the models of Transformers: the loss is computed inside, over what its body returns."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.head = Net(), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return flooding(self.head(self.model(x)), y)


def test_the_outermost_module_that_returns_rows() -> None:
    assert find_body(step_of(Net()), ROWS) == Body("", ("0",))
    inner = find_body(step_of(ReturnsLoss(), lambda net, batch: net(*batch)), ROWS)
    assert inner == Body("model", ("0",))


class Taught(nn.Module):
    """A student beside a teacher that is larger, and has no gradients."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.student, self.frozen = Net(), frozen
        self.teacher = Net(nn.Sequential(nn.Linear(6, 64), nn.GELU(), nn.Linear(64, 4))).requires_grad_(not frozen)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(self.frozen):
            taught = self.teacher(x)
        return flooding(self.student(x), y) + flooding(self.student(x), taught)


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "without gradients"])
def test_a_body_is_what_has_gradients(frozen: bool) -> None:
    assert find_body(step_of(Taught(frozen), lambda net, batch: net(*batch)), ROWS) == Body("student", ("0",))


class OfBody(nn.Module):
    """A perceptron with a seam for what a body must not do."""

    def __init__(self, does: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.does = nn.Linear(6, 16), nn.Linear(16, 4), does
        self.norm, self.calls, self.seen = nn.BatchNorm1d(16), 0, list[Any]()
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.does(self, self.first(x).tanh()))


def _counts(net: Any, x: torch.Tensor) -> torch.Tensor:
    net.calls += 1
    return x


def _keeps(net: Any, x: torch.Tensor) -> torch.Tensor:
    net.seen.append(x)
    return x


def _averages(net: Any, x: torch.Tensor) -> torch.Tensor:
    net.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
    return x


def _branches(net: Any, x: torch.Tensor) -> torch.Tensor:
    return x if x.sum() > 0 else -x


JOINED: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "centred over the batch": lambda net, x: x - x.mean(0),
    "attention over samples": lambda net, x: F.softmax(x @ x.T, -1) @ x,
    "sorted": lambda net, x: x.sort(0).values,
    "turned round": lambda net, x: x.flip(0),
    "divided by the samples": lambda net, x: x / len(x),
    "one number for all samples": lambda net, x: x * torch.rand(()),
    "batch normalisation": lambda net, x: net.norm(x),
    "a counter": _counts,
    "a list": _keeps,
    "a running mean": _averages,
    "a branch on data": _branches,
    "shuffled": lambda net, x: x[torch.randperm(len(x))],
}


@each("kind", JOINED)
def test_what_is_no_body(kind: str) -> None:
    with pytest.raises(UnsupportedTechniqueError):
        find_body(step_of(OfBody(JOINED[kind])), ROWS)


def test_normalisation_of_each_sample_stays_in_a_body() -> None:
    class Normalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.norm, self.last = nn.Linear(6, 16), nn.InstanceNorm1d(4, affine=True), nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.norm(self.inner(x).view(-1, 4, 4)).flatten(1))

    assert find_body(step_of(Normalised()), ROWS) == Body("", ("0",))


@each(("strides", "stays"), [((4, 1), True), ((1, 4), False)])
def test_rows_are_followed_through_a_view_in_place(strides: tuple[int, int], stays: bool) -> None:
    x = torch.randn(4, 4)
    with SamplesApart(x, 4, None) as apart:
        view = x.clone().as_strided_((4, 4), strides)
    assert bool(apart.written & apart.before) != stays
    assert (apart.label(view).ids.flatten().tolist() == [0, 1, 2, 3]) == stays


def test_what_leaves_a_body_is_named() -> None:
    net = Net()
    caught: list[torch.Tensor] = []
    net.body[1].register_forward_hook(lambda _module, _args, out: caught.append(out))
    with pytest.raises(UnsupportedTechniqueError, match="hook"):
        find_body(step_of(net, lambda net, batch: flooding(net(batch[0]), batch[1]) + caught.pop().mean()), ROWS)


@each("tells_whose", [True, False])
def test_what_packs_saved_tensors_is_named(tells_whose: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def halved(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.half()

    if not tells_whose:  # before torch 2.8
        monkeypatch.delattr(torch._C._autograd, "_top_saved_tensors_default_hooks", raising=False)
    hooks = torch.autograd.graph.saved_tensors_hooks(halved, torch.Tensor.float)
    with hooks, pytest.raises(UnsupportedTechniqueError, match="halved packs" if tells_whose else "hooks packs"):
        find_body(step_of(Net()), ROWS)
    assert find_body(step_of(Net()), ROWS)


def _tokens(size: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 90, (size, 16))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def _pictures(size: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(size, 3, 32, 32), "labels": torch.randint(0, 4, (size,))}


SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
STAGES = {"hidden_sizes": [8, 8], "depths": [1, 1], "num_stages": 2}
WINDOWS = {"embed_dim": 8, "depths": [1], "num_heads": [2], "image_size": 32}
ARCHITECTURES: list[tuple[str, dict[str, Any], Callable[[int], Any], str]] = [
    ("GPT2LMHeadModel", {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 99}, _tokens, "transformer"),
    ("LlamaForCausalLM", {**SMALL, "vocab_size": 99}, _tokens, "model"),
    ("BertForMaskedLM", {**SMALL, "vocab_size": 99}, _tokens, "bert"),
    ("ViTForImageClassification", {**SMALL, "image_size": 32, "patch_size": 8}, _pictures, "vit"),
    ("SwinForImageClassification", WINDOWS, _pictures, "swin"),
    ("ConvNextForImageClassification", STAGES, _pictures, "convnext"),
]


@each(("name", "config", "batch", "body"), ARCHITECTURES)
def test_bodies_of_architectures(name: str, config: dict[str, Any], batch: Callable[[int], Any], body: str) -> None:
    kind = getattr(pytest.importorskip("transformers"), name)
    step = TrainingStep(kind(kind.config_class(**config)), batch, lambda net, one: net(**one).loss, torch.optim.SGD)
    assert find_body(step, 8).name == body


def test_a_plan_computes_as_many_slices_again_as_are_needed() -> None:
    net = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 4))

    def loss(net: nn.Module, batch: Any) -> torch.Tensor:
        return flooding(net(batch[0]).mean(1), batch[1])

    def batch(size: int) -> Any:
        return torch.randn(size, 256, 64), torch.randn(size, 4)

    step = TrainingStep(net, batch, loss, torch.optim.SGD)
    step = step.with_(body=find_body(step, 64))
    peak = plan(step, 64, "80GiB").peak
    plans = [plan(step, 64, int(share * peak), allow=["slices"], margin=0.0) for share in (1.1, 0.9, 0.75, 0.6)]
    assert all(one.fits for one in plans)
    assert plans[0].recipe.slices is None
    again = [one.recipe.slices.again / one.recipe.slices.count for one in plans[1:]]
    assert again == sorted(again)
    assert plans[1].slowdown < plans[3].slowdown
