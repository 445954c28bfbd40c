"""Predict the allocated peaks that Liger-Kernel published for plain PyTorch operators, byte against byte.

Each row is ``torch.cuda.max_memory_allocated()`` of one operator's forward, backward or both, the median of ten runs in
a process that had already run the operator: gradients accumulate, cuBLAS has its workspaces. The number is absolute, so
inputs count, and so does the twin module of the other provider where the benchmark builds both.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from benchmarks.harness.pages import MIB
from benchmarks.harness.records import NotReproducible, Row
from benchmarks.published.liger_operators import OPERATORS, Operator
from benchmarks.published.source import Record, Source, predicted, records_of
from vram_guard import Timeline, TrainingStep

CARDS = ("A100 SXM4 80GB", "RTX 3090", "RTX 4090", "H100 PCIe", "H100 SXM", "B200")

#: Rows that cannot be reproduced, and why. They are listed, not dropped.
_BESIDE = "about 2,084 MiB beside the operator's tensors, alike at every batch size; what they were is not recorded"
LEFT_OUT = {
    "embedding": "12 GiB and more beside the operator's tensors were alive; what they were is not recorded",
    "fused_linear_orpo_loss": _BESIDE,
    "fused_linear_cpo_loss": _BESIDE,
    "fused_linear_simpo_loss": _BESIDE,
}


#: Benchmarks that measured the full pass whatever mode they were asked for (their three modes agree to the byte).
ALWAYS_FULL = ("group_norm",)


class Published(NamedTuple):
    """One published row; ``size`` is the swept value, ``measured`` is in bytes."""

    operator: str
    mode: str
    size: int
    measured: int
    settings: dict[str, Any]
    gpu: str

    @property
    def name(self) -> str:
        """The row's name in the table."""
        return f"{self.operator} {self.mode} {self.size} {self.card}"

    @property
    def card(self) -> str:
        """The card's name in our catalogue."""
        return next(name for name in CARDS if name.split(" SXM")[0] in self.gpu)


def rows() -> list[Published]:
    """All rows, in the file's order."""
    return [_row(record) for record in records_of("liger_operators.csv")]


def _row(record: Record) -> Published:
    settings = json.loads(record["extra_benchmark_config_str"])
    settings["swept"] = record["x_name"]
    measured = round(float(record["y_value_50"]) * MIB)
    kernel, mode = record["kernel_name"], record["kernel_operation_mode"]
    return Published(
        kernel,
        "full" if kernel in ALWAYS_FULL else mode,
        int(float(record["x_value"])),
        measured,
        settings,
        record["gpu_name"],
    )


# --- running one --------------------------------------------------------------------------------------------------


class _NoOptimizer:
    """Nothing is updated and no gradient is ever freed."""

    def __init__(self) -> None:
        self.state: dict[Any, Any] = {}
        self.param_groups: list[dict[str, Any]] = []

    def step(self) -> None:
        pass

    def zero_grad(self) -> None:
        pass


class _Runs:
    """The benchmark's loop body: the first call warms up, the second is the one that is measured."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.output: Any = None
        self.gradient: Any = None
        self.calls = 0

    def __call__(self, operator: Operator, _batch: Any) -> Any:
        self.calls += 1
        if self.calls == 2 and self.mode == "forward":
            self.output = self.gradient = None
            for parameter in operator.parameters():
                parameter.grad = None
        if self.calls == 1 or self.mode != "backward":
            self.output = operator()
        # Something to call backward on that takes no memory and holds no graph.
        handle = next(operator.parameters()).detach()
        handle.backward = lambda: self._backward(operator)  # type: ignore[method-assign]
        return handle

    def _backward(self, operator: Operator) -> None:
        if self.mode == "forward" and self.calls == 2:
            self.output = None
            return
        if self.gradient is None or self.mode != "backward":
            self.gradient = operator.gradient(self.output)
        operator.backward(self.output, self.gradient)
        if self.mode != "backward":
            self.output = self.gradient = None


def predict(row: Published) -> Row:
    """Trace the operator twice in a row; the allocated peak of the second time.

    Raises:
        NotReproducible: something else was alive besides the operator in that benchmark.
    """
    if row.operator in LEFT_OUT:
        raise NotReproducible(LEFT_OUT[row.operator])
    step = TrainingStep(
        model=lambda: OPERATORS[row.operator](row.settings, row.size),
        batch=lambda _size: (),
        loss=_Runs(row.mode),
        optimizer=lambda _parameters: _NoOptimizer(),  # type: ignore[arg-type,return-value]
        zero_grad="before_forward",
    )
    published = {"source": LIGER.title, "name": row.name, "measured": row.measured}
    return predicted(step, 1, row.card, _second_peak, **published)  # there is no batch size to vary


def _second_peak(timeline: Timeline) -> dict[str, Any]:
    curve = timeline.replay(1, curve=True).allocated_curve or (0,)
    second = next(phase.start for phase in timeline.phases if phase.step == 2)
    return {"predicted": max(curve[max(0, second - 1) :])}


LIGER = Source("Liger-Kernel's operators", rows, lambda row: row.name, lambda row: [predict(row)])

SOURCES = (LIGER,)
