"""Predict the runs that xMem measured, and print ours and the published tools' errors on the same rows.

    python benchmarks/published/xmem.py [--json FILE] [--models NAME ...]

The recipe of the runs, as their authors describe it: random weights from the configuration, float32, train mode,
optimizers with lr=1e-3 and defaults otherwise, torch 2.6, transformers 4.51.3. Transformers: sequences of 128 tokens,
a batch of input_ids, attention_mask and labels, the loss from the model. CNNs: torchvision's constructors, images of
86 x 86, cross-entropy. The outputs stay referenced into the next iteration.

The measured quantity is NVML's, for the whole device, less its first sample; ours is what the allocator reserves on a
card of that size: near its capacity the allocator gives cached segments back, as it does on the card. The difference
between the two (kernels loaded late, library handles) is not added: no figure is published for these cards. What is
printed is the error without any constant.
"""

from __future__ import annotations

import argparse
import csv
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from table import summary

DATA = Path(__file__).parent / "data"
LENGTH = 128
SIDE = 86
MODES = {"": "before_forward", "0": "before_forward", "1": "before_backward", "2": "after_step"}
CAPABILITIES = {"A100": (8, 0), "RTX 3060": (8, 6), "RTX 4060": (8, 9)}
CARDS = {"A100": "A100 40GB", "RTX 3060": "RTX 3060", "RTX 4060": "RTX 4060"}
TOOLS = ("xmem", "dnnmem", "llmem", "schedtune")

#: transformers 4.51.3 had no fused attention for T5; newer releases have.
EAGER_THEN = ("T5ForConditionalGeneration",)

#: The runs' names -> torchvision's constructor and its arguments.
CNNS: dict[str, tuple[str, dict[str, Any]]] = {
    "ConvNeXtBase": ("convnext_base", {}),
    "ConvNeXtTiny": ("convnext_tiny", {}),
    "MnasNet": ("mnasnet1_0", {"num_classes": 10}),
    "MobeNetV3Large": ("mobilenet_v3_large", {"num_classes": 10}),
    "MobeNetV3Small": ("mobilenet_v3_small", {"num_classes": 10}),
    "MobileNetV2": ("mobilenet_v2", {}),
    "RegNetX400MF": ("regnet_x_400mf", {}),
    "RegNetY400MF": ("regnet_y_400mf", {}),
    "ResNet101": ("resnet101", {}),
    "ResNet152": ("resnet152", {}),
    "VGG16": ("vgg16", {}),
    "VGG19": ("vgg19", {}),
}


class NotReproducible(Exception):  # noqa: N818 - it is no fault of the row's
    """This row cannot be run here; the message is the reason."""


class Result(NamedTuple):
    """One row, predicted; sizes in bytes."""

    model: str
    kind: str
    optimizer: str
    batch_size: int
    gpu: str
    measured: int
    real_oom: bool
    predicted: int
    """The reserved peak on that card; on a card without limit where the step does not fit."""
    fits: bool
    seconds: float
    tools: dict[str, int]
    verdicts: dict[str, bool]
    """Tool -> whether it says that the run fits."""

    @property
    def error(self) -> float:
        """Signed relative error."""
        return self.predicted / self.measured - 1


def all_rows() -> list[dict[str, str]]:
    """Every row: transformers first, then CNNs, in the files' order."""
    found = []
    for name in ("xmem_transformers.csv", "xmem_cnn.csv"):
        with (DATA / name).open(encoding="utf-8", newline="") as file:
            found += list(csv.DictReader(file))
    return found


def rows() -> list[dict[str, str]]:
    """Rows of transformers with a measured peak, in the file's order."""
    return [row for row in all_rows() if row["real_oom"] != "True" and row["kind"] != "cnn"]


def predict(row: dict[str, str]) -> Result:
    """Trace the row's workload and replay its batch size on the row's card.

    Raises:
        NotReproducible: a library that the row needs is not installed.
    """
    import torch

    from vram_guard import Budget, TrainingStep
    from vram_guard.simulate.run import run_step

    build, batch, run = _cnn(row) if row["kind"] == "cnn" else _transformer(row)
    kept: list[Any] = [None]

    def loss(model: Any, inputs: Any) -> torch.Tensor:
        kept[0], value = run(model, inputs)  # the outputs live until the next iteration's replace them
        return value

    optimizer = getattr(torch.optim, row["optimizer"])
    step = TrainingStep(
        model=build,
        batch=batch,
        loss=loss,
        optimizer=lambda parameters: optimizer(parameters, lr=1e-3),
        zero_grad=MODES[row["zero_grad_mode"]],
    )
    card = next(name for name in CARDS if name in row["gpu_name"])
    size = int(row["batch_size"])
    start = time.perf_counter()
    timeline = run_step(step, size, CAPABILITIES[card])
    found = timeline.at(size, capacity=Budget.of(CARDS[card], margin=0).available)
    fits = found.out_of_memory is None
    if not fits:
        found = timeline.at(size)
    seconds = time.perf_counter() - start
    return Result(
        row["model"],
        row["kind"],
        row["optimizer"],
        size,
        row["gpu_name"].removeprefix("NVIDIA ").removeprefix("GeForce "),
        int(row["ground_bytes"]),
        row["real_oom"] == "True",
        found.peak_reserved,
        fits,
        seconds,
        {tool: int(float(row[f"{tool}_bytes"])) for tool in TOOLS if row[f"{tool}_bytes"]},
        {tool: row[f"{tool}_oom"] == "False" for tool in TOOLS if row[f"{tool}_oom"]},
    )


