"""Trainings with Accelerate, each in a copy of one process that has imported everything.

``python fidelity_accelerate_script.py FOLDER`` trains every case as written and under ``guard`` in every mode, and
keeps what they came to.
"""

from __future__ import annotations

import gc
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # optimizers import it: once, for all copies
from accelerate import Accelerator
from accelerate.utils import set_seed
from fidelity.harness import FIT, TIGHT, Case, Outcome, generator_states, listening
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from vram_guard_accelerate import guard

CASES: list[Case] = []
WEIGHTS = torch.tensor([0.2, 1.0, 3.0, 0.5, 1, 1, 2, 1, 1, 0.3])
#: Fits slices of half the batch, and not the whole (``TIGHT``).
SMALL = "45MiB"


class Network(nn.Module):
    """A small network whose activations outweigh its weights."""

    def __init__(self, width: int = 32, depth: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(4, width)
        wide = (nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
                for _ in range(depth))  # fmt: skip
        self.blocks = nn.ModuleList(wide)
        self.last = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x.mean(1))


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randn(40, 256, 4, generator=generator), torch.randint(0, 10, (40,), generator=generator))


def loop(
    model: nn.Module,
    budget: str | None,
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
    if budget is None:
        model, optimizer, loader, scheduler = prepare()
    else:
        with guard(budget=budget, margin=0.0, allow=["accumulate"]) as watch:
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


def case(name: str, says: str = "", **how: Any) -> Callable[[Any], Any]:
    """Register ``loss(model, out, y)`` of a model that returns its loss, or a model's class."""

    def register(thing: Any) -> Any:
        def make() -> Callable[[str | None], dict[str, Any]]:
            class Returning(Network):
                def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
                    out = super().forward(x)
                    return {"loss": thing(self, out, labels), "logits": out}

            kind = thing if isinstance(thing, type) else Returning
            return lambda budget: loop(kind(), budget, **how)

        modes = (FIT, TIGHT) if len(CASES) < 3 or "counter" in name else (TIGHT,)
        # Relative to the largest entry: a mean over a sequence of 256 rounds more than a small perceptron.
        CASES.append(Case(name, make, modes, says=says, tolerance=1e-4))
        return thing

    return register


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


@case("class weights", LOSS)
def class_weights(m, out, y):
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


def train(about: Case, mode: str | None) -> Outcome:
    """One training in this process."""
    outcome = Outcome()
    set_seed(0)
    run = about.make()
    budget = {None: None, FIT: "64GiB", TIGHT: SMALL}[mode]
    with listening(outcome):
        try:
            outcome.record = run(budget)
        except Exception as error:
            if mode is None:
                raise
            outcome.words.append(f"{type(error).__name__}: {error}")
    outcome.applied = outcome.record is not None and any("micro-batches" in line for line in outcome.words)
    return outcome


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # no copy looks through it again
    for number, one in enumerate(CASES):
        for mode in (None, *one.modes):
            process = os.fork()
            if process == 0:
                try:
                    kept = folder / f"{number}-{mode}"
                    words = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                    os.dup2(words, 2)
                    kept.write_bytes(pickle.dumps(train(one, mode)))
                except BaseException:  # noqa: BLE001 - the copy ends here, whatever it was
                    traceback.print_exc()
                os._exit(0)
            os.waitpid(process, 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
