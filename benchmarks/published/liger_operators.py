"""The operators of Liger-Kernel's benchmarks, described anew: with their inputs, gradients and twins.

A twin is the module of the other provider, which lies on the GPU where the benchmark builds both.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own idiom

Settings = dict[str, Any]


class Operator(nn.Module):
    """One operator with its inputs; a parameter is an input that wants a gradient, a buffer is one that does not.

    Args:
        run: the operator -> its output.
        starts: (operator, output) -> the gradient that backward starts from; None: the output is a scalar.
        keeps_graph: the benchmark asks backward to retain the graph.
        backward: one backward pass from (operator, output, gradient), where it is not ``output.backward``.
        parts: parameters, buffers and modules, by their names.
    """

    def __init__(
        self,
        run: Callable[[Any], Any],
        starts: Callable[[Any, Any], Any] = lambda _, output: torch.randn_like(output),
        *,
        keeps_graph: bool = True,
        backward: Callable[[Any, Any, Any], None] | None = None,
        **parts: Any,
    ) -> None:
        super().__init__()
        self.run, self.starts, self.keeps_graph, self.own_backward = run, starts, keeps_graph, backward
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self) -> Any:
        return self.run(self)

    def gradient(self, output: Any) -> Any:
        """The gradient that backward starts from."""
        return self.starts(self, output)

    def backward(self, output: Any, gradient: Any) -> None:
        """One backward pass."""
        if self.own_backward is not None:
            self.own_backward(self, output, gradient)
        else:
            output.backward(gradient, retain_graph=self.keeps_graph)


def _wanted(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=dtype))


_half = partial(_wanted, dtype=torch.bfloat16)
_half_linear = partial(nn.Linear, bias=False, dtype=torch.bfloat16)


def _given(operator: Any, _output: Any) -> Any:
    """A gradient that was made once."""
    return operator.dy


def _scalar(_operator: Any, _output: Any) -> None:
    return None


def _with_gradient(
    run: Callable[[Any], Any], *shape: int, dtype: torch.dtype = torch.float32, **parts: Any
) -> Operator:
    """An operator on ``x`` whose incoming gradient lies beside it."""
    return Operator(run, _given, x=_wanted(*shape, dtype=dtype), dy=torch.empty(*shape, dtype=dtype), **parts)


#: An operator with a scalar result; its graph dies with the backward pass.
_loss = partial(Operator, starts=_scalar, keeps_graph=False)


# --- layers -----------------------------------------------------------------------------------------------------------


def _gated_mlp(s: Settings, n: int) -> Operator:
    """Llama's feed-forward block."""
    activation = F.silu if s["hidden_act"] == "silu" else partial(F.gelu, approximate="tanh")
    width, inner = s["hidden_size"], s["intermediate_size"]
    return Operator(
        lambda o: o.down(activation(o.gate(o.x)) * o.up(o.x)),
        x=_half(s.get("bsz", s.get("B")), n, width),
        gate=_half_linear(width, inner),
        up=_half_linear(width, inner),
        down=_half_linear(inner, width),
    )


def _layer_norm(s: Settings, n: int) -> Operator:
    return _with_gradient(lambda o: o.norm(o.x), s["M"], n, norm=nn.LayerNorm(n, eps=1e-6), twin=nn.LayerNorm(n))


def _rms_norm(s: Settings, n: int) -> Operator:
    """Llama's RMS norm: computed in float32, weight in float32, input in bfloat16."""

    def run(o: Any) -> Tensor:
        x = o.x.float()
        return o.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)).bfloat16()  # type: ignore[no-any-return]

    return _with_gradient(run, s["M"], n, dtype=torch.bfloat16, weight=_wanted(n), twin=_wanted(n))


def _summed(_operator: Any, output: Any, _gradient: Any) -> None:
    output.sum().backward()


def _megatron_rms_norm(s: Settings, n: int) -> Operator:
    """PyTorch's own RMS norm, all in bfloat16, summed up."""
    norm = nn.RMSNorm(n, eps=1e-6, dtype=torch.bfloat16)
    return Operator(lambda o: o.norm(o.x), _scalar, backward=_summed, x=_half(s["S"], s["B"], n), norm=norm)


def _megatron_swiglu(s: Settings, n: int) -> Operator:
    """``silu`` of one half times the other half, all in bfloat16, summed up; each run frees its gradient first."""

    def run(o: Any) -> Tensor:
        o.x.grad = None
        gate, value = torch.chunk(o.x, 2, -1)
        return F.silu(gate) * value

    return Operator(run, _scalar, backward=_summed, x=_half(s["S"], s["B"], 2 * n))


