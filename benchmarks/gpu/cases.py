"""The cases: which training steps are measured on the GPU and predicted without it. Defined here once for both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch

from benchmarks.gpu.techniques import LAYOUTS, TECHNIQUES, Compiled, compile_in_place, recipe_of
from benchmarks.harness.command import is_chosen
from benchmarks.harness.networks import NETWORKS
from benchmarks.harness.workloads import optimizer_of
from vram_guard import TrainingStep
from vram_guard.errors import InvalidInputError
from vram_guard.step import Precision, ZeroGrad

T = TypeVar("T")


@dataclass(frozen=True)
class Case:
    """One training step to measure: plain values, so that a results file can carry it.

    Attributes:
        network: a key of ``harness.networks.NETWORKS``.
        batch_size: samples per micro-batch; 0 where ``fill`` decides.
        fill: choose the batch size whose predicted reserved peak takes this share of what the allocator may reserve
            on the card; above 1, the step is meant to run out of memory. 0: off.
        precision, accumulate, zero_grad: as in TrainingStep.
        optimizer: a key of :data:`OPTIMIZERS`.
        clip: maximum gradient norm; 0: no clipping.
        tf32: allow TF32 in matrix products and convolutions.
        channels_last: memory format of weights and images.
        checkpointing: activation checkpointing of the network's blocks.
        save_on_cpu: activations wait on the host (``torch.autograd.graph.save_on_cpu``).
        technique: a key of ``techniques.TECHNIQUES``; "" for the step as it is.
        compiled: what ``torch.compile`` compiles.
        layout: a key of ``techniques.LAYOUTS``: the process is one rank of several, the others are pretended.
        allocator: PYTORCH_CUDA_ALLOC_CONF of the process; "" for PyTorch's defaults.
        history: keep the allocator's recorded history.
        profiled: keep the device's seconds of one update, kernel by kernel.
        seconds: expected on an H100 with the process start: a guess until measured; it only orders and budgets.
    """

    network: str
    batch_size: int = 0
    fill: float = 0.0
    precision: Precision = "32-true"
    optimizer: str = "adamw"
    accumulate: int = 1
    zero_grad: ZeroGrad = "after_step"
    clip: float = 0.0
    tf32: bool = False
    channels_last: bool = False
    checkpointing: bool = False
    save_on_cpu: bool = False
    technique: str = ""
    compiled: Compiled = ""
    layout: str = ""
    allocator: str = ""
    history: bool = False
    profiled: bool = False
    seconds: float = 4.0

    @property
    def name(self) -> str:
        """The case's name in tables; unique in the suite."""
        size = f"fill{self.fill:g}" if self.fill else f"b{self.batch_size}"
        parts = [self.network, size, self.precision, self.optimizer]
        parts += [f"accumulate{self.accumulate}"] if self.accumulate > 1 else []
        parts += [self.zero_grad] if self.zero_grad != "after_step" else []
        parts += [f"clip{self.clip:g}"] if self.clip else []
        parts += [flag for flag in _FLAGS if getattr(self, flag)]
        parts += [self.technique] if self.technique else []
        parts += [f"compiled {self.compiled}"] if self.compiled else []
        parts += [self.layout] if self.layout else []
        parts += [self.allocator] if self.allocator else []
        return " ".join(parts)

    @property
    def group(self) -> str:
        """The table that the case is shown in."""
        if self.layout:
            return "ranks"
        if self.compiled:
            return "compiled"
        return "techniques" if self.technique or self.save_on_cpu or self.checkpointing else "steps"

    @property
    def alone(self) -> bool:
        """Whether it needs the whole GPU: its time is measured, or memory that it shares with other processes.

        The compiler runs on the CPU for most of a compiled case; pretended ranks have no time worth measuring.
        """
        return not self.compiled and not (self.layout and not self.history)

    def step(self) -> TrainingStep:
        """The step itself, for the real loop and for the prediction alike.

        Raises:
            InvalidInputError: a results file names a network, an optimizer, a technique or a layout that this version
                does not have.
        """
        network = _known(NETWORKS, self.network, "network")
        if self.technique:
            _known(TECHNIQUES, self.technique, "technique")
        return TrainingStep(
            model=lambda: compile_in_place(self._formatted(network.build(self.checkpointing)), self.compiled),
            batch=lambda size: self._formatted_batch(network.batch(size)),
            loss=_saved_on_cpu(network.loss) if self.save_on_cpu else network.loss,
            optimizer=_known(OPTIMIZERS, self.optimizer, "optimizer"),
            precision=self.precision,
            accumulate=self.accumulate,
            zero_grad=self.zero_grad,
            clip_grad_norm=self.clip or None,
            recipe=recipe_of(self.technique, lambda: network.build(False)),
            parallel=_known(LAYOUTS, self.layout, "layout") if self.layout else None,
        )

    def same_step(self) -> tuple[tuple[str, Any], ...]:
        """The settings that decide the trace: equal for cases that differ in batch size or in the allocator only."""
        aside = {"batch_size", "fill", "allocator", "history", "profiled", "seconds"}
        return tuple((name, value) for name, value in asdict(self).items() if name not in aside)

    def _formatted(self, model: torch.nn.Module) -> torch.nn.Module:
        formatted: Any = model  # torch's annotations do not know `memory_format` alone
        return formatted.to(memory_format=torch.channels_last) if self.channels_last else model

    def _formatted_batch(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if not self.channels_last:
            return batch
        return {k: t.to(memory_format=torch.channels_last) if t.dim() == 4 else t for k, t in batch.items()}


def _known(table: Mapping[str, T], name: str, field: str) -> T:
    if name not in table:
        raise InvalidInputError(f"case field {field!r} is {name!r}, which is not one of {', '.join(table)}")
    return table[name]


_FLAGS = ("tf32", "channels_last", "checkpointing", "save_on_cpu")


def _saved_on_cpu(loss: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def saved(model: Any, batch: Any) -> Any:
        with torch.autograd.graph.save_on_cpu():
            return loss(model, batch)

    return saved


def allow_tf32(allowed: bool) -> None:
    """Set the flags of this process that a case means: float32 products and convolutions in TF32, or not.

    By the call that sets every backend's products: torch refuses to name a precision that the backends differ in.
    """
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    torch.backends.cudnn.allow_tf32 = allowed


#: foreach is what PyTorch chooses on CUDA by itself.
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": optimizer_of("SGD", lr=1e-4, momentum=0.9),
    "adam": optimizer_of("Adam", lr=1e-4),
    "adamw": optimizer_of("AdamW", lr=1e-4),
    "adamw_fused": optimizer_of("AdamW", lr=1e-4, fused=True),
}

#: In order of importance: where the minutes do not suffice, the last ones are left out, and the results list them.
CASES: tuple[Case, ...] = (
    # One of each network, its history kept.
    Case("gpt2", 8, history=True),
    Case("resnet50", 32, optimizer="sgd", history=True),
    Case("small_cnn", 128, optimizer="adam", history=True),
    Case("bert", 16, history=True),
    Case("llama", 8, precision="bf16-mixed", history=True),
    Case("vit", 32, precision="16-mixed", history=True),
    Case("lstm", 64, optimizer="adam", history=True),
    Case("gru", 64, optimizer="adam", history=True),
    Case("unet", 32, optimizer="adam", history=True),
    Case("fno", 16, optimizer="adam", history=True),
    Case("video", 16, optimizer="sgd", history=True),
    Case("twins", 32, history=True),
    # Precisions.
    Case("resnet50", 64, precision="16-mixed", optimizer="sgd", history=True),
    Case("resnet50", 64, precision="bf16-mixed", optimizer="sgd", channels_last=True, history=True),
    Case("resnet50", 64, optimizer="sgd", tf32=True, profiled=True),
    Case("resnet50", 64, optimizer="sgd", channels_last=True, tf32=True),
    Case("gpt2", 16, precision="bf16-mixed", history=True),
    Case("gpt2", 16, precision="16-mixed"),
    Case("gpt2", 8, tf32=True, profiled=True),
    Case("gpt2", 16, precision="bf16-true", profiled=True),
    Case("bert", 32, precision="bf16-mixed", history=True),
    Case("bert", 32, precision="16-mixed", profiled=True),
    Case("llama", 8, profiled=True),
    Case("llama", 16, precision="16-mixed", profiled=True),
    Case("vit", 64, precision="bf16-mixed", profiled=True),
    Case("vit", 32),
    Case("lstm", 128, precision="bf16-mixed", optimizer="adam"),
    Case("lstm", 128, precision="16-mixed", optimizer="adam", profiled=True),
    Case("gru", 128, precision="bf16-mixed", optimizer="adam"),
    Case("unet", 64, precision="16-mixed", optimizer="adam", profiled=True),
    Case("unet", 64, precision="bf16-mixed", optimizer="adam", channels_last=True),
    Case("fno", 32, precision="bf16-mixed", optimizer="adam"),
    Case("video", 32, precision="16-mixed", optimizer="sgd"),
    Case("twins", 64, precision="bf16-mixed"),
    Case("small_cnn", 256, precision="16-mixed", optimizer="sgd"),
    Case("small_cnn", 256, optimizer="sgd", channels_last=True),
    # Optimizers, and when gradients are freed.
    Case("gpt2", 8, optimizer="adamw_fused"),
    Case("gpt2", 8, optimizer="sgd"),
    Case("gpt2", 8, clip=1.0, history=True),
    Case("gpt2", 8, precision="16-mixed", clip=1.0),
    Case("gpt2", 8, zero_grad="before_forward"),
    Case("gpt2", 8, zero_grad="before_backward"),
    Case("vit", 32, optimizer="adamw_fused", precision="16-mixed"),
    Case("bert", 16, optimizer="adam", zero_grad="before_backward"),
    # Techniques.
    Case("gpt2", 8, accumulate=2, history=True),
    Case("gpt2", 2, accumulate=8, precision="bf16-mixed", history=True),
    Case("gpt2", 4, accumulate=4, precision="bf16-mixed"),
    Case("resnet50", 32, optimizer="sgd", accumulate=2, precision="16-mixed"),
    Case("gpt2", 16, checkpointing=True, precision="bf16-mixed", history=True),
    Case("bert", 32, checkpointing=True),
    Case("llama", 16, checkpointing=True, precision="bf16-mixed"),
    Case("unet", 64, checkpointing=True, optimizer="adam"),
    Case("twins", 64, checkpointing=True),
    Case("vit", 32, save_on_cpu=True, history=True, seconds=8),
    Case("unet", 32, save_on_cpu=True, optimizer="adam", seconds=8),
    # The allocator's settings.
    Case("gpt2", 8, allocator="expandable_segments:True", history=True, seconds=10),
    Case("resnet50", 64, optimizer="sgd", allocator="max_split_size_mb:128", history=True, seconds=10),
    # Techniques of the planner, as it applies them.
    *(
        Case("gpt2", 16, precision="bf16-mixed", technique=technique, history=history)
        for technique, history in {
            "checkpoint": True,
            "checkpoint half": False,
            "keep attention": True,
            "keep products": False,
            "activations on host": True,
            "half of activations on host": False,
            "states on host": False,
            "8-bit states": True,
            "for-loop optimizer": True,
            "optimizer in backward": True,
            "chunked loss": True,
        }.items()
    ),
    Case("gpt2", 8, technique="parameters on host"),
    Case("llama", 16, precision="bf16-mixed", technique="chunked loss"),
    Case("resnet50", 64, precision="bf16-mixed", optimizer="sgd", technique="checkpoint"),
    Case("resnet50", 64, precision="bf16-mixed", optimizer="sgd", technique="keep convolutions"),
    Case("vit", 64, precision="bf16-mixed", technique="activations on host"),
    Case("unet", 32, optimizer="adam", technique="activations on host"),
    Case("vit", 64, precision="bf16-mixed", technique="keep products"),
    # Compiled code.
    Case("gpt2", 16, precision="bf16-mixed", compiled="model", history=True, seconds=40),
    Case("gpt2", 16, precision="bf16-mixed", compiled="blocks", seconds=20),
    Case("vit", 64, precision="bf16-mixed", compiled="model", history=True, seconds=40),
    Case("bert", 32, precision="bf16-mixed", compiled="model", seconds=40),
    Case("llama", 16, precision="bf16-mixed", compiled="model", history=True, seconds=40),
    Case("resnet50", 64, precision="bf16-mixed", optimizer="sgd", compiled="model", seconds=60),
    Case("unet", 64, precision="bf16-mixed", optimizer="adam", compiled="model", history=True, seconds=40),
    Case("gpt2", 8, compiled="model", seconds=40),
    Case("gpt2", 16, precision="bf16-mixed", compiled="model", technique="budget 0.5", seconds=50),
    # One rank of several.
    *(Case("gpt2", 8, layout=layout, history=True) for layout in ("ddp x8", "fsdp1 x8", "fsdp2 x8")),
    *(Case("llama", 16, layout=layout) for layout in ("ddp x8", "zero1 x8")),
    Case("llama", 16, layout="fsdp1 x8", history=True),
    *(
        Case("llama", 16, layout=layout)
        for layout in LAYOUTS
        if layout.endswith("bf16") or layout.startswith("fsdp2 x8")
    ),
    Case("resnet50", 32, optimizer="sgd", layout="ddp x8", history=True),
    Case("vit", 32, precision="bf16-mixed", layout="ddp x8", technique="checkpoint", history=True),
    # Batch sizes. The last three of a network are chosen by the card: near the limit, and over it.
    Case("resnet50", 1, optimizer="sgd"),
    Case("resnet50", 7, optimizer="sgd"),
    Case("resnet50", 128, optimizer="sgd"),
    Case("gpt2", 1),
    Case("gpt2", 24),
    Case("lstm", 1, optimizer="adam"),
    Case("fno", 1, optimizer="adam"),
    Case("gpt2", fill=0.95, seconds=9, history=True),
    Case("gpt2", fill=1.2, seconds=9),
    Case("resnet50", fill=0.95, optimizer="sgd", precision="bf16-mixed", seconds=9),
    Case("resnet50", fill=1.2, optimizer="sgd", precision="bf16-mixed", seconds=9),
    Case("unet", fill=0.9, optimizer="adam", seconds=9),
    Case("unet", fill=1.1, optimizer="adam", seconds=9),
    Case("llama", fill=0.97, precision="bf16-mixed", seconds=9),
    Case("llama", fill=1.05, precision="bf16-mixed", seconds=9),
    Case("lstm", fill=0.9, optimizer="adam", seconds=9),
)


def find_cases(wanted: list[str]) -> list[Case]:
    """The cases whose names contain one of the words; all of them for no word."""
    return [case for case in CASES if is_chosen(case.name, wanted)]
