"""Predict the allocated peaks that Liger-Kernel published for plain PyTorch operators, byte against byte.

    python benchmarks/published/liger.py [--only WORD ...] [--json FILE]

Each row is ``torch.cuda.max_memory_allocated()`` of one operator's forward, backward or both, the median of ten runs in
a process that had already run the operator: gradients accumulate, cuBLAS has its workspaces. The number is absolute, so
inputs count, and so does the twin module of the other provider where the benchmark builds both.
"""

from __future__ import annotations

import csv
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own idiom
from records import NotReproducible
from records import Row as Predicted
from source import Source, main
from torch import nn

from vram_guard import TrainingStep
from vram_guard.simulate.tracing.run import run_step

DATA = Path(__file__).parent / "data"
CAPABILITIES = {"A100": (8, 0), "RTX 3090": (8, 6), "RTX 4090": (8, 9), "B200": (10, 0)}

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


class Row(NamedTuple):
    """One published row; ``size`` is the swept value, ``measured`` is in bytes."""

    operator: str
    mode: str
    size: int
    measured: int
    settings: dict[str, Any]
    gpu: str

    @property
    def name(self) -> str:
        """How the row is called in the table."""
        return f"{self.operator} {self.mode} {self.size} {self.gpu.split()[-1]}"


def rows() -> list[Row]:
    """All rows, in the file's order."""
    with (DATA / "liger_operators.csv").open(encoding="utf-8", newline="") as file:
        return [_row(record) for record in csv.DictReader(file)]


def _row(record: dict[str, str]) -> Row:
    settings = json.loads(record["extra_benchmark_config_str"])
    settings["swept"] = record["x_name"]
    measured = round(float(record["y_value_50"]) * 2**20)
    kernel, mode = record["kernel_name"], record["kernel_operation_mode"]
    return Row(
        kernel,
        "full" if kernel in ALWAYS_FULL else mode,
        int(float(record["x_value"])),
        measured,
        settings,
        record["gpu_name"],
    )


# --- the operators, described anew ---------------------------------------------------------------------------------


