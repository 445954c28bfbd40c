"""Trainings with Accelerate: a loop, and how it is run as written and under ``guard``."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from guard_arguments import in_advanced
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from vram_guard.units import parse_bytes
from vram_guard_accelerate import guard

from . import bridge, lightning
from .harness import (
    CHECKPOINT,
    FIT,
    MICRO,
    REPORT,
    SLICES,
    TIGHT,
    Case,
    Outcome,
    Suite,
    generator_states,
    in_copy,
    listening,
    notes,
    refusal,
)
from .lightning import Training, widen

CASES: list[Case] = []
#: Fits slices of half the batch, and not the whole.
SMALL = "45MiB"


class Body(nn.Module):
    """Blocks whose activations outweigh their weights."""

    def __init__(self, width: int = 32, depth: int = 2) -> None:
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
    return TensorDataset(torch.randn(40, 512, 4, generator=generator), torch.randint(0, 10, (40,), generator=generator))


def _guarded(prepare: Callable[[], Any], outcome: Outcome, mode: str | None, budget: int | str) -> Any:
    """What ``prepare`` returns; mode None: without the guard."""
    if mode is None:
        return prepare()
    with guard(**in_advanced({"budget": budget, "margin": 0.0, "allow": ["slices"]})) as watch:
        prepared = prepare()
    _hear(outcome, watch.text)
    outcome.applied = bool(watch.fits) and "nothing changes" not in watch.text
    return prepared


def _hear(outcome: Outcome, text: str) -> None:
    """A report's sentences, and the bytes of the step as written."""
    outcome.words += notes(text)
    found = re.search(r"peak reserved +(\S+ \w+)", text)
    outcome.peak = parse_bytes(found[1]) if found else outcome.peak


