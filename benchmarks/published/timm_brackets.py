"""Would it fit? Training batches of timm models that ran on an RTX 3090, and the next larger ones that did not.

    python benchmarks/published/timm_brackets.py

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
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

DATA = Path(__file__).parent / "data"
CARD = "RTX 3090"
CAPABILITY = (8, 6)
CONTEXT_THEN = 1000 * 10**6


class Verdict(NamedTuple):
    """One batch size that ran, or one that did not; sizes in bytes."""

    model: str
    layout: str
    batch_size: int
    ran: bool
    fits: bool
    """The prediction."""
    fits_today: bool
    """The prediction with today's context, where kernels are loaded as they are needed."""
    reserved: int
    """Predicted peak on a card without limit."""
    seconds: float


def rows() -> list[dict[str, str]]:
    """All rows, in the file's order."""
    with (DATA / "timm_brackets.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def room() -> tuple[int, int]:
    """Bytes that the allocator could reserve then, and could today."""
    from vram_guard import Budget

    budget = Budget.of(CARD, margin=0)
    return budget.available + budget.context - CONTEXT_THEN, budget.available


def predict(row: dict[str, str]) -> list[Verdict]:
    """Verdicts on the row's one or two batch sizes.

    Raises:
        RuntimeError: timm does not know the model any more.
    """
    import timm
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
            return timm.create_model(row["model"], pretrained=False).to(memory_format=layout)

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
        found.append(Verdict(row["model"], row["layout"], size, ran, fits, fits_today, reserved, seconds))
    return found


def run_all(
    wanted: list[dict[str, str]], report: Callable[[Verdict], None] | None = None
) -> tuple[list[Verdict], list[str]]:
    """Verdicts of the rows that can be run here, and a line for each that cannot."""
    verdicts: list[Verdict] = []
    left_out = []
    try:
        import timm  # noqa: F401 - only whether it is there
    except ImportError:
        return [], [f"{len(wanted)} rows of timm's brackets: timm or torchvision is not installed"]
    for row in wanted:
        try:
            found = predict(row)
        except Exception as error:  # noqa: BLE001 - one model of 120 must not stop the others
            left_out.append(f"{row['model']} {row['layout']}: {type(error).__name__}: {error}"[:200])
            continue
        verdicts += found
        for verdict in found if report is not None else ():
            report(verdict)  # type: ignore[misc]
    return verdicts, left_out


def print_verdict(verdict: Verdict) -> None:
    """One line."""
    truth = "ran" if verdict.ran else "OOM"
    mark = "" if verdict.fits == verdict.ran else "  WRONG"
    print(
        f"{verdict.model:36} {verdict.layout} {verdict.batch_size:4} {truth} predicted"
        f" {verdict.reserved / 2**30:6.2f} GiB {'fits' if verdict.fits else 'OOM '} {verdict.seconds:5.1f} s{mark}",
        flush=True,
    )


def print_summary(verdicts: list[Verdict]) -> None:
    """Right verdicts, on those that ran and on those that did not."""
    if not verdicts:
        return
    then, today = room()
    print(f"\ntimm on a 24 GB card: {len(verdicts)} verdicts")
    for name, amount, choose in (("context of then", then, "fits"), ("context of today", today, "fits_today")):
        right = [getattr(verdict, choose) == verdict.ran for verdict in verdicts]
        ran = [ok for ok, verdict in zip(right, verdicts, strict=True) if verdict.ran]
        oom = [ok for ok, verdict in zip(right, verdicts, strict=True) if not verdict.ran]
        print(
            f"{name:17} room {amount / 2**30:6.2f} GiB  right {sum(right) / len(right):6.1%}"
            f"  (ran: {sum(ran)}/{len(ran)}, did not: {sum(oom)}/{len(oom)})"
        )


def main() -> None:
    """Print every verdict and the shares."""
    verdicts, left_out = run_all(rows(), print_verdict)
    print_summary(verdicts)
    for line in left_out:
        print(f"not reproduced: {line}")


if __name__ == "__main__":
    main()
