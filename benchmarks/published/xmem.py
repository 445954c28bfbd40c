"""Predict the runs that xMem measured, and print ours and the published tools' errors on the same rows.

The recipe of the runs, as their authors describe it and as their training loops have it (the functions
``conv_train_loop`` and ``transformer_train_loop`` in their repository): random weights from the configuration, float32,
train mode, torch.optim's optimizers with lr=1e-3 and defaults otherwise, torch 2.6, transformers 4.51.3. Transformers:
sequences of 128 tokens, a batch of input_ids, attention_mask and labels, the loss from the model. CNNs: torchvision's
constructors, images of 86 x 86, cross-entropy. The outputs stay referenced into the next iteration; the batch does not:
its name goes to the next one while that is on the host.

What a model holds for the backward pass is its library's code: with another release of transformers than the runs'
the rows' errors are another's (docs/lab/accuracy.md). Let this run with 4.51.3; the table says what it ran with.

The measured quantity is NVML's, for the whole device, less its first sample; ours is what the allocator reserves on a
card of that size: near its capacity the allocator gives cached segments back, as it does on the card. The difference
between the two (kernels loaded late, library handles) is not added: no figure is published for these cards. What is
printed is the error without any constant.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from torch.nn import functional

from benchmarks.harness.networks import language
from benchmarks.harness.networks.batches import shapes_of_images, whole_sequences
from benchmarks.harness.records import NotReproducible, Row
from benchmarks.harness.workloads import step_of
from benchmarks.published.source import Record, Source, predicted, records_of
from vram_guard import Budget, Timeline, TrainingStep

LENGTH = 128
SIDE = 86
MODES = {"": "before_forward", "0": "before_forward", "1": "before_backward", "2": "after_step"}
CARDS = {"A100": "A100 40GB", "RTX 3060": "RTX 3060", "RTX 4060": "RTX 4060"}
TOOLS = ("xmem", "dnnmem", "llmem", "schedtune")

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


def name(row: Record) -> str:
    """The row's name in the table."""
    gpu = row["gpu_name"].removeprefix("NVIDIA ").removeprefix("GeForce ")
    return f"{row['model'].split('/')[-1]} {row['optimizer']} {row['batch_size']} {gpu}"


def predict(row: Record) -> Row:
    """Trace the row's workload and replay its batch size on the row's card.

    Raises:
        NotReproducible: a library that the row needs is not installed.
    """
    card = next(name for name in CARDS if name in row["gpu_name"])
    size, capacity = int(row["batch_size"]), Budget.of(CARDS[card], margin=0).available

    def answer(timeline: Timeline) -> dict[str, Any]:
        found = timeline.at(size, capacity=capacity)
        fits = found.out_of_memory is None
        return {"predicted": (found if fits else timeline.at(size)).peak_reserved, "fits": fits}

    return predicted(
        (_cnn(row) if row["kind"] == "cnn" else _transformer(row)).with_(
            zero_grad=MODES[row["zero_grad_mode"]], keeps="outputs"
        ),
        size,
        CARDS[card],
        answer,
        source=(CNN_ROWS if row["kind"] == "cnn" else TRANSFORMERS).title,
        name=name(row),
        measured=int(row["ground_bytes"]),
        ran=row["real_oom"] != "True",
        tools={tool: int(float(row[f"{tool}_bytes"])) for tool in TOOLS if row[f"{tool}_bytes"]},
        verdicts={tool: row[f"{tool}_oom"] == "False" for tool in TOOLS if row[f"{tool}_oom"]},
    )


def _outputs(model: Any, inputs: Any) -> Any:
    """Outputs of a transformer, the loss among them."""
    return model(**inputs)


def _run_cnn(model: Any, inputs: Any) -> tuple[Any, Any]:
    images, labels = inputs
    outputs = model(images)
    return functional.cross_entropy(outputs, labels), outputs


def _transformer(row: Record) -> TrainingStep:
    if importlib.util.find_spec("transformers") is None:
        raise NotReproducible("transformers is not installed")
    build = language.published(row["model"])
    return step_of(build, whole_sequences(LENGTH), _outputs, row["optimizer"], lr=1e-3)


def _cnn(row: Record) -> TrainingStep:
    try:
        from torchvision import models
    except ImportError:
        raise NotReproducible("torchvision is not installed") from None
    constructor, arguments = CNNS[row["model"]]
    build = getattr(models, constructor)
    return step_of(lambda: build(**arguments), shapes_of_images(SIDE), _run_cnn, row["optimizer"], lr=1e-3)


TRANSFORMERS = Source(
    "xMem's runs, transformers",
    lambda: records_of("xmem_transformers.csv"),
    name,
    lambda row: [predict(row)],
    "transformers-4.51.3",
)
CNN_ROWS = Source(
    "xMem's runs, CNNs",
    lambda: records_of("xmem_cnn.csv"),
    name,
    lambda row: [predict(row)],
    environment="torchvision",
)

SOURCES = (TRANSFORMERS, CNN_ROWS)
