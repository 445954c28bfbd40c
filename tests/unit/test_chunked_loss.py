"""Logits and their cross-entropy in chunks: equal, and without the logits in memory."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from vram_guard import TrainingStep, plan
from vram_guard.errors import InvalidInputError, UnsupportedTechniqueError
from vram_guard.simulate import trace
from vram_guard.techniques import Recipe, install

HIDDEN, CLASSES = 16, 300
IN_CHUNKS = Recipe(chunked_head="head")


class Language(nn.Module):
    """Tokens to logits, and what is done to them."""

    def __init__(self, then: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, HIDDEN)
        self.head = nn.Linear(HIDDEN, CLASSES, bias=True)
        self.head.weight = self.embed.weight  # tied, as most are
        self.then = then

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.then(self.head(self.embed(tokens).tanh()), tokens)


def _shifted(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    logits, labels = logits[..., :-1, :].contiguous(), tokens[..., 1:].contiguous()
    return functional.cross_entropy(logits.view(-1, CLASSES), labels.view(-1))


def _ignoring(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    labels = functional.pad(tokens, (0, 1), value=-100)[..., 1:].to(logits.device)
    assert logits.shape == (*tokens.shape, CLASSES)
    assert logits.size(-1) == CLASSES
    assert logits.dim() == len(logits.shape) == 3
    return functional.cross_entropy(logits.float().view(-1, logits.shape[-1]), labels.reshape(-1), ignore_index=-100)


LOSSES = {
    "shifted": _shifted,
    "ignored labels, a cast": _ignoring,
    "classes second": lambda logits, tokens: functional.cross_entropy(logits.transpose(1, 2), tokens),
    "permuted": lambda logits, tokens: functional.cross_entropy(logits.permute(0, 2, 1), tokens, reduction="sum"),
    "soft cap": lambda logits, tokens: functional.cross_entropy(
        ((logits / 3.0).tanh() * 3.0).flatten(0, 1), tokens.flatten(), reduction="sum"
    ),
    "each, smoothed": lambda logits, tokens: (
        functional.cross_entropy(logits[:, 1:].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        .view(len(tokens), -1)
        .mean(1)
        .pow(2)
        .sum()
        + functional.cross_entropy(logits.reshape(-1, CLASSES), tokens.reshape(-1), label_smoothing=0.1)
    ),
    "weighted": lambda logits, tokens: nn.CrossEntropyLoss(torch.linspace(0.5, 2, CLASSES).to(logits.dtype))(
        logits.view(-1, CLASSES), tokens.masked_fill(tokens < 30, -100).view(-1)
    ),
}


def _trained(model: nn.Module, tokens: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model(tokens)
    loss.backward()
    return loss.detach(), {name: weight.grad.clone() for name, weight in model.named_parameters()}  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", LOSSES)
def test_loss_and_gradients_are_equal_and_the_logits_are_never_there(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = torch.randint(0, CLASSES, (3, 19), generator=torch.Generator().manual_seed(1))
    model = Language(LOSSES[kind]).double()
    loss, gradients = _trained(model, tokens)
    undo = install(model, IN_CHUNKS)
    largest = 0
    linear = functional.linear

    def watched(*args: Any) -> torch.Tensor:
        nonlocal largest
        made = linear(*args)
        largest = max(largest, made.numel())
        return made

    monkeypatch.setattr(functional, "linear", watched)
    again, in_chunks = _trained(model, tokens)
    assert 0 < largest <= 4 * CLASSES  # of 57 rows in 19 chunks
    torch.testing.assert_close(again, loss, rtol=5e-7, atol=0)  # "a cast": a loss in single precision
    for name, gradient in gradients.items():
        torch.testing.assert_close(in_chunks[name], gradient, rtol=1e-6, atol=1e-9)
    undo()
    assert "forward" not in vars(model.head)
    _trained(model, tokens)
    assert largest >= 54 * CLASSES


def test_logits_of_other_weights_are_refused() -> None:
    tokens = torch.randint(0, CLASSES, (2, 9))
    model = Language(lambda logits, _tokens: logits)
    install(model, IN_CHUNKS)
    logits = model(tokens)
    functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with pytest.raises(UnsupportedTechniqueError):
        logits.argmax(-1)


def test_a_layer_that_is_none_is_refused() -> None:
    model = Language(_shifted)
    with pytest.raises(UnsupportedTechniqueError, match="is a Embedding"):
        install(model, Recipe(chunked_head="embed"))
    with pytest.raises(InvalidInputError):
        install(model, Recipe(chunked_head="heads"))


def _step(then: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> TrainingStep:
    return TrainingStep(
        Language(then), torch.zeros(2, 64, dtype=torch.long), lambda model, batch: model(batch), torch.optim.AdamW
    )


@pytest.mark.torch_since(2, 6)
def test_the_trace_shows_what_is_saved() -> None:
    step = _step(_shifted)
    whole, chunked = (trace(step.with_(recipe=recipe)).at(64).peak_allocated for recipe in (Recipe(), IN_CHUNKS))
    logits = 64 * 63 * CLASSES * 4
    assert whole - chunked > 2 * logits  # logits, their softmax and gradient; a chunk of each stays


@pytest.mark.torch_since(2, 6)
def test_a_plan_takes_it_where_it_is_allowed_and_a_cross_entropy_follows() -> None:
    made = plan(_step(_shifted), 256, "30MiB", margin=0, allow=["chunked_loss"])
    assert made.fits
    assert made.recipe == IN_CHUNKS
    assert ("loss", "as written", "in chunks, with 'head'") in made.changes()
    assert made.slowdown is not None
    assert made.slowdown > 1, "the layer runs twice"
    other = _step(lambda logits, _tokens: logits.square().mean())
    assert not plan(other, 256, "30MiB", margin=0, allow=["chunked_loss"]).fits
    with pytest.raises(InvalidInputError):
        plan(other, 256, "30MiB", pin={"chunked_loss": True})


def test_whoever_reads_the_logits_gets_them() -> None:
    tokens = torch.randint(0, CLASSES, (2, 9))
    model = Language(lambda logits, _tokens: logits)
    written = model(tokens)
    install(model, IN_CHUNKS)
    logits = model(tokens)
    assert isinstance(logits, torch.Tensor)
    assert torch.equal(logits.argmax(-1), written.argmax(-1))
    assert torch.equal(logits + 1, written + 1)
    assert torch.equal(pickle.loads(pickle.dumps(logits.detach() + 0)), written.detach())
    (logits * written.detach()).sum().backward()
    assert model.head.weight.grad is not None
    with torch.no_grad():
        assert type(model(tokens)) is torch.Tensor
    model.eval()
    assert type(model(tokens)) is torch.Tensor
