"""Predict the runs that xMem measured, and print ours and the published tools' errors on the same rows.

    python benchmarks/published/xmem.py [--json FILE] [--models NAME ...]

The recipe of the runs, as their authors describe it: random weights from the configuration, float32, train mode,
sequences of 128 tokens, a batch of input_ids, attention_mask and labels, the loss from the model, optimizers with
lr=1e-3 and defaults otherwise, torch 2.6, transformers 4.51.3. The outputs stay referenced into the next iteration.

The measured quantity is NVML's, for the whole process; ours is what the allocator reserves. The difference (kernels
loaded late, library handles) is not added: what is printed is the error without any constant.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

DATA = Path(__file__).parent / "data"
LENGTH = 128
MODES = {"": "before_forward", "0": "before_forward", "1": "before_backward", "2": "after_step"}
CAPABILITIES = {"A100": (8, 0), "RTX 3060": (8, 6), "RTX 4060": (8, 9)}
TOOLS = ("xmem", "dnnmem", "llmem", "schedtune")

#: transformers 4.51.3 had no fused attention for T5; newer releases have.
EAGER_THEN = ("T5ForConditionalGeneration",)


class Result(NamedTuple):
    """One row, predicted."""

    model: str
    optimizer: str
    batch_size: int
    gpu: str
    measured: int
    predicted: int
    seconds: float
    tools: dict[str, int]

    @property
    def error(self) -> float:
        """Signed relative error."""
        return self.predicted / self.measured - 1


def rows() -> list[dict[str, str]]:
    """Rows with a measured peak, in the file's order."""
    with (DATA / "xmem_transformers.csv").open(encoding="utf-8", newline="") as file:
        return [row for row in csv.DictReader(file) if row["real_oom"] != "True"]


def predict(row: dict[str, str]) -> Result:
    """Trace the row's workload and replay its batch size."""
    import torch
    import transformers

    from vram_guard import TrainingStep, estimate

    spec = json.loads((DATA / "xmem_models.json").read_text(encoding="utf-8"))[row["model"]]

    def build() -> Any:
        extra = {"attn_implementation": "eager"} if spec["class"] in EAGER_THEN else {}
        config = getattr(transformers, spec["config_class"])(**spec["config"], **extra)
        return getattr(transformers, spec["class"])(config)

    def batch(size: int) -> dict[str, torch.Tensor]:
        ids = torch.zeros(size, LENGTH, dtype=torch.long)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}

    kept: list[Any] = [None]

    def loss(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        kept[0] = model(**inputs)  # the outputs live until the next iteration's replace them
        return kept[0].loss

    optimizer = getattr(torch.optim, row["optimizer"])
    step = TrainingStep(
        model=build,
        batch=batch,
        loss=loss,
        optimizer=lambda parameters: optimizer(parameters, lr=1e-3),
        zero_grad=MODES[row["zero_grad_mode"]],
    )
    capability = next(value for name, value in CAPABILITIES.items() if name in row["gpu_name"])
    start = time.perf_counter()
    found = estimate(step, int(row["batch_size"]), compute_capability=capability)
    return Result(
        row["model"],
        row["optimizer"],
        int(row["batch_size"]),
        row["gpu_name"].removeprefix("NVIDIA ").removeprefix("GeForce "),
        int(row["ground_bytes"]),
        found.peak_reserved,
        time.perf_counter() - start,
        {tool: int(float(row[f"{tool}_bytes"])) for tool in TOOLS if row[f"{tool}_bytes"]},
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", help="only rows whose model contains one of these")
    parser.add_argument("--json", metavar="FILE", help="also write every row to FILE")
    options = parser.parse_args()
    wanted = [row for row in rows() if not options.models or any(name in row["model"] for name in options.models)]
    results = []
    for row in wanted:
        results.append(predict(row))
        _print_row(results[-1])
    _print_summary(results)
    if options.json:
        data = [{**result._asdict(), "error": result.error} for result in results]
        Path(options.json).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def _print_row(result: Result) -> None:
    xmem = result.tools["xmem"] / result.measured - 1
    print(
        f"{result.model[-30:]:30} {result.optimizer:9} {result.batch_size:4} {result.gpu[:14]:14}"
        f" {result.measured / 2**20:7.0f} {result.predicted / 2**20:7.0f} MiB {result.error:+7.1%}"
        f"   xMem {xmem:+7.1%} {result.seconds:5.1f} s",
        flush=True,
    )


def _print_summary(results: list[Result]) -> None:
    print(f"\n{'tool':12} {'rows':>4} {'median':>7} {'p90':>7} {'bias':>7} {'within 5%':>10}")
    tools = {"vram_guard": [result.error for result in results]}
    for tool in TOOLS:
        tools[tool] = [result.tools[tool] / result.measured - 1 for result in results if tool in result.tools]
    for tool, errors in tools.items():
        if errors:
            absolute = sorted(abs(error) for error in errors)
            p90 = absolute[int(0.9 * (len(absolute) - 1))]
            within = sum(error <= 0.05 for error in absolute)
            print(
                f"{tool:12} {len(errors):4} {statistics.median(absolute):7.1%} {p90:7.1%}"
                f" {statistics.median(errors):+7.1%} {within:7}/{len(errors)}"
            )


if __name__ == "__main__":
    main()
