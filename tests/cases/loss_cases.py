"""Losses of all kinds over one kind of batch, and what weighs their micro-batches right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

Batch = dict[str, torch.Tensor]
Loss = Callable[[Any, Batch], torch.Tensor]

POSITIONS, CLASSES, WIDTH = 5, 4, 3


class Net(nn.Module):
    """Scores of every position, without anything that joins samples or draws numbers."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.LayerNorm(8)).double()
        self.head = nn.Linear(8, CLASSES).double()
        self.other = nn.Linear(8, CLASSES).double()
        self.register_buffer("scale", torch.tensor(0.3, dtype=torch.float64))
        self.register_buffer("rarity", torch.rand(1, CLASSES, dtype=torch.float64) + 0.1)
        self.register_buffer("one", torch.rand(CLASSES, dtype=torch.float64))
        self.register_buffer("twin", self.one)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.body(x))
        return out

    def second(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.other(self.body(x))
        return out


def make_batch(samples: int, seed: int) -> Batch:
    """Random samples, some of them ignored or masked."""
    draw = torch.Generator().manual_seed(seed)

    def labels(ignored: int, *shape: int) -> torch.Tensor:
        drawn = torch.randint(CLASSES, shape, generator=draw)
        left_out = torch.rand(shape, generator=draw) < 0.4
        left_out.view(samples, -1)[:, :2] = False
        return torch.where(left_out, ignored, drawn)

    mask = torch.rand(samples, POSITIONS, generator=draw) < 0.6
    mask[:, 0] = True
    hole = torch.rand(samples, POSITIONS, generator=draw) < 0.3
    hole[:, 1] = False
    return {
        "x": torch.randn(samples, POSITIONS, WIDTH, generator=draw, dtype=torch.float64),
        "truth": torch.randn(samples, POSITIONS, CLASSES, generator=draw, dtype=torch.float64),
        "tokens": labels(-100, samples, POSITIONS),
        "pixels": labels(255, samples, POSITIONS),
        "padded": labels(0, samples, POSITIONS),
        "kind": torch.randint(CLASSES, (samples,), generator=draw),
        "mask": mask,
        "weight": torch.rand(samples, POSITIONS, generator=draw, dtype=torch.float64) * (hole | mask),
        "holed": torch.randn(samples, POSITIONS, generator=draw).double().masked_fill(hole, float("nan")),
        "signs": torch.where(torch.rand(samples, generator=draw) < 0.5, 1.0, -1.0).double(),
    }


class Case(NamedTuple):
    """A loss."""

    loss: Loss
    right: str
    """"mean", "sum", the last key of what is counted, or "" for what no weight is right for."""


WEIGHTS = torch.tensor([0.2, 1.0, 3.0, 0.5], dtype=torch.float64)


def _ce(m: Any, b: Batch, key: str = "tokens", **kwargs: Any) -> torch.Tensor:
    return functional.cross_entropy(m(b["x"]).transpose(1, 2), b[key], **kwargs)


def _each(m: Any, b: Batch) -> torch.Tensor:
    return (m(b["x"]) - b["truth"]).square().mean(-1)


def _pooled(m: Any, b: Batch) -> torch.Tensor:
    return m(b["x"]).mean(1)


def _two(m: Any, b: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    return functional.normalize(_pooled(m, b), dim=-1), functional.normalize(m.second(b["x"]).mean(1), dim=-1)


def _infonce(m: Any, b: Batch) -> torch.Tensor:
    one, two = _two(m, b)
    return functional.cross_entropy(one @ two.t() / 0.1, torch.arange(len(one)))


def _clip(m: Any, b: Batch) -> torch.Tensor:
    one, two = _two(m, b)
    at, scores = torch.arange(len(one)), one @ two.t() * m.scale.exp()
    return (functional.cross_entropy(scores, at) + functional.cross_entropy(scores.t(), at)) / 2


def _focal(m: Any, b: Batch) -> torch.Tensor:
    plain = functional.cross_entropy(m(b["x"])[:, 0], b["kind"], reduction="none")
    return ((1 - torch.exp(-plain)) ** 2 * plain).mean()


def _dice(m: Any, b: Batch) -> torch.Tensor:
    found, real = m(b["x"]).sigmoid()[..., 0], b["mask"].double()
    return 1 - (2 * (found * real).sum() + 1) / (found.sum() + real.sum() + 1)


def _written(weights: torch.Tensor) -> torch.Tensor:
    weights[0] = 2
    return weights


def _dice_of_each(m: Any, b: Batch) -> torch.Tensor:
    found, real = m(b["x"]).sigmoid()[..., 0], b["mask"].double()
    return (1 - (2 * (found * real).sum(1) + 1) / (found.sum(1) + real.sum(1) + 1)).mean()


def _barlow(m: Any, b: Batch) -> torch.Tensor:
    one, two = _two(m, b)
    return ((one.t() @ two / len(one)) - torch.eye(CLASSES)).square().sum()


def _balance(m: Any, b: Batch) -> torch.Tensor:
    gates = m(b["x"]).softmax(-1)
    return (gates.mean((0, 1)) * functional.one_hot(gates.argmax(-1), CLASSES).double().mean((0, 1))).sum()


def _ranking(m: Any, b: Batch) -> torch.Tensor:
    score = _pooled(m, b)[:, 0]
    return functional.softplus(score[:, None] - score[None]).mean()


def _ranking_of_pairs(m: Any, b: Batch) -> torch.Tensor:
    score = _pooled(m, b)[:, 0]
    one, two = torch.triu_indices(len(score), len(score), 1)
    return functional.softplus(score[one] - score[two]).mean()


def _penalty(m: Any, b: Batch) -> torch.Tensor:
    x = b["x"].clone().requires_grad_()
    (slope,) = torch.autograd.grad(m(x).square().sum(), x, create_graph=True)
    return (slope.norm() - 1).square()


def _shifted(m: Any, b: Batch) -> torch.Tensor:
    scores, labels = m(b["x"])[:, :-1], b["tokens"][:, 1:]
    return functional.cross_entropy(scores.reshape(-1, CLASSES), labels.reshape(-1))


def _shifted_and_filled(m: Any, b: Batch) -> torch.Tensor:
    labels = functional.pad(b["tokens"], (0, 1), value=-100)[..., 1:].contiguous()
    return functional.cross_entropy(m(b["x"]).view(-1, CLASSES), labels.view(-1))


def _by_hand(m: Any, b: Batch) -> torch.Tensor:
    counted = b["tokens"] != -100
    each = -m(b["x"]).log_softmax(-1).gather(-1, b["tokens"].clamp(min=0)[..., None])[..., 0]
    return (each * counted).sum() / counted.sum()


def _positives(m: Any, b: Batch) -> torch.Tensor:
    positive = b["padded"] > 0
    return functional.smooth_l1_loss(m(b["x"])[positive], b["truth"][positive])


def _ctc(m: Any, b: Batch) -> torch.Tensor:
    scores = m(b["x"]).log_softmax(-1).transpose(0, 1)
    lengths = torch.full((len(b["x"]),), 1)
    return functional.ctc_loss(scores, b["kind"][:, None].clamp(min=1), lengths * POSITIONS, lengths)


KERNEL = torch.ones(3, POSITIONS, 3, dtype=torch.float64)


def _attended(x: torch.Tensor) -> torch.Tensor:
    return functional.scaled_dot_product_attention(x, x, x)


CASES: dict[str, Case] = {
    # Means over samples.
    "mse": Case(lambda m, b: functional.mse_loss(m(b["x"]), b["truth"]), "mean"),
    "smooth l1": Case(lambda m, b: 5 * functional.smooth_l1_loss(m(b["x"]), b["truth"], beta=0.1), "mean"),
    "huber": Case(lambda m, b: functional.huber_loss(m(b["x"]), b["truth"]), "mean"),
    "l1": Case(lambda m, b: functional.l1_loss(m(b["x"]), b["truth"]), "mean"),
    "bce, pos_weight": Case(
        lambda m, b: functional.binary_cross_entropy_with_logits(m(b["x"]), b["truth"].sigmoid(), pos_weight=WEIGHTS),
        "mean",
    ),
    "batchmean": Case(
        lambda m, b: functional.kl_div(m(b["x"]).log_softmax(-1), b["truth"].softmax(-1), reduction="batchmean"), "mean"
    ),
    "gaussian": Case(lambda m, b: functional.gaussian_nll_loss(m(b["x"]), b["truth"], m.second(b["x"]).exp()), "mean"),
    "poisson": Case(lambda m, b: functional.poisson_nll_loss(m(b["x"]), b["truth"].exp()), "mean"),
    "ctc": Case(_ctc, "mean"),
    "triplet": Case(
        lambda m, b: functional.triplet_margin_loss(_pooled(m, b), b["truth"][:, 0], b["truth"][:, 1]), "mean"
    ),
    "cosine": Case(
        lambda m, b: functional.cosine_embedding_loss(_pooled(m, b), b["truth"][:, 0], b["signs"], margin=0.1), "mean"
    ),
    "margin": Case(
        lambda m, b: functional.margin_ranking_loss(_pooled(m, b)[:, 0], b["truth"][:, 0, 0], b["signs"]), "mean"
    ),
    "over time, then over samples": Case(lambda m, b: _each(m, b).mean(1).mean(0), "mean"),
    "focal": Case(_focal, "mean"),
    "of each": Case(_dice_of_each, "mean"),
    "over the number of samples": Case(lambda m, b: _each(m, b).sum() / len(b["x"]), "mean"),
    "two terms": Case(lambda m, b: _each(m, b).mean() + 0.1 * m.second(b["x"]).abs().mean(), "mean"),
    "penalised": Case(lambda m, b: _each(m, b).mean() + 0.01 * m.head.weight.square().sum(), "mean"),
    "distilled": Case(lambda m, b: 2 - 2 * (_two(m, b)[0] * _two(m, b)[1]).sum(-1).mean(), "mean"),
    "scaled by a buffer": Case(lambda m, b: _each(m, b).mean() * m.scale, "mean"),
    "masked in each": Case(lambda m, b: ((_each(m, b) * b["mask"]).sum(1) / b["mask"].sum(1)).mean(), "mean"),
    "masked, over samples": Case(lambda m, b: _each(m, b)[b["mask"]].sum() / len(b["x"]), "mean"),
    "less two terms": Case(
        lambda m, b: 3 - m(b["x"]).mean() - 0.5 * m(b["x"]).square().mean((0, 1, 2)).float(), "mean"
    ),
    "balanced": Case(lambda m, b: _each(m, b).mean() + (m(b["x"]).softmax(-1).mean((0, 1)) * WEIGHTS).sum(), "mean"),
    "attention within": Case(lambda m, b: _attended(m(b["x"])).square().mean(), "mean"),
    "convolved": Case(lambda m, b: functional.conv1d(m(b["x"]), KERNEL).square().mean(), "mean"),
    "picked": Case(lambda m, b: m(b["x"]).flatten(1)[torch.arange(len(b["x"])), b["kind"]].mean(), "mean"),
    # Sums.
    "mean times samples": Case(lambda m, b: functional.l1_loss(m(b["x"]), b["truth"]) * len(b["x"]), "sum"),
    "sum": Case(lambda m, b: functional.mse_loss(m(b["x"]), b["truth"], reduction="sum"), "sum"),
    "sum over eight": Case(lambda m, b: _each(m, b).sum() / 8, "sum"),
    "labels, summed": Case(lambda m, b: _ce(m, b, reduction="sum"), "sum"),
    "weighed labels, summed": Case(lambda m, b: _ce(m, b, weight=WEIGHTS, reduction="sum"), "sum"),
    "masked, summed": Case(lambda m, b: _each(m, b)[b["mask"]].sum(), "sum"),
    # What the batch counts.
    "cross-entropy": Case(lambda m, b: functional.cross_entropy(_pooled(m, b), b["kind"]), "kind"),
    "ignored": Case(_ce, "tokens"),
    "ignored, flat": Case(
        lambda m, b: functional.cross_entropy(m(b["x"]).view(-1, CLASSES), b["tokens"].view(-1)), "tokens"
    ),
    "ignored 255": Case(lambda m, b: _ce(m, b, "pixels", ignore_index=255), "pixels"),
    "ignored 0": Case(lambda m, b: 0.5 * _ce(m, b, "padded", ignore_index=0), "padded"),
    "of images": Case(
        lambda m, b: functional.cross_entropy(m(b["x"]).transpose(1, 2)[..., None], b["tokens"][..., None]), "tokens"
    ),
    "nll": Case(lambda m, b: functional.nll_loss(m(b["x"]).log_softmax(-1).transpose(1, 2), b["tokens"]), "tokens"),
    "class weights": Case(
        lambda m, b: functional.cross_entropy(_pooled(m, b), b["kind"], weight=m.rarity.flatten()), "kind"
    ),
    "class weights, ignored": Case(lambda m, b: _ce(m, b, weight=m.rarity.clone().squeeze()), "tokens"),
    "class weights, a parameter": Case(lambda m, b: _ce(m, b, weight=m.head.bias.detach()), "tokens"),
    "class weights, of two names": Case(lambda m, b: _ce(m, b, weight=m.twin), ""),
    "class weights, made here": Case(lambda m, b: _ce(m, b, weight=torch.tensor([3, 1, 0, 0.5]).double()), ""),
    "class weights, computed": Case(lambda m, b: _ce(m, b, weight=1 / m.rarity.flatten()), ""),
    "class weights, rounded": Case(lambda m, b: _ce(m, b, weight=m.rarity.flatten().bfloat16().double()), ""),
    "class weights, copied": Case(
        lambda m, b: _ce(m, b, weight=torch.zeros(CLASSES).bfloat16().copy_(m.rarity.flatten()).double()), ""
    ),
    "class weights, in other places": Case(lambda m, b: _ce(m, b, weight=m.rarity.flatten().flip(0)), ""),
    "class weights, changed here": Case(lambda m, b: _ce(m, b, weight=_written(m.rarity.flatten().clone())), ""),
    "class weights of the file": Case(lambda m, b: _ce(m, b, weight=WEIGHTS), ""),
    "smoothed, of samples": Case(
        lambda m, b: functional.cross_entropy(_pooled(m, b), b["kind"], label_smoothing=0.1), "kind"
    ),
    "smoothed": Case(lambda m, b: _ce(m, b, label_smoothing=0.1), "tokens"),
    "smoothed, weighed": Case(lambda m, b: _ce(m, b, label_smoothing=0.1, weight=WEIGHTS), "tokens"),
    "penalised labels": Case(lambda m, b: _ce(m, b) + 0.01 * m.head.weight.square().sum(), "tokens"),
    "next token": Case(_shifted, "tokens"),
    "next token, filled up": Case(_shifted_and_filled, "tokens"),
    "cross-entropy by hand": Case(_by_hand, "tokens"),
    "cross-entropy, summed over labels": Case(
        lambda m, b: _ce(m, b, reduction="none").sum() / (b["tokens"] != -100).sum(), "tokens"
    ),
    "masked": Case(lambda m, b: (_each(m, b) * b["mask"]).sum() / b["mask"].sum(), "mask"),
    "masked, clamped": Case(lambda m, b: (_each(m, b) * b["mask"]).sum() / b["mask"].sum().clamp(min=1), "mask"),
    "masked, filled": Case(lambda m, b: _each(m, b).masked_fill(~b["mask"], 0).sum() / b["mask"].sum(), "mask"),
    "masked, where": Case(lambda m, b: torch.where(b["mask"], _each(m, b), 0).sum() / b["mask"].sum(), "mask"),
    "masked, item": Case(lambda m, b: (_each(m, b) * b["mask"]).sum() / b["mask"].sum().item(), "mask"),
    "masked, of means": Case(lambda m, b: (_each(m, b) * b["mask"]).mean() / b["mask"].double().mean(), "mask"),
    "weighed": Case(lambda m, b: (_each(m, b) * b["weight"]).sum() / b["weight"].sum(), "weight"),
    "cross-entropy, masked": Case(
        lambda m, b: (_ce(m, b, reduction="none") * b["mask"]).sum() / b["mask"].sum(), "mask"
    ),
    "rows": Case(lambda m, b: _each(m, b)[b["mask"]].mean(), "mask"),
    "rows of both": Case(lambda m, b: functional.mse_loss(m(b["x"])[b["mask"]], b["truth"][b["mask"]]), "mask"),
    "selected": Case(lambda m, b: _each(m, b).masked_select(b["mask"]).mean(), "mask"),
    "binary, masked": Case(
        lambda m, b: (
            functional.binary_cross_entropy_with_logits(
                m(b["x"])[..., 0], b["truth"][..., 0].sigmoid(), weight=b["mask"].double(), reduction="sum"
            )
            / b["mask"].sum()
        ),
        "mask",
    ),
    "positives": Case(_positives, "padded"),
    "not a number": Case(
        lambda m, b: (
            torch.where(b["holed"].isnan(), 0, (m(b["x"])[..., 0] - b["holed"].nan_to_num()) ** 2).sum()
            / (~b["holed"].isnan()).sum()
        ),
        "holed",
    ),
    # Nothing that a weight could make right.
    "sum, penalised": Case(lambda m, b: _each(m, b).sum() + 0.1 * m.head.weight.square().sum(), ""),
    "of weights alone": Case(lambda m, b: m.head.weight.square().sum().exp(), ""),
    "over the batch first": Case(lambda m, b: m(b["x"]).mean(0).square().sum(), ""),
    "logarithm": Case(lambda m, b: m(b["x"]).square().mean().log(), ""),
    "compared, no labels": Case(
        lambda m, b: (_pooled(m, b) @ b["truth"][:, 0].t()).log_softmax(-1).diagonal().mean(), ""
    ),
    "halves": Case(lambda m, b: (m(b["x"])[::2] * m(b["x"])[1::2]).mean(), ""),
    "of a graph": Case(
        lambda m, b: (torch.ones(len(b["x"]), len(b["x"])).double() @ _pooled(m, b)).square().mean(), ""
    ),
    "attention over samples": Case(lambda m, b: _attended(m(b["x"]).transpose(0, 1)).square().mean(), ""),
    "of inputs' mean": Case(lambda m, b: _each(m, b).mean() + (b["truth"].mean(0) @ m.head.bias).square().sum(), ""),
    "unknown": Case(lambda m, b: m(b["x"]).square().flatten(1).diag_embed().mean(), ""),
    "mean used again": Case(lambda m, b: m(b["x"]).mean() + (m(b["x"]) - m(b["x"]).mean()).square().mean(), ""),
    "rmse": Case(lambda m, b: functional.mse_loss(m(b["x"]), b["truth"]).sqrt(), ""),
    "dice": Case(_dice, ""),
    "infonce": Case(_infonce, ""),
    "clip": Case(_clip, ""),
    "queue of pairs": Case(lambda m, b: torch.logsumexp(torch.cdist(*_two(m, b)).flatten(), 0), ""),
    "spread": Case(lambda m, b: _each(m, b).mean() + functional.relu(1 - _pooled(m, b).std(0)).mean(), ""),
    "spread, far away": Case(lambda m, b: _each(m, b).mean() + functional.relu(_pooled(m, b).var(0) - 99).mean(), ""),
    "barlow": Case(_barlow, ""),
    "balance of experts": Case(lambda m, b: _each(m, b).mean() + 0.01 * _balance(m, b), ""),
    "ranking": Case(_ranking, ""),
    "ranking of pairs": Case(_ranking_of_pairs, ""),
    "slopes": Case(lambda m, b: _each(m, b).mean() + _penalty(m, b), ""),
    "labels and rows": Case(lambda m, b: _ce(m, b) + 0.1 * _each(m, b)[b["mask"]].mean(), ""),
    "labels and a mean": Case(lambda m, b: _ce(m, b) + _each(m, b).mean(), ""),
    "mean and sum": Case(lambda m, b: _each(m, b).mean() + _each(m, b).sum(), ""),
    "hardest": Case(lambda m, b: _each(m, b).flatten().topk(2 * len(b["x"]))[0].mean(), ""),
    "softmax over samples": Case(lambda m, b: (_pooled(m, b).softmax(0) * b["truth"][:, 0]).sum() / len(b["x"]), ""),
    "centred": Case(lambda m, b: (_pooled(m, b) - _pooled(m, b).mean(0)).square().mean(), ""),
    "neighbours": Case(lambda m, b: (_pooled(m, b) - _pooled(m, b).roll(1, 0)).square().mean(), ""),
    "mixed": Case(lambda m, b: (_pooled(m, b) - _pooled(m, b)[torch.arange(len(b["x"])).flip(0)]).abs().mean(), ""),
    "balanced by the batch": Case(
        lambda m, b: (_each(m, b) * (1 + b["kind"][:, None]) / (1 + b["kind"]).double().mean()).mean(), ""
    ),
    "normalised inputs": Case(lambda m, b: _each(m, {**b, "x": b["x"] - b["x"].mean(0)}).mean(), ""),
    "largest": Case(lambda m, b: _each(m, b).max(), ""),
    "fraction of the batch": Case(lambda m, b: _each(m, b).mean() * b["mask"].double().mean(), ""),
    "loop": Case(
        lambda m, b: torch.stack([_each(m, {**b, "x": b["x"]})[at].mean() for at in range(len(b["x"]))]).mean(), "mean"
    ),
}
