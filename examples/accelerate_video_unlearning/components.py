"""GPU memory of each part of the training, compared with a rule of thumb, and the plans that make it fit.

    python components.py --model_path CogVideoX-5b --batch_size 4 --num_frames 17 --dtype float16

Models are built symbolically: no weights, no GPU, host memory for the trace alone. "The guide" is a common way to
count: parameters from round figures, gradients and two moments for everything, a guess for activations.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from models import Folder
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from unlearning import Unlearning, kept_share

from vram_guard import TrainingStep, plan, trace
from vram_guard.report import render

if TYPE_CHECKING:
    from vram_guard import Estimate

GB = 1e9
#: The guide's figures for CogVideoX-5b, float16, batch 4, 17 frames; in GB.
GUIDE = {
    "original transformer (frozen)": 10.00,
    "unlearned transformer": 10.00,
    "text encoder (T5), once": 0.44,
    "text encoder, a second time": 0.44,
    "gradients": 10.44,
    "optimizer states": 20.88,
    "batch": 0.14,
    "activations": 1.50,
}
GPUS = ("RTX 4090", "A100 40GB", "A100 80GB", "H200")


class Models(nn.Module):
    """Everything that lies on the GPU."""

    def __init__(self, folder: Folder, dtype: torch.dtype, latent: tuple[int, int, int]) -> None:
        super().__init__()
        self.unlearned = folder.transformer(dtype)
        self.original = folder.transformer(dtype).requires_grad_(False).eval()
        self.text_encoder = folder.text_encoder(dtype)
        cos, sin = folder.rotary(*latent)
        for name, table in (("cos", cos), ("sin", sin), ("kept", kept_share())):
            self.register_buffer(name, table, persistent=False)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """The loss of the training script."""
        parts = (self.unlearned, self.original, self.text_encoder, (self.cos, self.sin), self.kept)
        return Unlearning(*parts).loss(batch)


def step_of(folder: Folder, dtype: torch.dtype, latent: tuple[int, int, int]) -> TrainingStep:
    """The training step of ``train_unlearning.py``; ``latent``: frames, rows, columns."""
    frames, height, width = latent

    def batch(size: int) -> dict[str, Tensor]:
        return {
            "latents": torch.zeros(size, frames, folder.channels, height, width, dtype=dtype),
            "concept": torch.zeros(size, folder.tokens, dtype=torch.long),
            "nothing": torch.zeros(size, folder.tokens, dtype=torch.long),
        }

    def loss(models: Any, data: dict[str, Tensor]) -> Tensor:
        value: Tensor = models(data)
        return value

    precision = {torch.float32: "32-true", torch.float16: "16-true", torch.bfloat16: "bf16-true"}[dtype]
    return TrainingStep(
        model=lambda: Models(folder, dtype, latent),
        batch=batch,
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=1e-5),
        precision=precision,  # type: ignore[arg-type]
        clip_grad_norm=1.0,
    )


def components(folder: Folder, dtype: torch.dtype, estimate: Estimate) -> dict[str, float]:
    """Part -> bytes at the peak, with the names of :data:`GUIDE`."""
    with torch.device("meta"):
        sizes = {
            "transformer": sum(p.numel() * dtype.itemsize for p in folder.transformer(dtype).parameters()),
            "text": sum(p.numel() * dtype.itemsize for p in folder.text_encoder(dtype).parameters()),
        }
    alive = estimate.breakdown
    return {
        "original transformer (frozen)": sizes["transformer"],
        "unlearned transformer": sizes["transformer"],
        "text encoder (T5), once": sizes["text"],
        "text encoder, a second time": 0,
        "gradients": alive["gradients"],
        "optimizer states": alive["optimizer_states"],
        "batch": alive["batch"],
        "activations": alive["activations"] + alive["temporaries"] + alive["workspace"] + alive["buffers"],
    }


def main() -> None:
    """Print the table and the plans."""
    options = _options()
    folder, dtype = Folder(options.model_path), getattr(torch, options.dtype)
    console = Console()
    step = step_of(folder, dtype, (options.num_frames, options.height, options.width))
    with console.status("running the step symbolically"):
        estimate = trace(step).at(options.batch_size)
    found = components(folder, dtype, estimate)
    guided = folder.path.name == "CogVideoX-5b" and (options.dtype, options.batch_size) == ("float16", 4)
    console.print(_table(found, estimate, guided=guided))
    for name in options.gpus:
        with console.status(f"planning for {name}") as status:
            made = plan(step, options.batch_size, gpu=name, progress=status.update)
        console.print(f"\n[bold]{name}[/bold]")
        console.print(render(made, verbose=False), highlight=False, markup=False)


def _table(found: dict[str, float], estimate: Estimate, *, guided: bool) -> Table:
    table = Table(title="At the peak of a training step, GB (10^9 bytes)")
    table.add_column("part")
    table.add_column("simulated", justify="right")
    if guided:
        table.add_column("the guide", justify="right")
    for name, size in found.items():
        if size or guided:
            table.add_row(name, f"{size / GB:.2f}", *([f"{GUIDE[name]:.2f}"] if guided else []))
    table.add_section()
    guide = [f"{sum(GUIDE.values()):.2f}"] if guided else []
    table.add_row("live tensors", f"{estimate.peak_allocated / GB:.2f}", *guide)
    table.add_row("reserved by PyTorch", f"{estimate.peak_reserved / GB:.2f}", *(["-"] if guided else []))
    if guided:
        table.caption = (
            "The guide prints 63.78 GB: its summary adds the models once more. Its own formula gives 52.2 + 1.64."
        )
    return table


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model_path", type=Path, default=Path(__file__).parent / "CogVideoX-5b")
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--num_frames", type=int, default=17, help="frames of a latent")
    parser.add_argument("--height", type=int, default=32, help="rows of a latent")
    parser.add_argument("--width", type=int, default=32, help="columns of a latent")
    parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], default="float16", help="of all weights")
    parser.add_argument("--gpus", nargs="*", default=list(GPUS), metavar="NAME", help="cards to plan for")
    return parser.parse_args()


if __name__ == "__main__":
    main()
