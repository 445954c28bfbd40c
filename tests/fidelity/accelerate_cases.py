"""Models that return their losses, and scripts that compute them, for trainings with Accelerate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .accelerate import Network, case
from .harness import TIGHT

WEIGHTS = torch.tensor([0.2, 1.0, 3.0, 0.5, 1, 1, 2, 1, 1, 0.3])
LOSS = r"\bloss|gradient of|mean over|sample"


@case("model's own cross-entropy")
def cross_entropy(m, out, y):
    return F.cross_entropy(out, y)


@case("label smoothing and clipping", clip=0.5)
def smoothed(m, out, y):
    return F.cross_entropy(out, y, label_smoothing=0.1)


@case("accumulation", accumulation=2)
def accumulated(m, out, y):
    return F.cross_entropy(out, y)


@case("class weights")
class ClassWeights(Network):
    """In a buffer of the model."""

    def __init__(self):
        super().__init__()
        self.criterion = nn.CrossEntropyLoss(weight=WEIGHTS.clone())

    def forward(self, x, labels):
        out = super().forward(x)
        return {"loss": self.criterion(out, labels), "logits": out}


@case("class weights of the file", LOSS)
def class_weights_of_the_file(m, out, y):
    return F.cross_entropy(out, y, weight=WEIGHTS)


@case("ignoring 0", LOSS)
def ignoring(m, out, y):
    return F.cross_entropy(out, y, ignore_index=0)


@case("masked mean", LOSS)
def masked(m, out, y):
    return (F.cross_entropy(out, y, reduction="none") * (y < 5)).sum() / (y < 5).sum()


@case("root", LOSS)
def root(m, out, y):
    return F.mse_loss(out, F.one_hot(y, 10).float()).sqrt()


@case("sum", LOSS)
def summed(m, out, y):
    return F.cross_entropy(out, y, reduction="sum") / 100


@case("contrastive in the model", LOSS)
def contrastive(m, out, y):
    z = F.normalize(out, dim=-1)
    return F.cross_entropy(z @ z.T, torch.arange(len(out), device=out.device))


@case("two towers in the model", LOSS)
class Towers(Network):
    def __init__(self):
        super().__init__()
        self.text, self.scale = nn.Embedding(10, 10), nn.Parameter(torch.tensor(1.0))

    def forward(self, x, y):
        one, two = F.normalize(super().forward(x), dim=-1), F.normalize(self.text(y), dim=-1)
        scores, own = self.scale.exp() * one @ two.T, torch.arange(len(x), device=x.device)
        return {"loss": (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2}


@case("counter in the model", r"\bcalls\b|state|attribute")
class Counting(Network):
    calls = 0

    def __init__(self):
        super().__init__()
        self.effects = []

    def forward(self, x, y):
        self.calls += 1
        self.effects.append(self.calls)
        return {"loss": F.cross_entropy(super().forward(x), y) / (1 + self.calls / 4)}


@case("dropout", r"dropout|random")
class Dropped(Network):
    def forward(self, x, y):
        return {"loss": F.cross_entropy(F.dropout(super().forward(x), 0.3, self.training), y)}


@case("batch normalisation", r"normali[sz]ation|running|statistic")
class Normalised(Network):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(10)

    def forward(self, x, y):
        return {"loss": F.cross_entropy(self.norm(super().forward(x)), y)}


def opposed(m: nn.Module, x: torch.Tensor, _y: torch.Tensor) -> torch.Tensor:
    one, two = F.normalize(m(x), dim=-1), F.normalize(m(x.flip(1)), dim=-1)
    return F.cross_entropy(one @ two.T, torch.arange(len(x), device=x.device))


case("cross-entropy of the script", loss_of=lambda m, x, y: F.cross_entropy(m(x), y))(Network)
case("class weights of the script", loss_of=lambda m, x, y: F.cross_entropy(m(x), y, weight=WEIGHTS))(Network)
case("contrastive of the script", loss_of=opposed)(Network)


# --- what the graph of the loss alone does not show -----------------------------------------------------------------

JOINED = LOSS + r"|graph|joins|batch|comput"
STATE = r"\bstate\b|attribute|changes|advance|writes|buffer|counter|weights|steps"


def of_outputs(name: str, says: str = JOINED) -> Callable[[Any], Any]:
    return case(f"graph: {name}", says, modes=(TIGHT,))


@of_outputs("centred by the batch")
def centred(m, out, y):
    return F.cross_entropy(out - out.detach().mean(0), y)


@of_outputs("scaled by the largest")
def by_the_largest(m, out, y):
    return F.cross_entropy(out, y) / out.detach().abs().amax()


@of_outputs("scaled by a number")
def by_a_number(m, out, y):
    return F.cross_entropy(out, y) / float(out.detach().abs().max())


@of_outputs("margins counted")
def margins(m, out, y):
    missed = out.detach().amax(-1) > 0.1
    return (F.cross_entropy(out, y, reduction="none") * missed).sum() / max(1, int(missed.sum()))


@of_outputs("weights of rare classes")
def rare(m, out, y):
    counts = torch.bincount(y, minlength=10).float()
    return F.cross_entropy(out, y, weight=len(out) / (10 * counts.clamp(min=1)))


@of_outputs("hard examples")
def hard(m, out, y):
    return F.cross_entropy(out, y, reduction="none").topk(max(1, len(out) // 4)).values.mean()


@of_outputs("labels mixed")
def mixed(m, out, y):
    return 0.7 * F.cross_entropy(out, y) + 0.3 * F.cross_entropy(out, y.flip(0))


@of_outputs("labels rolled by a drawn order", says=JOINED + "|random")
def shuffled(m, out, y):
    return 0.7 * F.cross_entropy(out, y) + 0.3 * F.cross_entropy(out, y[torch.randperm(len(y), device=y.device)])


@of_outputs("divided by the length before the sum")
def before_the_sum(m, out, y):
    return (F.cross_entropy(out, y, reduction="none") / len(out)).sum()


@of_outputs("length of the batch in the loss")
def length(m, out, y):
    return F.cross_entropy(out * (1 + len(out) / 100), y)


@of_outputs("a count of what is not ignored")
def counted(m, out, y):
    return F.cross_entropy(out, y, reduction="sum", ignore_index=3) / (y != 3).sum()


@of_outputs("a mean and a weighted mean")
def two_means(m, out, y):
    return F.cross_entropy(out, y) + F.cross_entropy(out, y, weight=WEIGHTS.to(out.device))


@of_outputs("first half beside the second")
def halves(m, out, y):
    half = len(out) // 2
    return F.cross_entropy(out, y) + F.mse_loss(out[:half], out[half : 2 * half].detach())


@of_outputs("scores sorted over the batch")
def in_order(m, out, y):
    return (
        F.cross_entropy(out, y) + (out[:, 0].sort().values * torch.linspace(-1, 1, len(out), device=out.device)).sum()
    )


@of_outputs("cumulated over the batch")
def cumulated(m, out, y):
    return F.cross_entropy(out, y) + 0.1 * out.detach().cumsum(0).mul(out).mean()


def within(name: str, says: str = JOINED) -> Callable[[Any], Any]:
    """``inputs(model, x, y)`` gives what the network computes with."""

    def register(inputs: Any) -> Any:
        class Inner(Network):
            def __init__(self) -> None:
                super().__init__()
                self.effects: list[int] = []
                self.register_buffer("seen", torch.zeros(()))
                self.register_buffer("queue", torch.zeros(32, 10))
                self.teacher = nn.Linear(4, 10)
                self.teacher.requires_grad_(requires_grad=False)
                self.count, self.kept = 0, {}

            def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
                x, y = inputs(self, x, y)
                return {"loss": F.cross_entropy(super().forward(x), y)}

        case(f"graph: {name}", says, modes=(TIGHT,))(Inner)
        return inputs

    return register


@within("inputs centred")
def inputs_centred(m, x, y):
    return x - x.mean(0), y


@within("inputs shifted in place")
def inputs_shifted(m, x, y):
    return x.sub_(x.mean((0, 1))), y


@within("inputs mixed by a drawn share", says=JOINED + "|random")
def mixup(m, x, y):
    share = float(torch.rand(()))
    return share * x + (1 - share) * x.flip(0), y


@within("positions by the number of the sample")
def numbered(m, x, y):
    return x + 0.01 * torch.arange(len(x), device=x.device)[:, None, None], y


@within("softmax over the batch")
def over_the_batch(m, x, y):
    return x * x.softmax(0), y


@within("statistics kept in a buffer", says=STATE)
def running(m, x, y):
    m.seen.mul_(0.9).add_(x.mean())
    return x - m.seen, y


@within("queue of outputs", says=STATE)
def queued(m, x, y):
    with torch.no_grad():
        m.queue.copy_(torch.cat([m.teacher(x.mean(1)), m.queue])[:32])
    return x + 0.1 * m.queue.mean(), y


@within("teacher that follows", says=STATE)
def followed(m, x, y):
    with torch.no_grad():
        m.teacher.weight.lerp_(m.first.weight[:10, :4], 0.1)
    return x + 0.1 * m.teacher(x).mean(-1, keepdim=True), y


@within("counter that cools down", says=STATE)
def cooling(m, x, y):
    m.count += 1
    return x / (1 + m.count / 10), y


@within("state made in the first forward", says=STATE)
def made_late(m, x, y):
    m.kept["scale"] = 0.9 * m.kept.get("scale", 1.0)
    return x * m.kept["scale"], y


@within("noise", says=r"random|draw|noise")
def noisy(m, x, y):
    return x + 0.01 * torch.randn_like(x), y


@within("a reference sample")
def reference(m, x, y):
    return x - x[:1], y


@within("next to its neighbour")
def neighbour(m, x, y):
    return x + 0.1 * torch.cat([x[1:], x[:1]]), y


# --- losses of the script, over what a model makes of its batch -----------------------------------------------------


def outside(name: str, says: str = JOINED) -> Callable[[Any], Any]:
    """``outputs(model, x, forward)`` is what the model returns, from which the script computes its loss."""

    def register(outputs: Any) -> Any:
        class Inner(Network):
            def __init__(self) -> None:
                super().__init__()
                self.teacher = nn.Linear(4, 10).requires_grad_(requires_grad=False)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return outputs(self, x, super().forward)

        of = lambda m, x, y: F.cross_entropy(m(x), y)  # noqa: E731
        case(f"graph: outside, {name}", says, modes=(TIGHT,), loss_of=of)(Inner)
        return outputs

    return register


@outside("as it is", says="")
def as_it_is(m, x, forward):
    return forward(x)


@outside("inputs centred")
def centred_inputs(m, x, forward):
    return forward(x - x.mean(0))


@outside("outputs centred")
def centred_outputs(m, x, forward):
    out = forward(x)
    return out - out.mean(0)


@outside("outputs centred without a graph")
def centred_values(m, x, forward):
    out = forward(x)
    return out - out.detach().mean(0)


@outside("softmax over the batch at the end")
def softmax_at_the_end(m, x, forward):
    return forward(x).softmax(0)


@outside("outputs flipped")
def flipped(m, x, forward):
    out = forward(x)
    return out + 0.1 * out.flip(0)


@outside("attention over the batch")
def attended(m, x, forward):
    out = forward(x)
    return (out @ out.T / 10).softmax(-1) @ out


@outside("scaled by a number")
def scaled_outputs(m, x, forward):
    out = forward(x)
    return out / float(out.detach().abs().max())


@outside("teacher that follows", says=STATE)
def teacher_outside(m, x, forward):
    with torch.no_grad():
        m.teacher.weight.lerp_(m.first.weight[:10, :4], 0.1)
    return forward(x) + m.teacher(x.mean(1))


# --- arguments that are about the whole batch -----------------------------------------------------------------------


def given(name: str, more: Callable[[torch.Tensor, torch.Tensor], Any], says: str = JOINED) -> Callable[[Any], Any]:
    """``loss(out, y, more)``, where the script computes ``more`` of the batch."""

    def register(loss: Any) -> Any:
        class Inner(Network):
            def forward(self, x: torch.Tensor, y: torch.Tensor, more: Any) -> torch.Tensor:
                return loss(super().forward(x), y, more)

        of = lambda m, x, y: m(x, y, more(x, y))  # noqa: E731
        case(f"graph: given {name}", says, modes=(TIGHT,), loss_of=of)(Inner)
        return loss

    return register


@given("the length", lambda x, y: len(x))
def by_the_length(out, y, n):
    return F.cross_entropy(out, y, reduction="sum") / n


@given("the length as a tensor", lambda x, y: torch.tensor(float(len(x)), device=x.device))
def by_the_length_as_a_tensor(out, y, n):
    return F.cross_entropy(out, y, reduction="sum") / n


@given("a scale", lambda x, y: 0.5)
def by_a_scale(out, y, scale):
    return scale * F.cross_entropy(out, y)


@given("pairs", lambda x, y: y[:, None] == y)
def by_pairs(out, y, pairs):
    return (F.cross_entropy(out, y, reduction="none") * pairs.float().sum(-1)).mean()


@given("a mean", lambda x, y: x.mean())
def by_a_mean(out, y, mean):
    return F.cross_entropy(out - mean, y)


@case("graph: the length as an attribute", JOINED, modes=(TIGHT,), loss_of=lambda m, x, y: with_length(m, x, y))
class OfLength(Network):
    length = 0

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(super().forward(x), y, reduction="sum") / self.length


def with_length(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    m.length = len(x)
    return m(x, y)