def _add_rms_norm(s: Settings, n: int) -> Operator:
    """A residual added, then an RMS norm of plain operators; both results get a gradient. All in float32."""
    rows = s["M"]

    def run(o: Any) -> tuple[Tensor, Tensor]:
        added = o.x + o.residual
        return o.weight * (added * torch.rsqrt(added.pow(2).mean(-1, keepdim=True) + 1e-6)), added

    return Operator(
        run,
        _scalar,
        backward=lambda o, output, _: torch.autograd.backward(output, (o.dy, o.ds)),
        **{name: _wanted(rows, n) for name in ("x", "residual")},
        **{name: _wanted(n) for name in ("weight", "fused", "liger", "liger_norm")},
        **{name: torch.empty(rows, n) for name in ("dy", "ds")},
    )


def _rope(s: Settings, n: int) -> Operator:
    """Rotary embedding of queries and keys; gradients are asked for by name, and dropped."""
    length, width = s.get("seq_len", n), s.get("hidden_size", n)
    head = width // s["num_q_heads"]
    sizes = {"q": (1, length, s["num_q_heads"], head), "k": (1, length, s["num_kv_heads"], head)}
    half = torch.bfloat16

    def turned(x: Tensor) -> Tensor:
        first, second = x[..., : head // 2], x[..., head // 2 :]
        return torch.cat((-second, first), dim=-1)

    def run(o: Any) -> Any:
        if not hasattr(o, "tables"):  # cos and sin came from a matrix product: cuBLAS took its workspace
            torch.matmul(o.frequencies.view(-1, 1), o.positions.float())
            o.tables = True
        cos, sin = o.cos.unsqueeze(1), o.sin.unsqueeze(1)
        inputs = tuple(t.transpose(1, 2) for t in (o.q, o.k))
        return inputs, tuple(t * cos + turned(t) * sin for t in inputs)

    def backward(_operator: Any, output: Any, gradient: Any) -> None:
        inputs, rotated = output
        torch.autograd.grad(rotated, inputs, gradient, retain_graph=True)

    return Operator(
        run,
        lambda o, _output: (o.dq.transpose(1, 2), o.dk.transpose(1, 2)),
        backward=backward,
        **{name: _half(*shape) for name, shape in sizes.items()},
        **{f"d{name}": torch.empty(*shape, dtype=half) for name, shape in sizes.items()},
        **{name: torch.empty(1, length, head, dtype=half) for name in ("cos", "sin")},
        positions=torch.zeros(1, length, dtype=torch.long),
        frequencies=torch.empty(head // 2),
    )


def _sparsemax(s: Settings, n: int) -> Operator:
    """Sparsemax by sorting."""

    def run(o: Any) -> Tensor:
        x = o.x
        ordered, _order = torch.sort(x, dim=-1, descending=True)
        sums = torch.cumsum(ordered, dim=-1)
        count = torch.arange(1, x.shape[-1] + 1, device=x.device, dtype=x.dtype).view(1, -1)
        bound = 1 + count * ordered
        support = bound > sums
        k = support.sum(dim=-1, keepdim=True).clamp(min=1)
        total = (ordered * support).sum(dim=-1, keepdim=True)
        return torch.clamp(x - (total - 1) / k, min=0)

    return _with_gradient(run, s["B"] * s["T"], n)


def _multi_token_attention(s: Settings, n: int) -> Operator:
    """A masked softmax over the scores, mixed by a convolution."""

    def run(o: Any) -> Any:
        mask = torch.tril(torch.ones(n, n, dtype=torch.bool, device=o.x.device)).view(1, 1, n, n)
        low = torch.tensor(-1e9, device=o.x.device, dtype=o.x.dtype)
        zero = torch.tensor(0.0, device=o.x.device, dtype=o.x.dtype)
        hidden = o.x.masked_fill(~mask, low)
        return o.conv(torch.softmax(hidden, dim=-1)).masked_fill(~mask, zero)

    half, channels = torch.bfloat16, s["C_in"]
    conv = partial(nn.Conv2d, channels, channels, 3, padding=1, dtype=half)
    return _with_gradient(run, s["B"], channels, n, n, dtype=half, conv=conv(), twin=conv())


def _sparse_multi_token_attention(s: Settings, n: int) -> Operator:
    """The same with sparsemax, in float32."""

    def run(o: Any) -> Any:
        mask = torch.tril(torch.ones(n, n, dtype=torch.bool, device=o.x.device)).view(1, 1, n, n)
        low, zero = (torch.tensor(value, device=o.x.device) for value in (-1e9, 0.0))
        z = o.x.masked_fill(~mask, low)
        ordered, _order = torch.sort(z, dim=-1, descending=True)
        sums = torch.cumsum(ordered, dim=-1)
        count = torch.arange(1, n + 1, device=z.device, dtype=z.dtype).view(1, 1, 1, n)
        positive = ordered > -1e8
        condition = (1 + count * ordered > sums) & positive
        k = torch.sum(condition, dim=-1, keepdim=True)
        safe = torch.max(k, torch.ones_like(k))
        tau = (torch.gather(sums, dim=-1, index=safe.long() - 1) - 1) / safe.to(z.dtype)
        tau = torch.where(k == 0, torch.full_like(tau, float("inf")), tau)
        probabilities = torch.clamp(z - tau, min=0)
        return o.conv(probabilities).masked_fill(~mask, zero)

    channels = s["C_in"]
    conv = partial(nn.Conv2d, channels, channels, 3, padding=1)
    return _with_gradient(run, s["B"], channels, n, n, conv=conv(), twin=conv())


def _softmax(s: Settings, n: int) -> Operator:
    """Over one dimension: the benchmark takes the swept value for the whole shape."""
    x = _wanted(n, dtype=getattr(torch, s["dtype"].removeprefix("torch.")))
    return Operator(lambda o: torch.softmax(o.x, dim=-1), lambda _, output: torch.ones_like(output), x=x)


def _neighborhood(s: Settings, n: int) -> Operator:
    """Attention with a mask of neighbours, everything written out."""
    batch, width, heads = s["batch_size"], s["hidden_size"], s["num_heads"]
    head = width // heads

    def run(o: Any) -> Any:
        q, k, v = (linear(o.x) for linear in o.linears[:3])
        q, k, v = (t.view(batch, n, heads, head).transpose(1, 2) for t in (q, k, v))
        scores = torch.matmul(q, k.transpose(-2, -1)) * (1 / math.sqrt(head))
        mask = torch.zeros(n, n, device=o.x.device, dtype=torch.bool)
        scores = scores.masked_fill(~mask, float("-inf"))
        weights = torch.softmax(scores, dim=-1)
        mixed = torch.matmul(weights, v).transpose(1, 2).contiguous().view(batch, n, width)
        return o.linears[3](mixed)

    linears, twins = (nn.ModuleList(nn.Linear(width, width) for _ in range(4)) for _ in "ab")
    return _with_gradient(run, batch, n, width, linears=linears, twins=twins)


def _group_norm(s: Settings, n: int) -> Operator:
    """Four channels a group."""
    norm, twin = (nn.GroupNorm(n // 4, n) for _ in "ab")
    return Operator(lambda o: o.norm(o.x), x=_wanted(s["M"], n, s["H"]), norm=norm, twin=twin)


# --- losses -----------------------------------------------------------------------------------------------------------


def _cross_entropy(s: Settings, n: int) -> Operator:
    """Of float32 logits."""
    tokens = s["B"] * s["T"]
    target = torch.zeros(tokens, dtype=torch.long)
    return _loss(lambda o: F.cross_entropy(o.x, o.target), x=_wanted(tokens, n), target=target)


def _linear_cross_entropy(s: Settings, n: int) -> Operator:
    """The last linear layer of a language model and cross-entropy of its logits, in bfloat16, with a twin beside it."""
    linear, twin = (_half_linear(s["H"], s["V"]) for _ in "ab")
    target = torch.zeros(n, dtype=torch.long)
    run = lambda o: F.cross_entropy(o.linear(o.x), o.target)  # noqa: E731
    return _loss(run, x=_half(n, s["H"]), target=target, linear=linear, twin=twin)


def _cosine(s: Settings, n: int) -> Operator:
    """Distillation by the cosine of student and teacher logits, and cross-entropy."""
    width, vocabulary, half = s["H"], s["V"], torch.bfloat16

    def run(o: Any) -> Tensor:
        student_out = o.x @ o.student.weight.t()
        with torch.no_grad():
            teacher_out = o.teacher_x @ o.teacher.weight.t()
        student, teacher = student_out.float(), teacher_out.float()
        hard = F.cross_entropy(student, o.target)
        del student_out, teacher_out
        student /= 1.0
        teacher /= 1.0
        one, other = F.normalize(student, dim=-1), F.normalize(teacher, dim=-1)
        return 0.5 * hard + 0.5 * (1 - F.cosine_similarity(one, other, dim=-1)).mean()

    return _loss(
        run,
        **{name: _half(n, width // 2) for name in ("x", "twin_x")},
        made_from=torch.empty(n, width // 2, dtype=half),
        teacher_x=torch.empty(n, width, dtype=half),
        target=torch.zeros(n, dtype=torch.long),
        **{name: _half_linear(width // 2, vocabulary) for name in ("student", "twin")},
        **{name: _half_linear(width, vocabulary) for name in ("teacher", "teacher_twin")},
    )


def _policy_gradient(s: Settings, n: int) -> Operator:
    """GRPO with a reference model."""
    shape, half = (n, s["T"], s["H"]), torch.bfloat16

    def run(o: Any) -> Tensor:
        logits = o.x @ o.linears[0].weight.t()
        log_probs = F.log_softmax(logits.float(), dim=-1)
        own = log_probs.gather(-1, o.chosen.unsqueeze(-1)).squeeze(-1)
        with torch.no_grad():
            reference_logits = o.reference_x @ o.linears[1].weight.t()
            reference_log_probs = F.log_softmax(reference_logits.float(), dim=-1)
            reference = reference_log_probs.gather(-1, o.chosen.unsqueeze(-1)).squeeze(-1)
        difference = own - own.detach()
        if s["importance_sampling_level"] == "sequence":
            difference = ((difference * o.mask).sum(-1) / o.mask.sum(-1).clamp(min=1.0)).unsqueeze(-1)
        ratio = torch.exp(difference)
        advantages = o.advantages.unsqueeze(1)
        each = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        each = each + 0.1 * (torch.exp(reference - own) - (reference - own) - 1.0)
        return (each * o.mask).sum() / o.mask.sum().clamp(min=1.0)  # type: ignore[no-any-return]

    return _loss(
        run,
        x=_half(*shape),
        reference_x=torch.empty(*shape, dtype=half),
        chosen=torch.zeros(shape[:2], dtype=torch.long),
        mask=torch.ones(shape[:2]),
        advantages=torch.empty(n, dtype=half),
        linears=nn.ModuleList(_half_linear(shape[-1], s["V"]) for _ in range(4)),
    )


def _divergence(of: Callable[[Any], Tensor], shares: Callable[..., Tensor] = torch.log_softmax) -> Any:
    """Of the (log-)softmax of a random tensor, whose graph lives on."""

    def made(tokens: int, vocabulary: int) -> Operator:
        def run(o: Any) -> Tensor:
            if not hasattr(o, "q"):
                o.q = shares(o.x, dim=-1)
            return of(o)

        return Operator(run, _scalar, x=_wanted(tokens, vocabulary), p=torch.empty(tokens, vocabulary))

    return made


def _earlier_jensen_shannon(o: Any) -> Tensor:
    """The benchmark's first form; both inputs are log-softmaxes of random tensors."""
    log_middle = torch.log(0.5 * (torch.exp(o.q) + torch.exp(o.p)))
    each = (F.kl_div(log_middle, one, reduction="batchmean", log_target=True) for one in (o.q, o.p))
    return 0.5 * (next(each) + next(each))


def _jensen_shannon(o: Any) -> Tensor:
    """Its inputs are log-softmaxes of random tensors: the first one's graph lives on, and backward runs through it."""
    middle = torch.lerp(torch.exp(o.q), torch.exp(o.p), 0.5)
    loss = 0.5 * F.kl_div(torch.log(middle), o.p, reduction="none", log_target=True).sum(dim=-1)
    loss = loss + 0.5 * F.kl_div(torch.log(middle), o.q, reduction="none", log_target=True).sum(dim=-1)
    return (loss / o.q.shape[0]).sum()


_kl_div = _divergence(lambda o: F.kl_div(o.q, o.p, reduction="batchmean"))
#: Half the sum of absolute differences.
_total_variation = _divergence(lambda o: torch.sum(torch.abs(o.q - o.p) / 2.0) / o.q.shape[0], torch.softmax)


def _jsd(s: Settings, n: int) -> Operator:
    """Its first benchmark swept the vocabulary, the later ones the tokens."""
    if "vocab_size" in s:
        return _divergence(_jensen_shannon)(n, s["vocab_size"])  # type: ignore[no-any-return]
    return _divergence(_earlier_jensen_shannon)(s["B"] * s["T"], n)  # type: ignore[no-any-return]


#: The benchmarks' names: (settings, swept value) -> the operator.
OPERATORS: dict[str, Callable[[Settings, int], Operator]] = {
    "cross_entropy": _cross_entropy,
    **dict.fromkeys(("geglu", "swiglu", "tiled_geglu", "tiled_swiglu"), _gated_mlp),
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "megatron_rms_norm": _megatron_rms_norm,
    "fused_add_rms_norm": _add_rms_norm,
    "rope": _rope,
    "fused_linear_cross_entropy": _linear_cross_entropy,
    **dict.fromkeys(("fused_linear_grpo_loss_sequence", "fused_linear_grpo_loss_token"), _policy_gradient),
    "distill_cosine_loss": _cosine,
    "sparsemax": _sparsemax,
    "multi_token_attention": _multi_token_attention,
    "sparse_multi_token_attention": _sparse_multi_token_attention,
    "softmax": _softmax,
    "fused_neighborhood_attention": _neighborhood,
    "group_norm": _group_norm,
    "jsd": _jsd,
    "kl_div": lambda s, n: _kl_div(s["B"] * s["T"], n),
    "tvd": lambda s, n: _total_variation(s["B"] * s["T"], n),
    "megatron_swiglu": _megatron_swiglu,
}