class Operator(nn.Module):
    """One operator with its inputs; a parameter is an input that wants a gradient, a buffer is one that does not."""

    keeps_graph = True
    """Whether the benchmark asks backward to retain the graph."""

    def wants(self, *shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
        """An input that wants a gradient."""
        return nn.Parameter(torch.empty(*shape, dtype=dtype))

    def hold(self, name: str, tensor: torch.Tensor) -> None:
        """An input that wants none."""
        self.register_buffer(name, tensor)

    def gradient(self, output: torch.Tensor) -> torch.Tensor | None:
        """What backward starts from; None: the output is a scalar."""
        return torch.randn_like(output)

    def backward(self, output: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """One backward pass."""
        output.backward(gradient, retain_graph=self.keeps_graph)


class WithGradient(Operator):
    """An operator whose incoming gradient is made once, beside the input ``x``."""

    def __init__(self, *shape: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.x = self.wants(*shape, dtype=dtype)
        self.hold("dy", torch.empty(*shape, dtype=dtype))

    def gradient(self, output: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        return self.dy


class Loss(Operator):
    """An operator with a scalar result; its graph dies with the backward pass."""

    keeps_graph = False

    def gradient(self, output: torch.Tensor) -> None:  # noqa: ARG002
        return None


class CrossEntropy(Loss):
    """Cross-entropy of float32 logits."""

    def __init__(self, tokens: int, vocabulary: int) -> None:
        super().__init__()
        self.x = self.wants(tokens, vocabulary)
        self.hold("target", torch.zeros(tokens, dtype=torch.long))

    def forward(self) -> torch.Tensor:
        return F.cross_entropy(self.x, self.target)


class GatedMLP(Operator):
    """Llama's feed-forward block."""

    def __init__(self, shape: tuple[int, int, int], inner: int, activation: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        width = shape[-1]
        self.x = self.wants(*shape, dtype=torch.bfloat16)
        self.gate, self.up = (nn.Linear(width, inner, bias=False, dtype=torch.bfloat16) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False, dtype=torch.bfloat16)
        self.activation = activation

    def forward(self) -> torch.Tensor:
        made: torch.Tensor = self.down(self.activation(self.gate(self.x)) * self.up(self.x))
        return made


class LayerNorm(WithGradient):
    """Layer norm in float32."""

    def __init__(self, rows_: int, width: int) -> None:
        super().__init__(rows_, width)
        self.norm, self.twin = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width)

    def forward(self) -> torch.Tensor:
        made: torch.Tensor = self.norm(self.x)
        return made


class RMSNorm(WithGradient):
    """Llama's RMS norm: computed in float32, weight in float32, input in bfloat16."""

    def __init__(self, rows_: int, width: int) -> None:
        super().__init__(rows_, width, dtype=torch.bfloat16)
        self.weight, self.twin = self.wants(width), self.wants(width)

    def forward(self) -> torch.Tensor:
        x = self.x.float()
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)).bfloat16()

    def gradient(self, output: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        return self.dy


class Rope(Operator):
    """Rotary embedding of queries and keys; gradients are asked for by name, and dropped."""

    def __init__(self, length: int, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        head = width // heads
        for name, count in (("q", heads), ("k", kv_heads)):
            self.register_parameter(name, self.wants(1, length, count, head, dtype=torch.bfloat16))
            self.hold(f"d{name}", torch.empty(1, length, count, head, dtype=torch.bfloat16))
        self.hold("cos", torch.empty(1, length, head, dtype=torch.bfloat16))
        self.hold("sin", torch.empty(1, length, head, dtype=torch.bfloat16))
        self.hold("positions", torch.zeros(1, length, dtype=torch.long))
        self.hold("frequencies", torch.empty(head // 2))
        self.tables = False

    def forward(self) -> Any:
        if not self.tables:  # cos and sin came from a matrix product: cuBLAS took its workspace
            torch.matmul(self.frequencies.view(-1, 1), self.positions.float())
            self.tables = True
        cos, sin = self.cos.unsqueeze(1), self.sin.unsqueeze(1)
        inputs = tuple(t.transpose(1, 2) for t in (self.q, self.k))
        return inputs, tuple(t * cos + _rotate_half(t) * sin for t in inputs)

    def gradient(self, output: Any) -> Any:  # noqa: ARG002
        return self.dq.transpose(1, 2), self.dk.transpose(1, 2)

    def backward(self, output: Any, gradient: Any) -> None:
        inputs, rotated = output
        torch.autograd.grad(rotated, inputs, gradient, retain_graph=True)


def _rotate_half(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    return torch.cat((-second, first), dim=-1)


class LinearLoss(Loss):
    """The last linear layer of a language model and a loss on its logits, with the other provider's twin beside it."""

    def __init__(self, shape: tuple[int, ...], vocabulary: int) -> None:
        super().__init__()
        self.x = self.wants(*shape, dtype=torch.bfloat16)
        self.hold("target", torch.zeros(shape[:-1], dtype=torch.long))
        self.linear, self.twin = (nn.Linear(shape[-1], vocabulary, bias=False, dtype=torch.bfloat16) for _ in "ab")


class LinearCrossEntropy(LinearLoss):
    """Cross-entropy of bfloat16 logits."""

    def forward(self) -> torch.Tensor:
        return F.cross_entropy(self.linear(self.x), self.target)


class OddsRatio(LinearLoss):
    """ORPO in half precision, as its first benchmark had it."""

    def forward(self) -> torch.Tensor:
        logits = self.linear(self.x)
        half = logits.shape[0] // 2
        nll = F.cross_entropy(logits[:half].view(-1, logits.shape[-1]), self.target[:half].view(-1))
        chosen, rejected = F.log_softmax(logits, dim=-1).mean(dim=-1).split(half)
        odds = (chosen - rejected) - (torch.log1p(-torch.exp(chosen)) - torch.log1p(-torch.exp(rejected)))
        return nll - (0.1 * F.logsigmoid(odds)).mean()


class Preference(LinearLoss):
    """CPO, SimPO and the later ORPO: logits in float32, log-probabilities of the targets, pairs compared."""

    def forward(self) -> torch.Tensor:
        logits = (self.x @ self.linear.weight.t()).float()
        half = logits.shape[0] // 2
        nll = F.cross_entropy(logits[:half].view(-1, logits.shape[-1]), self.target[:half].view(-1))
        mask = self.target != -100
        target = torch.where(self.target == -100, 0, self.target)
        tokens = torch.gather(logits.log_softmax(-1), dim=2, index=target.unsqueeze(2)).squeeze(2)
        chosen, rejected = ((tokens * mask).sum(-1) / mask.sum(-1)).split(half)
        loss = nll + F.logsigmoid(0.1 * (chosen - rejected)).mean()
        # Reported beside the loss, and alive until the forward function returns.
        self.reported = (logits[:half].detach().mean(), logits[half:].detach().mean())
        return loss


class Cosine(Loss):
    """Distillation by the cosine of student and teacher logits, and cross-entropy."""

    def __init__(self, tokens: int, width: int, vocabulary: int) -> None:
        super().__init__()
        half = torch.bfloat16
        self.x = self.wants(tokens, width // 2, dtype=half)
        self.twin_x = self.wants(tokens, width // 2, dtype=half)
        self.hold("made_from", torch.empty(tokens, width // 2, dtype=half))
        self.hold("teacher_x", torch.empty(tokens, width, dtype=half))
        self.hold("target", torch.zeros(tokens, dtype=torch.long))
        self.student, self.twin = (nn.Linear(width // 2, vocabulary, bias=False, dtype=half) for _ in "ab")
        self.teacher, self.teacher_twin = (nn.Linear(width, vocabulary, bias=False, dtype=half) for _ in "ab")

    def forward(self) -> torch.Tensor:
        student_out = self.x @ self.student.weight.t()
        with torch.no_grad():
            teacher_out = self.teacher_x @ self.teacher.weight.t()
        student, teacher = student_out.float(), teacher_out.float()
        hard = F.cross_entropy(student, self.target)
        del student_out, teacher_out
        student /= 1.0
        teacher /= 1.0
        one, other = F.normalize(student, dim=-1), F.normalize(teacher, dim=-1)
        return 0.5 * hard + 0.5 * (1 - F.cosine_similarity(one, other, dim=-1)).mean()


class PolicyGradient(Loss):
    """GRPO with a reference model."""

    def __init__(self, shape: tuple[int, int, int], vocabulary: int, level: str) -> None:
        super().__init__()
        half, width = torch.bfloat16, shape[-1]
        self.level = level
        self.x = self.wants(*shape, dtype=half)
        self.hold("reference_x", torch.empty(*shape, dtype=half))
        self.hold("chosen", torch.zeros(shape[:2], dtype=torch.long))
        self.hold("mask", torch.ones(shape[:2]))
        self.hold("advantages", torch.empty(shape[0], dtype=half))
        self.linears = nn.ModuleList(nn.Linear(width, vocabulary, bias=False, dtype=half) for _ in range(4))

    def forward(self) -> torch.Tensor:
        logits = self.x @ self.linears[0].weight.t()
        log_probs = F.log_softmax(logits.float(), dim=-1)
        own = log_probs.gather(-1, self.chosen.unsqueeze(-1)).squeeze(-1)
        with torch.no_grad():
            reference_logits = self.reference_x @ self.linears[1].weight.t()
            reference_log_probs = F.log_softmax(reference_logits.float(), dim=-1)
            reference = reference_log_probs.gather(-1, self.chosen.unsqueeze(-1)).squeeze(-1)
        difference = own - own.detach()
        if self.level == "sequence":
            difference = ((difference * self.mask).sum(-1) / self.mask.sum(-1).clamp(min=1.0)).unsqueeze(-1)
        ratio = torch.exp(difference)
        advantages = self.advantages.unsqueeze(1)
        each = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        each = each + 0.1 * (torch.exp(reference - own) - (reference - own) - 1.0)
        return (each * self.mask).sum() / self.mask.sum().clamp(min=1.0)


class Sparsemax(WithGradient):
    """Sparsemax by sorting."""

    def forward(self) -> torch.Tensor:
        return _sparsemax(self.x)


def _sparsemax(x: torch.Tensor) -> torch.Tensor:
    ordered, _order = torch.sort(x, dim=-1, descending=True)
    sums = torch.cumsum(ordered, dim=-1)
    count = torch.arange(1, x.shape[-1] + 1, device=x.device, dtype=x.dtype).view(1, -1)
    bound = 1 + count * ordered
    support = bound > sums
    k = support.sum(dim=-1, keepdim=True).clamp(min=1)
    total = (ordered * support).sum(dim=-1, keepdim=True)
    return torch.clamp(x - (total - 1) / k, min=0)


class MultiTokenAttention(WithGradient):
    """A masked softmax over the scores, mixed by a convolution."""

    def __init__(self, batch: int, channels: int, length: int) -> None:
        super().__init__(batch, channels, length, length, dtype=torch.bfloat16)
        self.conv, self.twin = (nn.Conv2d(channels, channels, 3, padding=1, dtype=torch.bfloat16) for _ in "ab")

    def forward(self) -> torch.Tensor:
        mask = torch.tril(torch.ones(self.x.shape[-1], self.x.shape[-1], dtype=torch.bool, device=self.x.device))
        mask = mask.view(1, 1, *mask.shape)
        low = torch.tensor(-1e9, device=self.x.device, dtype=self.x.dtype)
        zero = torch.tensor(0.0, device=self.x.device, dtype=self.x.dtype)
        hidden = self.x.masked_fill(~mask, low)
        made: torch.Tensor = self.conv(torch.softmax(hidden, dim=-1))
        return made.masked_fill(~mask, zero)


class SparseMultiTokenAttention(WithGradient):
    """The same with sparsemax."""

    def __init__(self, batch: int, channels: int, length: int) -> None:
        super().__init__(batch, channels, length, length)
        self.conv, self.twin = (nn.Conv2d(channels, channels, 3, padding=1) for _ in "ab")

    def forward(self) -> torch.Tensor:
        length = self.x.shape[-1]
        mask = torch.tril(torch.ones(length, length, dtype=torch.bool, device=self.x.device)).view(1, 1, length, length)
        low, zero = (torch.tensor(value, device=self.x.device) for value in (-1e9, 0.0))
        z = self.x.masked_fill(~mask, low)
        ordered, _order = torch.sort(z, dim=-1, descending=True)
        sums = torch.cumsum(ordered, dim=-1)
        count = torch.arange(1, length + 1, device=z.device, dtype=z.dtype).view(1, 1, 1, length)
        positive = ordered > -1e8
        condition = (1 + count * ordered > sums) & positive
        k = torch.sum(condition, dim=-1, keepdim=True)
        safe = torch.max(k, torch.ones_like(k))
        tau = (torch.gather(sums, dim=-1, index=safe.long() - 1) - 1) / safe.to(z.dtype)
        tau = torch.where(k == 0, torch.full_like(tau, float("inf")), tau)
        probabilities = torch.clamp(z - tau, min=0)
        made: torch.Tensor = self.conv(probabilities)
        return made.masked_fill(~mask, zero)


class Softmax(Operator):
    """Over one dimension: the benchmark takes the swept value for the whole shape."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.x = self.wants(width, dtype=dtype)

    def forward(self) -> torch.Tensor:
        return torch.softmax(self.x, dim=-1)

    def gradient(self, output: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(output)


class NeighborhoodAttention(WithGradient):
    """Attention with a mask of neighbours, everything written out."""

    def __init__(self, batch: int, length: int, width: int, heads: int) -> None:
        super().__init__(batch, length, width)
        self.heads = heads
        self.linears, self.twins = (nn.ModuleList(nn.Linear(width, width) for _ in range(4)) for _ in "ab")

    def forward(self) -> torch.Tensor:
        batch, length, width = self.x.shape
        head = width // self.heads
        q, k, v = (linear(self.x) for linear in self.linears[:3])
        q, k, v = (t.view(batch, length, self.heads, head).transpose(1, 2) for t in (q, k, v))
        scores = torch.matmul(q, k.transpose(-2, -1)) * (1 / math.sqrt(head))
        mask = torch.zeros(length, length, device=self.x.device, dtype=torch.bool)
        scores = scores.masked_fill(~mask, float("-inf"))
        weights = torch.softmax(scores, dim=-1)
        mixed = torch.matmul(weights, v).transpose(1, 2).contiguous().view(batch, length, width)
        made: torch.Tensor = self.linears[3](mixed)
        return made


class GroupNorm(Operator):
    """Group norm, four channels a group."""

    def __init__(self, batch: int, channels: int, length: int) -> None:
        super().__init__()
        self.x = self.wants(batch, channels, length)
        self.norm, self.twin = (nn.GroupNorm(channels // 4, channels) for _ in "ab")

    def forward(self) -> torch.Tensor:
        made: torch.Tensor = self.norm(self.x)
        return made


class JensenShannon(Loss):
    """Its inputs are log-softmaxes of random tensors: the first one's graph lives on, and backward runs through it."""

    keeps_graph = True

    def __init__(self, tokens: int, vocabulary: int) -> None:
        super().__init__()
        self.x = self.wants(tokens, vocabulary)
        self.hold("log_p", torch.empty(tokens, vocabulary))
        self.log_q: torch.Tensor | None = None

    def forward(self) -> torch.Tensor:
        if self.log_q is None:
            self.log_q = self.x.log_softmax(dim=-1)
        p, q = self.log_p, self.log_q
        middle = torch.lerp(torch.exp(q), torch.exp(p), 0.5)
        loss = 0.5 * F.kl_div(torch.log(middle), p, reduction="none", log_target=True).sum(dim=-1)
        loss = loss + 0.5 * F.kl_div(torch.log(middle), q, reduction="none", log_target=True).sum(dim=-1)
        return (loss / q.shape[0]).sum()


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def _build(row: Row) -> Operator:
    """The operator of a row."""
    s, n = row.settings, row.size
    kind = row.operator
    if kind == "cross_entropy":
        return CrossEntropy(s["B"] * s["T"], n)
    if kind in ("geglu", "swiglu", "tiled_geglu", "tiled_swiglu"):
        shape = (s.get("bsz", s.get("B")), n, s["hidden_size"])
        return GatedMLP(shape, s["intermediate_size"], F.silu if s["hidden_act"] == "silu" else _gelu_tanh)
    if kind == "layer_norm":
        return LayerNorm(s["M"], n)
    if kind == "rms_norm":
        return RMSNorm(s["M"], n)
    if kind == "rope":
        return Rope(s.get("seq_len", n), s.get("hidden_size", n), s["num_q_heads"], s["num_kv_heads"])
    if kind == "fused_linear_cross_entropy":
        return LinearCrossEntropy((n, s["H"]), s["V"])
    if kind == "fused_linear_orpo_loss" and s["T"] == 4096:
        return OddsRatio((n, s["T"], s["H"]), s["V"])
    if kind in ("fused_linear_orpo_loss", "fused_linear_cpo_loss", "fused_linear_simpo_loss"):
        return Preference((n, s["T"], s["H"]), s["V"])
    if kind.startswith("fused_linear_grpo_loss"):
        return PolicyGradient((n, s["T"], s["H"]), s["V"], s["importance_sampling_level"])
    if kind == "distill_cosine_loss":
        return Cosine(n, s["H"], s["V"])
    if kind == "sparsemax":
        return Sparsemax(s["B"] * s["T"], n)
    if kind == "multi_token_attention":
        return MultiTokenAttention(s["B"], s["C_in"], n)
    if kind == "sparse_multi_token_attention":
        return SparseMultiTokenAttention(s["B"], s["C_in"], n)
    if kind == "softmax":
        return Softmax(n, getattr(torch, s["dtype"].removeprefix("torch.")))
    if kind == "fused_neighborhood_attention":
        return NeighborhoodAttention(s["batch_size"], n, s["hidden_size"], s["num_heads"])
    if kind == "group_norm":
        return GroupNorm(s["M"], n, s["H"])
    if kind == "jsd":
        return JensenShannon(n, s["vocab_size"])
    raise KeyError(kind)


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

    def __call__(self, operator: Operator, _batch: Any) -> torch.Tensor:
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


def predict(row: Row) -> Predicted:
    """Trace the operator twice in a row; the allocated peak of the second time.

    Raises:
        NotReproducible: something else was alive beside the operator in that benchmark.
    """
    if row.operator in LEFT_OUT:
        raise NotReproducible(LEFT_OUT[row.operator])
    step = TrainingStep(
        model=lambda: _build(row),
        batch=lambda _size: (),
        loss=_Runs(row.mode),
        optimizer=lambda _parameters: _NoOptimizer(),  # type: ignore[arg-type,return-value]
        zero_grad="before_forward",
    )
    capability = next(value for name, value in CAPABILITIES.items() if name in row.gpu)
    start = time.perf_counter()
    timeline = run_step(step, 1, capability)  # one trace: there is no batch size to vary
    curve = timeline.replay(1, curve=True).allocated_curve or (0,)
    second = next(phase.start for phase in timeline.phases if phase.step == 2)
    peak = max(curve[max(0, second - 1) :])
    seconds = time.perf_counter() - start
    return Predicted(OPERATORS.title, row.name, row.measured, peak, timeline.tier, seconds)


OPERATORS = Source("Liger-Kernel's operators", rows, lambda row: row.name, lambda row: [predict(row)])


if __name__ == "__main__":
    raise SystemExit(main(operators=OPERATORS))
