"""Values that a step computes on the device and then checks, counts or takes for sizes and indices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from each import each
from torch import distributions as of
from torch import nn
from torch.nn import functional as F

from vram_guard import TrainingStep, trace

CLASSES = 8

Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def followed(loss: Loss) -> Any:
    return trace(
        TrainingStep(
            model=lambda: nn.Linear(16, CLASSES),
            batch=lambda size: torch.zeros(size, 16),
            loss=loss,
            optimizer=torch.optim.AdamW,
        )
    )


DISTRIBUTIONS: dict[str, Callable[[torch.Tensor], of.Distribution]] = {
    "Categorical of logits": lambda x: of.Categorical(logits=x),
    "Categorical of probabilities": lambda x: of.Categorical(probs=x.softmax(1)),
    "OneHotCategorical": lambda x: of.OneHotCategoricalStraightThrough(logits=x),
    "Normal": lambda x: of.Normal(x, x.exp()),
    "Independent": lambda x: of.Independent(of.Normal(x, x.exp()), 1),
    "Bernoulli": lambda x: of.Bernoulli(logits=x),
    "Beta": lambda x: of.Beta(x.exp(), x.exp()),
    "Dirichlet": lambda x: of.Dirichlet(x.exp()),
    "Poisson": lambda x: of.Poisson(x.exp()),
    "MultivariateNormal": lambda x: of.MultivariateNormal(x, scale_tril=torch.diag_embed(x.exp())),
    "MultivariateNormal of covariances": lambda x: of.MultivariateNormal(x, torch.diag_embed(x.exp())),
    "squashed": lambda x: of.TransformedDistribution(of.Normal(x, x.exp()), [of.TanhTransform(cache_size=1)]),
    "of rejected samples": lambda x: of.VonMises(x, x.exp()),
}


@each("name", DISTRIBUTIONS)
def test_distributions_that_check_their_arguments_and_samples_are_followed(name: str) -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        distribution = DISTRIBUTIONS[name](model(batch))
        sample = distribution.rsample() if distribution.has_rsample else distribution.sample()
        return -distribution.log_prob(sample).mean()

    assert followed(loss).blocks


def _by_assert(x: torch.Tensor) -> None:
    assert (x > 0).all()


def _by_error(x: torch.Tensor) -> None:
    if not (x > 0).all():
        raise ValueError


def _by_another_error(x: torch.Tensor) -> None:
    if (x > 0).any() or x.min() < -1:
        raise ValueError


def _by_number(x: torch.Tensor) -> None:
    if x.max().item() < 5:
        raise ValueError


def _by_bool(x: torch.Tensor) -> None:
    healthy = (x > 0).all().item() and bool((x < 1).all())
    if not healthy:
        raise ValueError


def _by_function(x: torch.Tensor) -> None:
    def healthy(part: torch.Tensor) -> bool:
        return bool((part > 0).all())

    assert all(healthy(part) for part in x.unbind(1))


def _by_comparison(x: torch.Tensor) -> None:
    assert torch.equal(x, x * 1)


def _by_allclose(x: torch.Tensor) -> None:
    assert torch.allclose(x, x * 1)
    if torch.allclose(x, x + 1):
        raise ValueError


@each(
    "check",
    [
        _by_allclose,
        _by_assert,
        _by_error,
        _by_another_error,
        _by_number,
        _by_bool,
        _by_function,
        _by_comparison,
    ],
)
def test_a_check_of_a_computed_value_holds_and_costs_no_exactness(check: Callable[[torch.Tensor], None]) -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        out = model(batch)
        check(out)
        return out.sum()

    timeline = followed(loss)
    assert timeline.tier == "symbolic"
    assert timeline.notes
    assert all("test_unknown_values.py" in note.source for note in timeline.notes)


def _while_not(x: torch.Tensor) -> int:
    rounds = 0
    while not (x.norm() < 1):
        x = x / 2
        rounds += 1
    return rounds


def _until_accepted(x: torch.Tensor) -> int:
    rounds = 0
    while True:
        rounds += 1
        if (torch.rand_like(x) > x).all():
            return rounds


def _until_small(x: torch.Tensor) -> int:
    rounds = 0
    while x.sum().item() > 0.1:
        x = x / 2
        rounds += 1
    return rounds


@pytest.mark.parametrize("loop", [_while_not, _until_accepted, _until_small])
def test_a_loop_that_a_computed_value_ends_ends(loop: Callable[[torch.Tensor], int]) -> None:
    rounds: list[int] = []

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        out = model(batch)
        rounds.append(loop(out.detach()))
        return out.sum()

    timeline = followed(loss)
    assert timeline.tier == "partly symbolic"
    assert min(rounds) >= 1


def test_loops_that_end_by_themselves_go_round_as_often_as_they_are_written() -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        out = model(batch)
        rounds = 0
        for _ in range(30):
            rounds += 1
            if (out.detach().tanh() > 0).all():
                break
        assert rounds == 30
        return out.sum()

    assert followed(loss).blocks


def _read(out: torch.Tensor) -> None:
    names = [str(number) for number in range(CLASSES)]
    best = out.argmax(1)
    assert all(names[number] for number in best.tolist())
    assert names[best[0].item()]
    assert names[: best.numel()][out[:, 0].argmax().item()]
    assert ["only"][out[:, :1].argmax(1)[0].item()]
    assert all(names[:3][number] for number in (out.topk(2).indices % 3).flatten().tolist())
    assert all(names[number] for number in torch.multinomial(out.softmax(1), 1).flatten().tolist())


def _counted(out: torch.Tensor) -> None:
    best = out.argmax(1)
    assert len(torch.unique(best)) <= CLASSES
    assert torch.bincount(best).shape == (CLASSES,)
    assert F.one_hot(best).shape[1] == CLASSES


def _as_size(out: torch.Tensor) -> None:
    longest = (out > 0).sum(1).max().item()
    assert torch.zeros(longest).shape == (CLASSES,)  # the most that there may be


@pytest.mark.parametrize("use", [_read, _counted, _as_size])
def test_whole_numbers_are_among_those_that_there_can_be(use: Callable[[torch.Tensor], None]) -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        out = model(batch)
        use(out)
        return out.sum()

    assert followed(loss).blocks
