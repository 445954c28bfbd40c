"""Predict the runs that xMem measured, and print ours and the published tools' errors on the same rows.

    python benchmarks/published/xmem.py [--kind transformers|cnns] [--only WORD ...] [--json FILE]

The recipe of the runs, as their authors describe it and as their training loops have it (the functions
``conv_train_loop`` and ``transformer_train_loop`` in their repository): random weights from the configuration, float32,
train mode, torch.optim's optimizers with lr=1e-3 and defaults otherwise, torch 2.6, transformers 4.51.3. Transformers:
sequences of 128 tokens, a batch of input_ids, attention_mask and labels, the loss from the model. CNNs: torchvision's
constructors, images of 86 x 86, cross-entropy. The outputs stay referenced into the next iteration; the batch does not:
its name goes to the next one while that is on the host.

What a model holds for the backward pass is its library's code: with another release of transformers than the runs'
the rows' errors are another's (docs/en/accuracy.md). Let this run with 4.51.3; the table says what it ran with.

The measured quantity is NVML's, for the whole device, less its first sample; ours is what the allocator reserves on a
card of that size: near its capacity the allocator gives cached segments back, as it does on the card. The difference
between the two (kernels loaded late, library handles) is not added: no figure is published for these cards. What is
printed is the error without any constant.
"""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from records import NotReproducible, Row
from source import Source, main

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


def name(row: dict[str, str]) -> str:
    """How a row is called in the table."""
    gpu = row["gpu_name"].removeprefix("NVIDIA ").removeprefix("GeForce ")
    return f"{row['model'].split('/')[-1]} {row['optimizer']} {row['batch_size']} {gpu}"


def _one(row: dict[str, str]) -> list[Row]:
    return [predict(row)]


def predict(row: dict[str, str]) -> Row:
    """Trace the row's workload and replay its batch size on the row's card.

    Raises:
        NotReproducible: a library that the row needs is not installed.
    """
    import torch

    from vram_guard import Budget, TrainingStep
    from vram_guard.simulate.tracing.run import run_step

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
    return Row(
        source=(CNN_ROWS if row["kind"] == "cnn" else TRANSFORMERS).title,
        name=name(row),
        measured=int(row["ground_bytes"]),
        predicted=found.peak_reserved,
        tier=timeline.tier,
        seconds=seconds,
        ran=row["real_oom"] != "True",
        fits=fits,
        tools={tool: int(float(row[f"{tool}_bytes"])) for tool in TOOLS if row[f"{tool}_bytes"]},
        verdicts={tool: row[f"{tool}_oom"] == "False" for tool in TOOLS if row[f"{tool}_oom"]},
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


TRANSFORMERS = Source(
    "xMem's runs, transformers", lambda: [row for row in all_rows() if row["kind"] != "cnn"], name, _one
)
CNN_ROWS = Source("xMem's runs, CNNs", lambda: [row for row in all_rows() if row["kind"] == "cnn"], name, _one)


if __name__ == "__main__":
    raise SystemExit(main(transformers=TRANSFORMERS, cnns=CNN_ROWS))
