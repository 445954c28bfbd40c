"""Models that return their losses, and scripts that compute them, for trainings with Accelerate."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from .accelerate import Body, Network, case
from .harness import TIGHT
from .lightning import FOLDER

WEIGHTS = torch.tensor([0.2, 1.0, 3.0, 0.5, 1, 1, 2, 1, 1, 0.3])
LOSS = r"\bloss|gradient of|mean over|sample"


case("model's own cross-entropy")(lambda m, out, y: F.cross_entropy(out, y))
case("label smoothing and clipping", clip=0.5)(lambda m, out, y: F.cross_entropy(out, y, label_smoothing=0.1))
case("accumulation", accumulation=2)(lambda m, out, y: F.cross_entropy(out, y))


@case("two towers in the model", LOSS)
class Towers(Network):
    def __init__(self):
        super().__init__()
        self.text, self.scale = nn.Embedding(10, 10), nn.Parameter(torch.tensor(1.0))

    def forward(self, x, y):
        one, two = F.normalize(super().forward(x), dim=-1), F.normalize(self.text(y), dim=-1)
        scores, own = self.scale.exp() * one @ two.T, torch.arange(len(x), device=x.device)
        return {"loss": (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2}


def opposed(m: nn.Module, x: torch.Tensor, _y: torch.Tensor) -> torch.Tensor:
    one, two = F.normalize(m(x), dim=-1), F.normalize(m(x.flip(1)), dim=-1)
    return F.cross_entropy(one @ two.T, torch.arange(len(x), device=x.device))


case("cross-entropy of the script", loss_of=lambda m, x, y: F.cross_entropy(m(x), y))(Network)
case("class weights of the script", loss_of=lambda m, x, y: F.cross_entropy(m(x), y, weight=WEIGHTS))(Network)
case("contrastive of the script", loss_of=opposed)(Network)


@case("a file that is appended to")
class Appending(Network):
    def __init__(self):
        super().__init__()
        self.lines = Path(tempfile.mkdtemp(dir=FOLDER.name)) / "lines.txt"
        self.lines.touch()

    def forward(self, x, y):
        with self.lines.open("a") as lines:
            lines.write(f"{len(x)}\n")
        return {"loss": F.cross_entropy(super().forward(x), y)}

    @property
    def effects(self):
        return self.lines.read_text()


class Scales(TorchDispatchMode):
    """Divides results of an operator by the largest of them, for all operators to come."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out / out.abs().max() if func is torch.ops.aten.gelu.default else out


@case("a mode that is on", "Scales is given every operator", modes=(TIGHT,))
class UnderMode(Network):
    def __init__(self):
        super().__init__()
        Scales().__enter__()

    def forward(self, x, y):
        return {"loss": F.cross_entropy(super().forward(x), y)}


# --- what the graph of the loss alone does not show -----------------------------------------------------------------

JOINED = LOSS + r"|graph|joins|batch|comput"
STATE = r"\bstate\b|attribute|changes|advance|writes|buffer|counter|weights|steps"


def of_outputs(name: str) -> Callable[[Any], Any]:
    return case(f"graph: {name}", JOINED, modes=(TIGHT,))


of_outputs("centred by the batch")(lambda m, out, y: F.cross_entropy(out - out.detach().mean(0), y))


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


within("inputs shifted in place")(lambda m, x, y: (x.sub_(x.mean((0, 1))), y))


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


@outside("attention over the batch")
def attended(m, x, forward):
    out = forward(x)
    return (out @ out.T / 10).softmax(-1) @ out


@outside("teacher that follows", says=STATE)
def teacher_outside(m, x, forward):
    with torch.no_grad():
        m.teacher.weight.lerp_(m.body.first.weight[:10, :4], 0.1)
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


given("pairs", lambda x, y: y[:, None] == y)(
    lambda out, y, pairs: (F.cross_entropy(out, y, reduction="none") * pairs.float().sum(-1)).mean()
)
given("a mean", lambda x, y: x.mean())(lambda out, y, mean: F.cross_entropy(out - mean, y))


@case("graph: the length as an attribute", JOINED, modes=(TIGHT,), loss_of=lambda m, x, y: with_length(m, x, y))
class OfLength(Network):
    length = 0

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(super().forward(x), y, reduction="sum") / self.length


def with_length(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    m.length = len(x)
    return m(x, y)


# --- what the body itself does --------------------------------------------------------------------------------------


def in_body(name: str, says: str = JOINED) -> Callable[[Any], Any]:
    """``outputs(body, x, forward)`` is what the body returns: it joins samples, or is another one in each call."""

    def register(outputs: Any) -> Any:
        class Inner(Body):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("seen", torch.zeros(()))
                self.count, self.scale, self.kept = 0, 1.0, []

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return outputs(self, x, super().forward)

        class Outer(Network):
            def __init__(self) -> None:
                super().__init__()
                self.body = Inner()

        def loss_of(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = F.cross_entropy(m(x), y)
            cools([m.body])
            return loss

        case(f"body: {name}", says, modes=(TIGHT,), loss_of=loss_of)(Outer)
        return outputs

    return register


in_body("inputs centred")(lambda m, x, forward: forward(x - x.mean(0)))


@in_body("half of its rows zeroed")
def body_half_zeroed(m, x, forward):
    x = x * 1.0
    x[: len(x) // 2] = 0
    return forward(x)


@in_body("outputs centred without a graph")
def body_centred_values(m, x, forward):
    out = forward(x)
    return out - out.detach().mean(0)


@in_body("attention over the batch")
def body_attended(m, x, forward):
    out = forward(x)
    rows = out.mean(1)
    return out + ((rows @ rows.T).softmax(-1) @ rows)[:, None]


in_body("positions by the number of the sample")(
    lambda m, x, forward: forward(x + 0.01 * torch.arange(len(x), device=x.device)[:, None, None])
)
in_body("next to its neighbour")(lambda m, x, forward: forward(x + 0.1 * torch.cat([x[1:], x[:1]])))


@in_body("scaled by a number")
def body_by_a_number(m, x, forward):
    out = forward(x)
    return out / float(out.detach().abs().max())


@in_body("statistics kept in a buffer", says=STATE)
def body_running(m, x, forward):
    m.seen.mul_(0.9).add_(x.mean())
    return forward(x - m.seen)


@in_body("counter that cools down", says=STATE + r"|sets")
def body_cooling(m, x, forward):
    m.count += 1
    return forward(x / (1 + m.count / 10))


@in_body("a list that grows", says=STATE + r"|list")
def body_kept(m, x, forward):
    m.kept.append(float(len(m.kept)))
    return forward(x / len(m.kept))


in_body("noise", says=r"random|draw|noise")(lambda m, x, forward: forward(x + 0.01 * torch.randn_like(x)))


@in_body("a scale that its script changes", says=STATE + r"|reads")
def body_scaled(m, x, forward):
    out = forward(x * m.scale)
    return out - out.mean(0) if m.scale < 0.5 else out


def cools(bodies: list[Any]) -> None:
    """What a loop does after each loss."""
    for body in bodies:
        body.scale *= 0.7
