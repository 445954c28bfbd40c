"""Would it fit? Training batches of timm models that ran on an RTX 3090, and the next larger ones that did not.

    python benchmarks/published/timm_brackets.py [--only WORD ...] [--json FILE]

The recipe, from the harness (``benchmark.py`` of that time in timm's repository): random weights, train mode, float16
autocast around forward, loss and backward without a scaler, SGD with Nesterov momentum, cross-entropy, contiguous
(nchw) or channels-last (nhwc) images that are made once, new labels in each step. torch 1.12 had no fused attention,
updated one parameter after the other, and its ``zero_grad()`` kept the gradients.

What the card had free is not recorded: the allocator's room is taken as the card's memory less what the driver keeps
and less the context of that time. Before CUDA 11.7 all kernels were loaded at once; on an RTX 3090 a tensor of one
element then took 1,687 MiB with torch 1.8.2 and CUDA 11.1 (github.com/pytorch/pytorch/issues/55277), the nearest
release that was measured on that card as far as we found. The same with today's context stands beside.
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

#: As nvidia-smi showed it, less the segment of the tensor itself.
CONTEXT_THEN = (1687 - 2) * 2**20

#: In the table, the verdicts with the context of today: kernels are loaded as they are needed.
TODAY = "with today's context"


class Harness:
    """The harness's step around a model: autocast from the forward pass until the optimizer's step."""

    def __init__(self) -> None:
        self._autocast: Any = None

    def forward(self, model: Any, images: Any) -> Any:
        import torch

        self._autocast = torch.autocast("cuda", dtype=torch.float16)
        self._autocast.__enter__()
        outputs = model(images)
        return outputs[0] if isinstance(outputs, (tuple, list)) else outputs

    def optimizer(self, parameters: Any) -> Any:
        """SGD as in torch 1.12: no lists of tensors, and gradients are zeroed in place."""
        import torch

        harness = self

        class SGD(torch.optim.SGD):
            def zero_grad(self, set_to_none: bool = False) -> None:  # noqa: ARG002 - torch 2's default is the other
                super().zero_grad(set_to_none=False)

            def step(self, closure: Any = None) -> Any:
                harness._autocast.__exit__(None, None, None)
                return super().step(closure)

        return SGD(parameters, lr=1e-4, momentum=0.9, nesterov=True, foreach=False)


def rows(file: str) -> list[dict[str, str]]:
    """All rows of a file, in its order."""
    with (DATA / file).open(encoding="utf-8", newline="") as opened:
        return list(csv.DictReader(opened))


def name(row: dict[str, str]) -> str:
    """How a row is called in the table."""
    return f"{row['model']} {row['layout']}"


def room() -> tuple[int, int]:
    """Bytes that the allocator could reserve then, and could today."""
    from vram_guard import Budget

    budget = Budget.of(CARD, margin=0)
    return budget.available + budget.context - CONTEXT_THEN, budget.available


def predict(row: dict[str, str], title: str) -> list[Row]:
    """Verdicts on the row's one or two batch sizes.

    Raises:
        NotReproducible: timm is not installed, does not know the model any more, or builds another one.
    """
    try:
        import timm
    except ImportError:
        raise NotReproducible("timm or torchvision is not installed") from None
    import torch
    from timm.layers import set_fused_attn
    from torch.nn import functional

    from vram_guard import TrainingStep
    from vram_guard.simulate.tracing.run import run_step

    channels_last, side = row["layout"] == "nhwc", int(row["img_size"])
    layout = torch.channels_last if channels_last else torch.contiguous_format
    set_fused_attn(enable=False)

    def build() -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # names that have a newer spelling
            try:
                model = timm.create_model(row["model"], pretrained=False)
            except RuntimeError as error:
                if "Unknown model" not in str(error):
                    raise
                raise NotReproducible(f"timm {timm.__version__} does not know the model any more") from None
        millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
        if f"{millions:.2f}" != f"{float(row['params_M']):.2f}":
            raise NotReproducible(
                f"timm {timm.__version__} builds another model under that name: {millions:.2f} million parameters, "
                f"{row['params_M']} in the run"
            )
        return model.to(memory_format=layout)

    harness = Harness()

    def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        images = torch.empty(size, 3, side, side, device="meta").contiguous(memory_format=layout)
        return images, torch.zeros(size, dtype=torch.long)

    def loss(model: Any, inputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        images, labels = inputs
        return functional.cross_entropy(harness.forward(model, images), labels)

    step = TrainingStep(
        model=build,
        batch=batch,
        loss=loss,
        optimizer=harness.optimizer,
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
        found.append(Row(title, label, None, reserved, timeline.tier, seconds, ran=ran, fits=fits, verdicts=others))
    return found


def _source(title: str, file: str) -> Source:
    return Source(title, lambda: rows(file), name, lambda row: predict(row, title))


BRACKETS = _source("timm on a 24 GB card", "timm_brackets.csv")

#: Models that nobody looked at while causes were sought: they judge what was found.
ASIDE = _source("timm on a 24 GB card, kept aside", "timm_brackets_aside.csv")


if __name__ == "__main__":
    raise SystemExit(main(brackets=BRACKETS, aside=ASIDE))
