"""The cases: which training steps are measured on the GPU and predicted without it. Defined here once for both."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks.gpu.techniques import LAYOUTS, TECHNIQUES, Compiled, compile_in_place, recipe_of
from benchmarks.harness.command import is_chosen
from benchmarks.harness.networks import NETWORKS
from benchmarks.harness.workloads import optimizer_of
from vram_guard import TrainingStep
from vram_guard.codec import from_plain
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
        profiled: the device's seconds of one update were kept, kernel by kernel, by the suite at commit b02c8b3c.
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
#: First one of each network, with its history; precisions; optimizers; techniques, as their libraries and as the
#: planner apply them; the allocator's settings; compiled code; one rank of several; batch sizes, the last of them
#: chosen by the card: near the limit, and over it.
CASES: tuple[Case, ...] = tuple(
    from_plain(Case, each, "cases.json")
    for each in json.loads(Path(__file__).with_name("cases.json").read_text(encoding="utf-8"))
)


def find_cases(wanted: list[str]) -> list[Case]:
    """The cases whose names contain one of the words; all of them for no word."""
    return [case for case in CASES if is_chosen(case.name, wanted)]
