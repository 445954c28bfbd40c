"""Choose the largest of four networks that fits a memory budget, and train it to forecast sea-surface temperatures.

Before anything is built, ``variants`` runs one training step of each network symbolically, at the batch size that is
meant, and says what it would take on the GPU. The largest that fits is trained with Lightning under ``VramGuard``. No
GPU is needed: without one the training really runs on the CPU.
"""

from __future__ import annotations

import argparse
import logging
import math
import time
import warnings

import lightning
import torch
from data import SPREAD, Months, training_and_held_out
from lightning.pytorch.callbacks import Callback
from models import CONSTRUCTORS
from steps import over_the_sea, steps
from torch import Tensor, nn
from torch.utils.data import DataLoader

from vram_guard import variants
from vram_guard.report.comparison import show
from vram_guard_lightning import VramGuard


def main() -> None:
    """Predict, choose, train, and show what came out."""
    options = _options()
    _quiet_lightning()
    lightning.seed_everything(options.seed, verbose=False)

    networks = steps(options.months, options.columns)
    answer = variants(
        networks, options.batch_size, options.budget, gpu=options.gpu, allow=options.allow, progress=_progress
    )
    show(answer)
    if answer.chosen is None:
        raise SystemExit(1)

    training, held_out = training_and_held_out(options.months, options.columns, options.stride)
    model = Forecast(CONSTRUCTORS[answer.chosen.name](), options.learning_rate)
    quality = Quality(held_out, options.batch_size)
    guard = VramGuard(budget=options.budget, gpu=options.gpu, allow=options.allow)
    trainer = lightning.Trainer(
        max_epochs=options.epochs,
        accelerator="cpu",
        callbacks=[guard, quality],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    start = time.perf_counter()
    trainer.fit(model, DataLoader(training, batch_size=options.batch_size, shuffle=True, drop_last=True))
    quality.show(answer.chosen.name, time.perf_counter() - start)


class Forecast(lightning.LightningModule):
    """AdamW, one cycle of the learning rate over the whole training."""

    def __init__(self, network: nn.Module, learning_rate: float) -> None:
        super().__init__()
        self.network = network
        self.learning_rate = learning_rate

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_index: int) -> Tensor:
        return over_the_sea(self.network, batch)

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate)
        total = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.learning_rate, total_steps=total)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Quality(Callback):
    """The error on the months that were never trained on, in kelvin, after every epoch."""

    def __init__(self, held_out: Months, batch_size: int) -> None:
        # All at once would take more memory than the training.
        self.loader = DataLoader(held_out, batch_size=batch_size)
        self.history: list[float] = []

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._measure(pl_module)
        print(f"\nTraining on the CPU: {int(trainer.estimated_stepping_batches)} optimizer steps")
        print(f"  as last month   {self.history[0]:.3f} K")

    def on_train_epoch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._measure(pl_module)
        print(f"  epoch {trainer.current_epoch + 1:<8}  {self.history[-1]:.3f} K", flush=True)

    def show(self, name: str, seconds: float) -> None:
        before, after = self.history[0], self.history[-1]
        print(f"\nThe last 12 months, never trained on, {seconds:.0f} s of planning and training with {name}:")
        print(f"  as last month   {before:.3f} K off (root mean square)")
        print(f"  forecast        {after:.3f} K off  ({after / before - 1:+.0%})")

    @torch.no_grad()
    def _measure(self, module: lightning.LightningModule) -> None:
        network = module.get_submodule("network")
        points = [batch[2].sum() for batch in self.loader]
        errors = [over_the_sea(network, batch) for batch in self.loader]  # type: ignore[arg-type]
        squares = sum(float(error * count) for error, count in zip(errors, points, strict=True))
        self.history.append(math.sqrt(squares / float(sum(points))) * SPREAD)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpu", default="RTX 3060 12GB", help="the card that is meant (default: %(default)s)")
    parser.add_argument("--budget", default="96MiB", help="what PyTorch may reserve on it (default: %(default)s)")
    parser.add_argument(
        "--allow", default="", help="what may be changed in a network that does not fit as written, such as accumulate"
    )
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--months", type=int, default=6, help="maps that the network sees")
    parser.add_argument("--columns", type=int, default=48, help="width of a window, of 432")
    parser.add_argument("--stride", type=int, default=24, help="columns from one window of the training to the next")
    parser.add_argument("--learning-rate", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def _progress(line: str) -> None:
    print(line, flush=True)


def _quiet_lightning() -> None:
    """Leave the terminal to the report: Lightning's start-up lines and its hints about workers say nothing here."""
    for name in ("lightning.pytorch", "pytorch_lightning"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec.*")
    warnings.filterwarnings("ignore", message=".*number of training batches.*")


if __name__ == "__main__":
    main()
