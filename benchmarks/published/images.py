"""Would it fit? Networks of timm: batches that ran on a card, and larger ones that did not.

Training batches of timm models that ran on an RTX 3090, and the next larger ones that did not. The
recipe, from the harness (``benchmark.py`` of that time in timm's repository): random weights, train mode, float16
autocast around forward, loss and backward without a scaler, SGD with Nesterov momentum, cross-entropy, contiguous
(nchw) or channels-last (nhwc) images that are made once, new labels in each step. torch 1.12 had no fused attention,
updated one parameter after the other, and its ``zero_grad()`` kept the gradients.

What the card had free is not recorded: the allocator's room is taken as the card's memory less what the driver keeps
and less the context of that time. Before CUDA 11.7 all kernels were loaded at once; on an RTX 3090 a tensor of one
element then took 1,687 MiB with torch 1.8.2 and CUDA 11.1 (github.com/pytorch/pytorch/issues/55277), the nearest
release that was measured on that card as far as we found.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from benchmarks.harness.networks.batches import shapes_of_images
from benchmarks.harness.records import NotReproducible, Row
from benchmarks.published.source import Record, Source, predicted, records_of
from vram_guard import Budget, Timeline, TrainingStep

CARD = "RTX 3090"

#: As nvidia-smi showed it, less the segment of the tensor itself.
CONTEXT_THEN = (1687 - 2) * 2**20


class Harness:
    """The harness's step around a model: autocast from the forward pass until the optimizer's step."""

    def __init__(self) -> None:
        self._autocast: Any = None

    def forward(self, model: Any, images: Any) -> Any:
        self._autocast = torch.autocast("cuda", dtype=torch.float16)
        self._autocast.__enter__()
        outputs = model(images)
        return outputs[0] if isinstance(outputs, (tuple, list)) else outputs

    def optimizer(self, parameters: Any) -> Any:
        """SGD as in torch 1.12: no lists of tensors, and gradients are zeroed in place."""
        harness = self

        class SGD(torch.optim.SGD):
            def zero_grad(self, set_to_none: bool = False) -> None:  # noqa: ARG002 - torch 2's default is the other
                super().zero_grad(set_to_none=False)

            def step(self, closure: Any = None) -> Any:
                harness._autocast.__exit__(None, None, None)
                return super().step(closure)

        return SGD(parameters, lr=1e-4, momentum=0.9, nesterov=True, foreach=False)


def name(row: Record) -> str:
    """The row's name in the table."""
    return f"{row['model']} {row['layout']}"


def room() -> int:
    """Bytes that the allocator could reserve then."""
    budget = Budget.of(CARD, margin=0)
    return budget.available + budget.context - CONTEXT_THEN


def predict(row: Record, title: str) -> list[Row]:
    """Verdicts on the row's one or two batch sizes.

    Raises:
        NotReproducible: timm is not installed, does not know the model any more, or builds another one.
    """
    try:
        from timm.layers import set_fused_attn
    except ImportError:
        raise NotReproducible("timm or torchvision is not installed") from None
    set_fused_attn(enable=False)
    layout = torch.channels_last if row["layout"] == "nhwc" else torch.contiguous_format
    harness = Harness()
    step = TrainingStep(
        model=lambda: _model(row).to(memory_format=layout),
        batch=shapes_of_images(int(row["img_size"]), layout),
        loss=lambda model, inputs: torch.nn.functional.cross_entropy(harness.forward(model, inputs[0]), inputs[1]),
        optimizer=harness.optimizer,
        zero_grad="before_forward",
    )
    sizes = {column: int(row[column]) for column in ("fits_batch", "ooms_batch") if row[column]}
    return [
        predicted(
            step,
            size,
            CARD,
            lambda timeline, size=size: _verdicts(timeline, size),
            source=title,
            name=f"{name(row)} {size}",
            measured=None,
            ran=column == "fits_batch",
        )
        for column, size in sizes.items()
    ]


def _model(row: Record) -> Any:
    import timm

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
    return model


def _verdicts(timeline: Timeline, size: int) -> dict[str, Any]:
    fits = timeline.at(size, capacity=room()).out_of_memory is None
    return {"predicted": timeline.at(size).peak_reserved, "fits": fits}


def _source(title: str, file: str) -> Source:
    return Source(title, lambda: records_of(file), name, lambda row: predict(row, title), environment="torchvision")


BRACKETS = _source("timm on a 24 GB card", "timm_brackets.csv")

#: Models that were not looked at while causes were sought: they judge what was found.
ASIDE = _source("timm on a 24 GB card, kept aside", "timm_brackets_aside.csv")


SOURCES = (BRACKETS, ASIDE)
