"""Trainings with Accelerate: a loop, and how it is run as written and under ``guard``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from guard_arguments import in_advanced
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from vram_guard_accelerate import guard

from .harness import FIT, TIGHT, Case, Outcome, generator_states, listening, refusal

CASES: list[Case] = []
#: Fits slices of half the batch, and not the whole.
SMALL = "45MiB"
GUARDS: dict[str, dict[str, Any]] = {
    FIT: {"budget": "64GiB"},
    TIGHT: {"budget": SMALL},
}


class Body(nn.Module):
    """Blocks whose activations outweigh their weights."""

    def __init__(self, width: int = 32, depth: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(4, width)
        wide = (nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
                for _ in range(depth))  # fmt: skip
        self.blocks = nn.ModuleList(wide)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return x


class Network(nn.Module):
    """A small network with a body, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.last = Body(), nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.body(x).mean(1))


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randn(40, 256, 4, generator=generator), torch.randint(0, 10, (40,), generator=generator))


def loop(
    model: nn.Module,
    mode: str | None,
    loss_of: Callable[..., torch.Tensor] | None = None,
    *,
    clip: float = 0.0,
    accumulation: int = 1,
) -> dict[str, Any]:
    """A training loop; the model returns its loss unless ``loss_of`` computes it."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(data(), batch_size=16, shuffle=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=6)
    prepare = lambda: accelerator.prepare(model, optimizer, loader, scheduler)  # noqa: E731
    if mode is None:
        model, optimizer, loader, scheduler = prepare()
    else:
        with guard(**in_advanced({**GUARDS[mode], "margin": 0.0, "allow": ["slices"]})) as watch:
            model, optimizer, loader, scheduler = prepare()
        print("\n".join(f"  - {line.strip(' •-')}" for line in watch.text.splitlines()))
    losses = []
    for _ in range(2):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = loss_of(model, x, y) if loss_of else model(x, y)["loss"]
                accelerator.backward(loss)
                if clip and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                losses.append(loss.item())
    plain = accelerator.unwrap_model(model)
    return {
        "weights": {name: value.clone() for name, value in plain.state_dict().items()},
        "optimizer": optimizer.state_dict(),
        "losses": losses,
        "rates": scheduler.get_last_lr(),
        "generators": generator_states(),
        "effects": getattr(plain, "effects", None),
    }


def case(name: str, says: str = "", *, modes: tuple[str, ...] = (), **how: Any) -> Callable[[Any], Any]:
    """Register ``loss(model, out, y)`` of a model that returns its loss, or a model's class."""

    def register(thing: Any) -> Any:
        def make() -> Callable[[str | None], dict[str, Any]]:
            class Returning(Network):
                def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
                    out = super().forward(x)
                    return {"loss": thing(self, out, labels), "logits": out}

            kind = thing if isinstance(thing, type) else Returning
            return lambda mode: loop(kind(), mode, **how)

        usual = (FIT, TIGHT) if len(CASES) < 3 or "counter" in name else (TIGHT,)
        # Relative to the largest entry: a mean over a sequence of 256 rounds more than a small perceptron.
        CASES.append(Case(name, make, modes or usual, says=says, tolerance=1e-4))
        return thing

    return register


def train(about: Case, mode: str | None) -> Outcome:
    """One training in this process."""
    outcome = Outcome()
    set_seed(0)
    run = about.make()
    with listening(outcome):
        try:
            outcome.record = run(mode)
        except Exception as error:
            if mode is None:
                raise
            outcome.words += refusal(error)
    outcome.applied = outcome.record is not None and any("slices of the batch, " in line for line in outcome.words)
    return outcome
