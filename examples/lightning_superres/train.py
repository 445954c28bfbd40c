"""Train a small U-Net to double the resolution of photographs, on a budget that its batch does not fit into.

The training below is plain Lightning. The one line that concerns vram_guard is ``callbacks=[VramGuard(...)]``:
before anything is built it runs this very training step symbolically, says what it takes on a GPU, and changes
as little as makes it fit. No GPU is needed: without one the training really runs on the CPU under that plan.
"""

from __future__ import annotations

import argparse
import logging
import time
import warnings
from pathlib import Path

import lightning
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from sklearn.datasets import load_sample_images
from torch import Tensor, nn
from torch.nn.functional import interpolate
from torch.utils.data import DataLoader, Dataset

from vram_guard_lightning import VramGuard

#: Columns at the right edge of each photograph that training never sees.
HELD_OUT = 192


def main() -> None:
    """Predict, plan, train, and show what came out."""
    options = _options()
    options.out.mkdir(parents=True, exist_ok=True)
    _quiet_lightning()
    lightning.seed_everything(options.seed, verbose=False)

    photographs = load_photographs()
    training = Patches([image[..., :-HELD_OUT] for image in photographs], options.patches, options.patch)
    held_out = [image[..., -HELD_OUT:] for image in photographs]
    model = SuperResolution(UNet(options.width), learning_rate=options.learning_rate)

    guard = VramGuard(budget=options.budget)
    quality = Quality(held_out)
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
    trainer.fit(model, DataLoader(training, batch_size=options.batch_size, shuffle=True))
    seconds = time.perf_counter() - start

    quality.show(seconds)
    leave_reports(guard, options.out)


class UNet(nn.Module):
    """Two poolings deep; learns what bicubic interpolation gets wrong.

    Shapes: (N, 3, H, W) in [0, 1] -> (N, 3, 2H, 2W); H and W are multiples of 4.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down1 = _convolutions(3, width)
        self.down2 = _convolutions(width, 2 * width)
        self.bottom = _convolutions(2 * width, 4 * width)
        self.lift2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.up2 = _convolutions(4 * width, 2 * width)
        self.lift1 = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.up1 = _convolutions(2 * width, width)
        self.last = nn.Conv2d(width, 12, 3, padding=1)
        self._initialize()

    def forward(self, small: Tensor) -> Tensor:
        fine = self.down1((small - 0.5) / 0.25)
        middle = self.down2(nn.functional.max_pool2d(fine, 2))
        coarse = self.bottom(nn.functional.max_pool2d(middle, 2))
        middle = self.up2(torch.cat([self.lift2(coarse), middle], dim=1))
        fine = self.up1(torch.cat([self.lift1(middle), fine], dim=1))
        return bicubic(small) + 0.1 * nn.functional.pixel_shuffle(self.last(fine), 2)

    def _initialize(self) -> None:
        """He's initialisation, and a last layer of zeros: untrained, the network is bicubic interpolation."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d) and module.bias is not None:
                nn.init.kaiming_normal_(module.weight)
                nn.init.zeros_(module.bias)
        nn.init.zeros_(self.last.weight)


class SuperResolution(lightning.LightningModule):
    """Mean absolute error, AdamW, one cycle of the learning rate over the whole training."""

    def __init__(self, network: nn.Module, learning_rate: float) -> None:
        super().__init__()
        self.network = network
        self.learning_rate = learning_rate

    def training_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> Tensor:
        small, large = batch
        return nn.functional.l1_loss(self.network(small), large)

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.learning_rate, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Patches(Dataset[tuple[Tensor, Tensor]]):
    """Random square patches of photographs with their halves: (3, size/2, size/2), (3, size, size) in [0, 1]."""

    def __init__(self, photographs: list[Tensor], count: int, size: int) -> None:
        generator = np.random.default_rng(0)
        self.pairs = [_patch(photographs[index % len(photographs)], size, generator) for index in range(count)]

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.pairs[index]


