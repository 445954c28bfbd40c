"""The operators: what trainings are made of, in the shapes that decide which kernel runs, each a training step.

``table.json`` has them: what is computed of operands ``x``, ``y``, ``z`` (parameters of these shapes) and of constants
(made on the CPU, buffers), or a module that is called with them; in which dtypes; and the optimizer, where that is
looked at. The first word of a name is the family, which is measured in one process.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own idiom
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.harness.workloads import optimizer_of
from vram_guard import TrainingStep

TABLE = Path(__file__).with_name("table.json")
OPERANDS = "xyz"


def numbers(below: int, *shape: int) -> Tensor:
    """Whole numbers, the same ones each time."""
    return torch.arange(torch.Size(shape).numel()).remainder(below).reshape(shape)


def flags(*shape: int) -> Tensor:
    """A lower triangle of ones."""
    return torch.ones(shape, dtype=torch.bool).tril()


def ctc(x: Tensor, targets: Tensor, blank: int) -> Tensor:
    """The loss of sequences of 100 steps and 20 labels."""
    lengths = torch.full((16,), 100), torch.full((16,), 20)
    return F.ctc_loss(x.log_softmax(2), targets, *lengths, blank=blank)


def positive(x: Tensor) -> Tensor:
    """A positive definite matrix."""
    return x @ x.mT + 1000 * torch.eye(x.shape[-1], device=x.device)


def with_backend(backend: str, *operands: Tensor) -> Tensor:
    """Causal attention by one of torch's backends."""
    with sdpa_kernel(getattr(SDPBackend, backend)):
        return F.scaled_dot_product_attention(*operands, is_causal=True)


class WithItself(nn.Module):
    """Self-attention."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor) -> Any:
        return self.attention(x, x, x)


class Packed(nn.Module):
    """A recurrent layer over sequences of 100 and of 50 words."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Any:
        lengths = torch.tensor([100] * 16 + [50] * 16)
        return self.cell(nn.utils.rnn.pack_padded_sequence(x, lengths))[0].data


@dataclass(frozen=True)
class Operator:
    """One operator in one dtype: forward, backward and the update of its operands."""

    name: str
    kind: str
    """Its dtype, or "autocast"."""
    facts: Mapping[str, Any]
    """The entry of the table."""

    @property
    def family(self) -> str:
        """The first word of the name."""
        return self.name.partition(" ")[0]

    def step(self) -> TrainingStep:
        """The step itself, for the GPU and for the prediction alike. Its batch is one number that nobody reads."""
        settings = dict(self.facts.get("optimizer", {"name": "SGD", "lr": 1e-6}))
        return TrainingStep(
            model=lambda: _Model(self),
            batch=lambda size: {"x": torch.zeros(size)},
            loss=_summed,
            optimizer=optimizer_of(settings.pop("name"), **settings),
            precision="bf16-mixed" if self.kind == "autocast" else "32-true",
        )


def _summed(model: nn.Module, _batch: Mapping[str, Tensor]) -> Tensor:
    found = model()
    first: Tensor = found if isinstance(found, Tensor) else found[0]
    return (first.abs() if first.is_complex() else first).sum()


class _Model(nn.Module):
    """The operator over its operands, which are parameters. The table is ours, so its expressions are evaluated."""

    def __init__(self, operator: Operator) -> None:
        super().__init__()
        facts = operator.facts
        dtype = torch.float32 if operator.kind == "autocast" else getattr(torch, operator.kind)
        self.called = "module" in facts
        if self.called:
            self.function = eval(facts["module"])  # noqa: S307
        else:
            names = ", ".join([*OPERANDS[: len(facts["shapes"])], *facts.get("constants", ())])
            self.function = eval(f"lambda {names}: {facts['call']}")  # noqa: S307
        self.operands = nn.ParameterList(nn.Parameter(torch.randn(*shape).to(dtype)) for shape in facts["shapes"])
        for name, made in facts.get("constants", {}).items():
            self.register_buffer(name, eval(made, globals(), {"dtype": dtype}))  # noqa: S307
        if self.called:
            self.to(dtype)

    def forward(self) -> Any:
        return self.function(*self.operands, **dict(self.named_buffers(recurse=False)))


def _operators() -> Iterator[Operator]:
    for facts in json.loads(TABLE.read_text(encoding="utf-8")):
        for kind in facts.get("kinds", ()):
            yield Operator(f"{facts['name']} {kind}", kind, facts)
        if "kinds" not in facts:
            yield Operator(facts["name"], facts.get("dtype", "float32"), facts)


OPERATORS = tuple(_operators())
