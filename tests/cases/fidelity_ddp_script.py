"""Two processes under DDP (gloo, CPU), of which Lightning starts the second.

``python fidelity_ddp_script.py FOLDER`` trains every case in every mode, and keeps what they came to.
"""

from __future__ import annotations

import os
import pickle
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from fidelity import lightning
from fidelity.harness import MICRO, REPORT, SLICES, Case, Outcome
from fidelity.lightning import Base, Pairs, Rows, Training, loader
from fidelity.lightning_losses import CAUSE, WEIGHTS
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.nn import functional as F

from vram_guard.watch.process_groups import end_process_groups

SAMPLES = 45  # three batches of 8 and one of 5 or 6 for each of the two


class Weighed(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("classes", WEIGHTS.clone())

    def loss(self, batch):
        return F.cross_entropy(self.net(batch["x"]), batch["label"], weight=self.classes)


class Rooted(Base):
    def loss(self, batch):
        return super().loss(batch).sqrt()


class Counted(Base):
    calls = 0

    def loss(self, batch):
        self.calls += 1
        self.effects.append(self.calls)
        return super().loss(batch) / self.calls


class Synchronised(Base):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True, batch_size=len(batch[0]))
        return loss


class Reducing(Base):
    def loss(self, batch):
        loss = super().loss(batch)
        seen = torch.tensor([float(len(batch[0])), float(loss.detach())])
        torch.distributed.all_reduce(seen)
        self.effects.append(seen.tolist())
        return loss


class Normalised(Base):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def loss(self, batch):
        return super().loss((self.norm(batch[0]), batch[1]))


class Ranked(Base):
    def loss(self, batch):
        loss = super().loss(batch)
        return loss.sqrt() if torch.distributed.get_rank() else loss


class Hooked(Base):
    def on_after_backward(self):
        self.effects.append(float(self.net.first.weight.grad.norm()))


def of(name: str, kind: type[Base], *fields: str, says: str = "", **trainer: object) -> Case:
    def make() -> Training:
        data = Rows(*fields, samples=SAMPLES) if fields else Pairs(SAMPLES)
        return Training(kind(), loader(data, shuffle=True), dict(trainer))

    return Case(f"two processes, {name}", make, (REPORT, MICRO), says=says, exact=not says)


CASES = [
    of("squared errors", Base),
    of("class weights", Weighed, "x", "label"),
    of("a root", Rooted, says=CAUSE),
    of("a counter", Counted, says=r"\bcalls\b"),
    of("values logged over ranks", Synchronised),
    of("a collective in the step", Reducing, says=r"collective|all_reduce|training_step"),
    of("batch normalisation", Normalised, says=r"normali[sz]ation|running|statistic"),
    of("accumulation and clipping", Base, accumulate_grad_batches=2, gradient_clip_val=0.1),
    of("another loss on rank 1", Ranked, says=r"not proven for the loss of this rank"),
    of("a hook after backward", Hooked, says=r"on_after_backward"),
]


#: A loss that cannot be cut into micro-batches, within a budget that the model meets in slices.
IN_SLICES = of("a root in slices", Rooted)


def trained(case: Case, mode: str | None, **heavy: Any) -> Outcome:
    lightning.MORE["strategy"] = DDPStrategy(process_group_backend="gloo", timeout=timedelta(seconds=90))
    return lightning.train(case, mode, **heavy)


def main(folder: Path) -> None:
    lightning.MORE.update(devices=2)
    found: dict[tuple[str, str | None], Outcome] = {}
    for case in CASES:
        for mode in (None, *(mode for _case, mode in case.pairs)):
            found[case.name, mode] = trained(case, mode)
    found[IN_SLICES.name, None] = trained(IN_SLICES, None, heavy=True)
    peak = trained(IN_SLICES, REPORT, heavy=True).peak
    found[IN_SLICES.name, SLICES] = trained(IN_SLICES, SLICES, heavy=True, peak=peak)
    rank = os.environ.get("LOCAL_RANK", "0")
    (folder / f"rank{rank}.pickle").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]))
    end_process_groups()  # no SIGABRT after the work (PyTorch's issue 190489)