class Quality(Callback):
    """Measures the network on the held-out parts of the photographs after every epoch."""

    def __init__(self, held_out: list[Tensor]) -> None:
        self.large = [_multiple_of(8, image) for image in held_out]
        self.small = [halved(image[None]) for image in self.large]
        self.history: list[float] = []

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._measure(pl_module)
        print(f"\nTraining on the CPU under this plan: {int(trainer.estimated_stepping_batches)} optimizer steps")
        print(f"  untrained   held-out PSNR {self.history[-1]:.2f} dB")

    def on_train_epoch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._measure(pl_module)
        print(f"  epoch {trainer.current_epoch + 1:<5} held-out PSNR {self.history[-1]:.2f} dB", flush=True)

    def show(self, seconds: float) -> None:
        baseline = self._mean_psnr([bicubic(image) for image in self.small])
        after = self.history[-1]
        print(f"\nHeld-out parts of both photographs, {seconds:.0f} s of prediction and training:")
        print(f"  bicubic interpolation   {baseline:.2f} dB")
        print(f"  before training         {self.history[0]:.2f} dB")
        print(f"  after training          {after:.2f} dB  ({after - baseline:+.2f} dB over bicubic)")

    @torch.no_grad()
    def _measure(self, module: lightning.LightningModule) -> None:
        network = module.get_submodule("network")
        self.history.append(self._mean_psnr([network(image) for image in self.small]))

    def _mean_psnr(self, images: list[Tensor]) -> float:
        return sum(psnr(image[0], truth) for image, truth in zip(images, self.large, strict=True)) / len(images)


def load_photographs() -> list[Tensor]:
    """scikit-learn's two sample photographs (427 x 640), each (3, H, W) in [0, 1]."""
    return [torch.tensor(image).permute(2, 0, 1) / 255 for image in load_sample_images().images]


def halved(images: Tensor) -> Tensor:
    """(N, 3, H, W) -> (N, 3, H/2, W/2), as a camera with half the pixels sees it.

    The lens blurs (a Gaussian with a standard deviation of one full-resolution pixel), then each pixel of the
    sensor gathers the light of 2 x 2.
    """
    offsets = torch.arange(-3.0, 4.0)
    weights = torch.exp(-(offsets**2) / 2)
    kernel = torch.outer(weights, weights) / weights.sum() ** 2
    edges_kept = nn.functional.pad(images, (3, 3, 3, 3), mode="replicate")
    blurred = nn.functional.conv2d(edges_kept, kernel.expand(3, 1, 7, 7), groups=3)
    return nn.functional.avg_pool2d(blurred, 2)


def bicubic(images: Tensor) -> Tensor:
    """(N, 3, H, W) -> (N, 3, 2H, 2W): the baseline."""
    return interpolate(images, scale_factor=2, mode="bicubic", align_corners=False)


def psnr(image: Tensor, truth: Tensor) -> float:
    """Peak signal-to-noise ratio in dB of images in [0, 1]."""
    return float(-10 * torch.log10(nn.functional.mse_loss(image.float().clamp(0, 1), truth)))


def leave_reports(guard: VramGuard, out: Path) -> None:
    """A picture of the memory over time, a snapshot for memory_viz, and the report as JSON."""
    from vram_guard.report import save

    plan = guard.plan
    if plan is None or plan.timeline is None:
        print("\nThere is no plan here to draw: none was made, or rank 0 has it.")
        return
    for name in ("memory.svg", "snapshot.pickle", "report.json"):
        save(plan, out / name)
    print(f"\nLeft in {out}/:")
    print("  memory.svg        memory over two optimizer steps, as written and under the plan")
    print("  snapshot.pickle   the same for PyTorch's memory_viz page (https://docs.pytorch.org/memory_viz)")
    print("  report.json       the report for programs")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", default="48MiB", help="what PyTorch may reserve on the GPU (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--patches", type=int, default=512, help="patches in an epoch")
    parser.add_argument("--patch", type=int, default=96, help="side of a patch in pixels")
    parser.add_argument("--width", type=int, default=16, help="channels of the finest level")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("demo-out"))
    return parser.parse_args()


def _convolutions(channels: int, width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1),
        nn.LeakyReLU(0.1, inplace=True),
        nn.Conv2d(width, width, 3, padding=1),
        nn.LeakyReLU(0.1, inplace=True),
    )


def _patch(photograph: Tensor, size: int, generator: np.random.Generator) -> tuple[Tensor, Tensor]:
    """One random patch, mirrored or turned at random."""
    _, height, width = photograph.shape
    top, left = int(generator.integers(height - size)), int(generator.integers(width - size))
    large = photograph[:, top : top + size, left : left + size]
    large = large.rot90(int(generator.integers(4)), (1, 2))
    large = (large.flip(2) if generator.random() < 0.5 else large).contiguous()
    return halved(large[None])[0], large


def _multiple_of(number: int, image: Tensor) -> Tensor:
    _, height, width = image.shape
    return image[:, : height - height % number, : width - width % number]


def _quiet_lightning() -> None:
    """Leave the terminal to the report: Lightning's start-up lines and its hints about workers say nothing here."""
    for name in ("lightning.pytorch", "pytorch_lightning"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec.*")
    warnings.filterwarnings("ignore", message=".*number of training batches.*")


if __name__ == "__main__":
    main()