def loop(
    model: nn.Module,
    outcome: Outcome,
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
    model, optimizer, loader, scheduler = _guarded(prepare, outcome, mode, SMALL if mode == TIGHT else "64GiB")
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
        def make() -> Callable[..., dict[str, Any]]:
            class Returning(Network):
                def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
                    out = super().forward(x)
                    return {"loss": thing(self, out, labels), "logits": out}

            kind = thing if isinstance(thing, type) else Returning
            return lambda outcome, mode, **_size: loop(kind(), outcome, mode, **how)

        usual = (FIT, TIGHT) if len(CASES) < 3 or "counter" in name else (TIGHT,)
        # Relative to the largest entry: a mean over a sequence of 256 rounds more than a small perceptron.
        CASES.append(Case(name, make, modes or usual, says=says, tolerance=1e-4))
        return thing

    return register


class Bridged(nn.Module):
    """Lightning's module as a model that returns its loss."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: Any) -> dict[str, torch.Tensor]:
        return {"loss": self.module.loss(batch)}


#: Cases whose bodies do not run in slices -> the words for why. All others do, or are told what they are about.
WHOLE = {
    "gradient_penalty|a checkpointed layer": "no module of it returns a row for each sample",
    "spectral norm|moved in place|frozen parameter moved": "it writes to a tensor that it has not made",
    "numpy random|Python random": "it draws from a generator of NumPy or Python",
    "block list of": "changes a list or another container of a module|its forward sets PASSED",
    "codebook|^hidden .* in (the network|blocks)$": r"writes to .+, which is not part of the model|writing to /\S+",
    "the same in a layer": "nothing is known of the backward pass of fidelity",
    "a hook of a module|prepared for quantisation": "a hook of '(first|last)' .* would see slices",
    "gradients that .* pack|packed by hooks": "packs what is saved for the backward pass",
    "a mode of operators": "Rounds is given every operator",
    "a mode of functions": "its forward runs inside Doubles",
    "batch normalisation by a function|normalisation over the batch": "it joins samples: aten.native_batch_norm",
    "network for few samples": "it computes something else for other numbers of samples",
    "a dict that compiled code reads": "torch.compile compiles it as one with what calls it",
    "gradients by frequencies": "the step reads words, which _outcome changes",  # a name that two things have
}


def of_lightning(case: Case) -> Case:
    """A case of Lightning's as one of Accelerate's, where nothing is cut but forwards."""
    modes = dict.fromkeys(
        {REPORT: FIT, MICRO: SLICES, TIGHT: SLICES, CHECKPOINT: SLICES}.get(mode, mode) for mode in case.modes
    )
    if CHECKPOINT in case.modes and not case.says:  # too small: its blocks in slices need no less
        modes = {FIT: None}
    if case.name.startswith("hidden weight"):  # a dry run does not follow how such weights come to a device
        modes = {FIT: None}
    about = case.says if case.says not in ("", r"\w") else "(?!)"
    whole = [why for cases, why in WHOLE.items() if re.search(cases, case.name)]
    says = "|".join([about, *(f"slices of the batch are not possible here: .*({why})" for why in whole)])
    if CHECKPOINT in case.modes:
        says += r"|in \d+ slices of the batch, \d+ of them computed again, .* over budget"
    train = lambda: functools.partial(_trained, bridge.parts(case))  # noqa: E731
    return replace(case, make=train, modes=tuple(modes), says=says, exact=False, tolerance=case.tolerance or 1e-4)


def _trained(run: Training, outcome: Outcome, mode: str | None, *, heavy: bool, peak: int) -> dict[str, Any]:
    widen(run.module, heavy=heavy)
    accelerator = Accelerator(cpu=True)
    optimizer = run.module.configure_optimizers()
    prepare = lambda: accelerator.prepare(Bridged(run.module), optimizer, run.data)  # noqa: E731
    model, optimizer, data = _guarded(prepare, outcome, mode, int(0.6 * peak) or "64GiB")
    losses = []
    for at, batch in enumerate(data):
        loss = model(batch)["loss"]
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        bridge.told(run, batch, at)
    return {
        "weights": {name: value.clone() for name, value in run.module.state_dict().items()},
        "optimizer": optimizer.state_dict(),
        "losses": losses,
        "generators": generator_states(),
        "effects": (run.module.effects, run.effects()),
    }


def train(about: Case, mode: str | None, *, heavy: bool = False, peak: int = 0) -> Outcome:
    """One training, in a copy of this process."""
    return in_copy(lambda: _outcome(about, mode, heavy=heavy, peak=peak))


def _forget_other_tests() -> None:
    """As in a script's process: the functions of other tests' modules are none that this training could call."""
    for name, module in list(sys.modules.items()):
        file = Path(getattr(module, "__file__", None) or "")
        if file.name.startswith("test_") and file.parent != Path(__file__).parent:
            del sys.modules[name]


def _outcome(about: Case, mode: str | None, **size: Any) -> Outcome:
    _forget_other_tests()
    outcome = Outcome()
    set_seed(0)
    run = about.make()
    with listening(outcome):
        try:
            outcome.record = run(outcome, mode, **size)
        except Exception as error:
            if mode is None:
                raise
            planned, outcome.peak = outcome.peak, 0
            _hear(outcome, str(error))
            outcome.words += [] if outcome.peak else refusal(error)
            outcome.peak, outcome.applied = outcome.peak or planned, False
    return outcome


class OfOneBudget(Suite):
    """Whose trainings are all of one size."""

    def guarded(self, case: Case, mode: str) -> Outcome:
        return self.train(case, mode)


def _control() -> Callable[..., dict[str, Any]]:
    loss_of = lambda m, x, y: F.cross_entropy(m(x), y)  # noqa: E731
    return lambda outcome, mode, **_size: loop(Network(), outcome, mode, loss_of)


SUITE = OfOneBudget("Accelerate", train, {}, Case("control", _control))
BRIDGED = Suite("Accelerate", train, {}, of_lightning(lightning.SUITE.control))
