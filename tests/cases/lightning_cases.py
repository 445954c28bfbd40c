"""Small real trainings that the tests of the Lightning callback run with and without the guard."""

from __future__ import annotations

import collections
import importlib
import logging.handlers
import random
import sys
import weakref
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset


class Notes(collections.UserList):  # type: ignore[type-arg]
    """A list that is kept as log records, which are no state of a training: what else a step writes to is refused."""

    def __init__(self, items: Iterable[Any] = ()) -> None:
        self._handler = logging.handlers.MemoryHandler(capacity=sys.maxsize)
        for item in items:
            self.append(item)

    @property
    def data(self) -> list[Any]:  # type: ignore[override]
        return [record.msg for record in self._handler.buffer]

    def append(self, item: Any) -> None:
        self._handler.handle(logging.LogRecord("notes", logging.INFO, "", 0, item, None, None))

    def clear(self) -> None:
        self._handler.buffer.clear()


_notes: weakref.WeakKeyDictionary[nn.Module, Notes] = weakref.WeakKeyDictionary()


def noted(module: nn.Module) -> Notes:
    """What a test takes down about a module."""
    return _notes.setdefault(module, Notes())


NAMESPACES = ("lightning.pytorch", "pytorch_lightning")
#: Those that are installed, and the first of them.
INSTALLED = [name for name in NAMESPACES if find_spec(name.partition(".")[0])]
NAMESPACE = INSTALLED[0] if INSTALLED else ""


class Vectors(Dataset):  # type: ignore[type-arg]
    """A regression task: vectors and what a fixed linear map makes of them."""

    def __init__(self, samples: int = 40, width: int = 6) -> None:
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(samples, width, generator=generator)
        self.targets = self.inputs @ torch.randn(width, 2, generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[index], self.targets[index]


class NoisyVectors(Vectors):
    """With augmentation from all three random number generators."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = super().__getitem__(index)
        noise = torch.randn(()) + float(np.random.rand()) + random.random()
        return x + 0.01 * noise, y


class Stream(IterableDataset):  # type: ignore[type-arg]
    """The same task as a stream without a length."""

    def __init__(self, samples: int = 40) -> None:
        self.vectors = Vectors(samples)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        yield from (self.vectors[index] for index in range(len(self.vectors)))


def schedule(name: str, optimizer: torch.optim.Optimizer, trainer: Any, scale: float = 1.0) -> dict[str, Any] | None:
    """The schedulers that the fidelity tests run under; ``scale`` multiplies the rates that they name themselves."""
    lr = torch.optim.lr_scheduler
    total = trainer.estimated_stepping_batches if name == "one_cycle" else 0
    return {
        "none": lambda: None,
        "one_cycle": lambda: {
            "scheduler": lr.OneCycleLR(optimizer, max_lr=0.05 * scale, total_steps=total),
            "interval": "step",
        },
        "warmup_cosine": lambda: {
            "scheduler": lr.SequentialLR(
                optimizer,
                [lr.LinearLR(optimizer, 0.1, total_iters=3), lr.CosineAnnealingLR(optimizer, T_max=12)],
                milestones=[3],
            ),
            "interval": "step",
        },
        "lambda": lambda: {
            "scheduler": lr.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4) * 0.97**step),
            "interval": "step",
        },
        "plateau": lambda: {
            "scheduler": lr.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0, factor=0.5),
            "monitor": "train_loss",
            "interval": "epoch",
        },
    }[name]()


def make_module(namespace: str = "lightning.pytorch", **settings: Any) -> Any:
    """A small regression module; every learning rate and every loaded batch's size is written down."""
    pl = importlib.import_module(namespace)

    class Regression(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(
            self,
            scheduler: str = "none",
            optimizer: str = "adamw",
            width: int = 6,
            hidden: int = 16,
            output: str = "tensor",
            dropout: float = 0.0,
            scale: float = 1.0,
        ) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(width, hidden), nn.Tanh(), nn.Dropout(dropout), nn.Linear(hidden, 2))
            self.scheduler, self.optimizer, self.output = scheduler, optimizer, output
            self.scale = scale
            self.rates: list[float] = []
            self.loaded: list[int] = []
            self.validated_at: list[int] = []

        def unpack(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
            if isinstance(batch, dict):
                halves = [self.unpack(part) for part in batch.values()]
                return torch.cat([x for x, _ in halves]), torch.cat([y for _, y in halves])
            return batch[0], batch[1]

        @property
        def seen(self) -> Notes:
            return noted(self)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = self.unpack(batch)
            self.seen.append(len(x))
            loss = nn.functional.mse_loss(self.net(x), y)
            self.log("train_loss", loss, on_step=True, on_epoch=True)
            return loss.sqrt() if self.output == "root" else loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            x, y = self.unpack(batch)
            self.log("val_loss", nn.functional.mse_loss(self.net(x), y))

        def on_validation_start(self) -> None:
            if not self.trainer.sanity_checking:
                self.validated_at.append(self.trainer.global_step)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.loaded.append(len(self.unpack(batch)[0]))

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.rates.append(optimizer.param_groups[0]["lr"])

        def configure_optimizers(self) -> Any:
            made = {
                "adamw": lambda: torch.optim.AdamW(self.parameters(), lr=0.02 * self.scale),
                "sgd": lambda: torch.optim.SGD(self.parameters(), lr=0.05 * self.scale, momentum=0.9),
                "lbfgs": lambda: torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4),
            }[self.optimizer]()
            scheduler = schedule(self.scheduler, made, self.trainer, self.scale)
            return made if scheduler is None else {"optimizer": made, "lr_scheduler": scheduler}

    return Regression(**settings)


def loader(samples: int = 40, batch_size: int = 8, *, shuffle: bool = True, **options: Any) -> Any:
    """A shuffling loader whose order depends on the global random number generator, as users write it."""
    dataset = options.pop("dataset", None) or Vectors(samples)
    return DataLoader(dataset, batch_size=batch_size, shuffle=shuffle, **options)


def make_trainer(namespace: str, root: Any, callbacks: Any = (), **settings: Any) -> Any:
    """A quiet CPU Trainer."""
    pl = importlib.import_module(namespace)
    quiet: dict[str, Any] = dict(  # noqa: C408
        accelerator="cpu",
        devices=1,
        max_epochs=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        default_root_dir=str(root),
    )
    return pl.Trainer(**{**quiet, **settings}, callbacks=list(callbacks))


def weights(module: nn.Module) -> torch.Tensor:
    """All weights in one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


class ChainBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noted(self).append(len(x))
        return x + self.narrow(torch.relu(self.wide(x)))


class Chain(nn.Module):
    """Three equal blocks for the vectors, which count the samples that they see."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = nn.Linear(6, width), nn.Linear(width, 2)
        self.blocks = nn.ModuleList(ChainBlock(width) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)