_Workload = tuple[Callable[[], Any], Callable[[int], Any], Callable[[Any, Any], tuple[Any, Any]]]


def _transformer(row: dict[str, str]) -> _Workload:
    import torch

    try:
        import transformers
    except ImportError:
        raise NotReproducible("transformers is not installed") from None
    spec = json.loads((DATA / "xmem_models.json").read_text(encoding="utf-8"))[row["model"]]

    def build() -> Any:
        extra = {"attn_implementation": "eager"} if spec["class"] in EAGER_THEN else {}
        config = getattr(transformers, spec["config_class"])(**spec["config"], **extra)
        return getattr(transformers, spec["class"])(config)

    def batch(size: int) -> dict[str, torch.Tensor]:
        ids = torch.zeros(size, LENGTH, dtype=torch.long)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}

    def run(model: Any, inputs: dict[str, torch.Tensor]) -> tuple[Any, Any]:
        outputs = model(**inputs)
        return outputs, outputs.loss

    return build, batch, run


def _cnn(row: dict[str, str]) -> _Workload:
    import torch
    from torch.nn import functional

    try:
        from torchvision import models
    except ImportError:
        raise NotReproducible("torchvision is not installed") from None
    constructor, arguments = CNNS[row["model"]]

    def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        # Shapes are enough, and images of real memory would not be.
        return torch.empty(size, 3, SIDE, SIDE, device="meta"), torch.zeros(size, dtype=torch.long)

    def run(model: Any, inputs: tuple[torch.Tensor, torch.Tensor]) -> tuple[Any, Any]:
        images, labels = inputs
        outputs = model(images)
        return outputs, functional.cross_entropy(outputs, labels)

    return lambda: getattr(models, constructor)(**arguments), batch, run


def run_all(
    wanted: list[dict[str, str]], report: Callable[[Result], None] | None = None
) -> tuple[list[Result], list[str]]:
    """Results of the rows that can be run here, and a line for each that cannot."""
    results, left_out = [], []
    for row in wanted:
        try:
            results.append(predict(row))
        except NotReproducible as reason:
            left_out.append(f"{row['model']} {row['optimizer']} {row['batch_size']}: {reason}")
            continue
        if report is not None:
            report(results[-1])
    return results, left_out


def print_summary(results: list[Result]) -> None:
    """Error and wrong verdicts of every tool, for all rows and for each kind of model."""
    groups = {"all": results}
    for kind in dict.fromkeys(result.kind for result in results):
        groups[kind] = [result for result in results if result.kind == kind]
    for name, group in groups.items():
        measured = [result for result in group if not result.real_oom]
        lines = {"vram_guard": [result.error for result in measured]}
        wrong = {"vram_guard": [result.fits == result.real_oom for result in group]}
        for tool in TOOLS:
            lines[tool] = [result.tools[tool] / result.measured - 1 for result in measured if tool in result.tools]
            wrong[tool] = [r.verdicts[tool] == r.real_oom for r in group if tool in r.verdicts]
        seconds = [result.seconds for result in group]
        summary(f"xMem's runs, {name}", lines, wrong, {"vram_guard": sum(seconds) / max(1, len(seconds))})


def print_result(result: Result) -> None:
    """One line for a row."""
    xmem = result.tools["xmem"] / result.measured - 1
    said = "fits" if result.fits else "OOM"
    truth = "OOM" if result.real_oom else f"{result.error:+7.1%}"
    print(
        f"{result.model[-30:]:30} {result.optimizer:9} {result.batch_size:4} {result.gpu[:14]:14}"
        f" {result.measured / 2**20:7.0f} {result.predicted / 2**20:7.0f} MiB {truth:>7} {said:4}"
        f"   xMem {xmem:+7.1%} {result.seconds:5.1f} s",
        flush=True,
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", help="only rows whose model contains one of these")
    parser.add_argument("--json", metavar="FILE", help="also write every row to FILE")
    options = parser.parse_args()
    wanted = [row for row in all_rows() if not options.models or any(name in row["model"] for name in options.models)]
    results, left_out = run_all(wanted, print_result)
    print_summary(results)
    for line in left_out:
        print(f"not reproduced: {line}")
    if options.json:
        data = [{**result._asdict(), "error": result.error} for result in results]
        Path(options.json).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
