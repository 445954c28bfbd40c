"""Would it fit? Training batches of timm models that ran on an RTX 3090, and the next larger ones that did not.

    python benchmarks/published/timm_brackets.py [--only WORD ...] [--json FILE]

The recipe: random weights, train mode, float16 autocast around the forward pass without a scaler, SGD with momentum,
cross-entropy, contiguous (nchw) or channels-last (nhwc) images; torch 1.12, which had no fused attention. What the card
had free is not recorded: the allocator's room is taken as the card's memory less what the driver keeps and less the
context of that time. Before CUDA 11.7 all kernels were loaded at once, "which took >1000MB" (a PyTorch maintainer in
github.com/pytorch/pytorch/issues/107667); 1,000 MB are taken off. The same without it stands beside.
"""

from __future__ import annotations

import csv
import time
import warnings
from pathlib import Path
from typing import Any

from records import NotReproducible, Row
from source import Source, main

DATA = Path(__file__).parent / "data"
CARD = "RTX 3090"
CAPABILITY = (8, 6)
CONTEXT_THEN = 1000 * 10**6

#: In the table, the verdicts with the context of today: kernels are loaded as they are needed.
TODAY = "with today's context"


def rows() -> list[dict[str, str]]:
    """All rows, in the file's order."""
    with (DATA / "timm_brackets.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def name(row: dict[str, str]) -> str:
    """How a row is called in the table."""
    return f"{row['model']} {row['layout']}"


def room() -> tuple[int, int]:
    """Bytes that the allocator could reserve then, and could today."""
    from vram_guard import Budget

    budget = Budget.of(CARD, margin=0)
    return budget.available + budget.context - CONTEXT_THEN, budget.available


def predict(row: dict[str, str]) -> list[Row]:
    """Verdicts on the row's one or two batch sizes.

    Raises:
        NotReproducible: timm is not installed, or does not know the model any more.
    """
    try:
        import timm
    except ImportError:
        raise NotReproducible("timm or torchvision is not installed") from None
    import torch
    from timm.layers import set_fused_attn
    from torch.nn import functional

    from vram_guard import TrainingStep
    from vram_guard.simulate.run import run_step

    channels_last, side = row["layout"] == "nhwc", int(row["img_size"])
    layout = torch.channels_last if channels_last else torch.contiguous_format
    set_fused_attn(enable=False)

    def build() -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # names that have a newer spelling
            try:
                return timm.create_model(row["model"], pretrained=False).to(memory_format=layout)
            except RuntimeError as error:
                if "Unknown model" not in str(error):
                    raise
                raise NotReproducible(f"timm {timm.__version__} does not know the model any more") from None

    def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        images = torch.empty(size, 3, side, side, device="meta").contiguous(memory_format=layout)
        return images, torch.zeros(size, dtype=torch.long)

    def loss(model: Any, inputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        images, labels = inputs
        with torch.autocast("cuda", dtype=torch.float16):
            outputs = model(images)
        return functional.cross_entropy(outputs[0] if isinstance(outputs, (tuple, list)) else outputs, labels)

    step = TrainingStep(
        model=build,
        batch=batch,
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        zero_grad="before_forward",
    )
    then, today = room()
    found = []
    for column in ("fits_batch", "ooms_batch"):
        if not row[column]:
            continue
        size = int(row[column])
        start = time.perf_counter()
        timeline = run_step(step, size, CAPABILITY)
        fits, fits_today = (timeline.at(size, capacity=amount).out_of_memory is None for amount in (then, today))
        reserved = timeline.at(size).peak_reserved
        seconds = time.perf_counter() - start
        ran = column == "fits_batch"
        label = f"{name(row)} {size}"
        others = {TODAY: fits_today}
        found.append(
            Row(BRACKETS.title, label, None, reserved, timeline.tier, seconds, ran=ran, fits=fits, verdicts=others)
        )
    return found


BRACKETS = Source("timm on a 24 GB card", rows, name, predict)


if __name__ == "__main__":
    raise SystemExit(main(brackets=BRACKETS))
