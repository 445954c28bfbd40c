"""The operators: what trainings are made of, in the shapes that decide which kernel runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own idiom
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.operators.steps import Constant, Operator, applied, called
from benchmarks.harness.workloads import optimizer_of

FLOAT, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16
_TOLD = {FLOAT: "float32", HALF: "float16", BRAIN: "bfloat16"}


def _numbers(below: int, *shape: int) -> Constant:
    """Whole numbers, the same ones each time."""
    return lambda: torch.arange(torch.Size(shape).numel()).remainder(below).reshape(shape)


def _flags(*shape: int) -> Constant:
    return lambda: torch.ones(shape, dtype=torch.bool).tril()


def _attention() -> Iterator[Operator]:
    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **settings: Any) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **settings)

    masks: dict[str, tuple[dict[str, Constant], dict[str, Any]]] = {
        "plain": ({}, {}),
        "causal": ({}, {"is_causal": True}),
        "mask": ({"mask": _flags(1, 1, 512, 512)}, {}),
        "dropout": ({}, {"dropout_p": 0.1}),
    }
    for dtype, width, (kind, (constants, settings)) in product(_TOLD, (40, 64, 80, 128, 256), masks.items()):
        shape = (4, 8, 512, width)
        model = applied(partial(attend, **settings), shape, shape, shape, dtype=dtype, **constants)
        yield Operator(f"attention {kind} head {width} {_TOLD[dtype]}", model)
    grouped = partial(attend, enable_gqa=True)
    for dtype, causal in product((FLOAT, BRAIN), (False, True)):
        model = applied(
            partial(grouped, is_causal=causal), (4, 8, 512, 64), (4, 2, 512, 64), (4, 2, 512, 64), dtype=dtype
        )
        yield Operator(f"attention grouped {'causal' if causal else 'plain'} {_TOLD[dtype]}", model)
    for dtype, (queries, keys) in product((FLOAT, BRAIN), ((512, 77), (100, 1000), (1, 513))):
        model = applied(attend, (4, 8, queries, 64), (4, 8, keys, 64), (4, 8, keys, 64), dtype=dtype)
        yield Operator(f"attention cross {queries} {keys} {_TOLD[dtype]}", model)
    for backend, width in product(("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH"), (64, 128)):

        def chosen(q: Tensor, k: Tensor, v: Tensor, backend: str = backend) -> Tensor:
            with sdpa_kernel(getattr(SDPBackend, backend)):
                return attend(q, k, v, is_causal=True)

        shape = (4, 8, 512, width)
        yield Operator(f"attention {backend} head {width}", applied(chosen, shape, shape, shape, dtype=BRAIN))
    for dtype in (FLOAT, BRAIN):
        yield Operator(
            f"attention MultiheadAttention {_TOLD[dtype]}",
            called(lambda: _WithItself(nn.MultiheadAttention(256, 8, batch_first=True)), (8, 256, 256), dtype=dtype),
        )
        yield Operator(
            f"attention TransformerEncoderLayer {_TOLD[dtype]}",
            called(lambda: nn.TransformerEncoderLayer(256, 8, 1024, batch_first=True), (8, 256, 256), dtype=dtype),
        )
        yield Operator(
            f"attention TransformerDecoderLayer {_TOLD[dtype]}",
            called(
                lambda: nn.TransformerDecoderLayer(256, 8, 1024, batch_first=True),
                *((8, 256, 256), (8, 100, 256)),
                dtype=dtype,
            ),
        )


class _WithItself(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor) -> Any:
        return self.attention(x, x, x)


def _convolutions() -> Iterator[Operator]:
    kinds: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
        "Conv1d": (lambda: nn.Conv1d(64, 128, 3, padding=1), (16, 64, 1000)),
        "Conv2d": (lambda: nn.Conv2d(64, 128, 3, padding=1), (16, 64, 56, 56)),
        "Conv2d no bias": (lambda: nn.Conv2d(64, 128, 3, padding=1, bias=False), (16, 64, 56, 56)),
        "Conv2d 1x1": (lambda: nn.Conv2d(64, 256, 1), (16, 64, 56, 56)),
        "Conv2d 7x7 stride 2": (lambda: nn.Conv2d(3, 64, 7, 2, 3), (16, 3, 224, 224)),
        "Conv2d patches": (lambda: nn.Conv2d(3, 768, 16, 16), (16, 3, 224, 224)),
        "Conv2d dilated": (lambda: nn.Conv2d(64, 64, 3, padding=2, dilation=2), (16, 64, 56, 56)),
        "Conv2d grouped": (lambda: nn.Conv2d(128, 128, 3, padding=1, groups=32), (16, 128, 56, 56)),
        "Conv2d depthwise": (lambda: nn.Conv2d(96, 96, 7, padding=3, groups=96), (16, 96, 56, 56)),
        "Conv2d depthwise 3x3": (lambda: nn.Conv2d(96, 96, 3, padding=1, groups=96), (16, 96, 56, 56)),
        "Conv3d": (lambda: nn.Conv3d(16, 32, 3, padding=1), (4, 16, 16, 56, 56)),
        "ConvTranspose1d": (lambda: nn.ConvTranspose1d(64, 32, 4, 2, 1), (16, 64, 1000)),
        "ConvTranspose2d": (lambda: nn.ConvTranspose2d(64, 32, 4, 2, 1), (16, 64, 56, 56)),
        "ConvTranspose2d 2x2": (lambda: nn.ConvTranspose2d(64, 32, 2, 2), (16, 64, 56, 56)),
        "ConvTranspose3d": (lambda: nn.ConvTranspose3d(16, 8, 2, 2), (4, 16, 8, 28, 28)),
    }
    for (kind, (make, shape)), dtype in product(kinds.items(), (FLOAT, HALF, BRAIN)):
        yield Operator(f"convolution {kind} {_TOLD[dtype]}", called(make, shape, dtype=dtype))


def _norms() -> Iterator[Operator]:
    image, tokens = (16, 64, 56, 56), (16, 512, 768)
    kinds: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
        "BatchNorm1d": (lambda: nn.BatchNorm1d(768), (8192, 768)),
        "BatchNorm2d": (lambda: nn.BatchNorm2d(64), image),
        "BatchNorm2d no statistics": (lambda: nn.BatchNorm2d(64, track_running_stats=False), image),
        "BatchNorm2d evaluated": (lambda: nn.BatchNorm2d(64).eval(), image),
        "BatchNorm3d": (lambda: nn.BatchNorm3d(16), (4, 16, 16, 56, 56)),
        "InstanceNorm2d": (lambda: nn.InstanceNorm2d(64), image),
        "InstanceNorm2d affine": (lambda: nn.InstanceNorm2d(64, affine=True), image),
        "GroupNorm": (lambda: nn.GroupNorm(32, 64), image),
        "GroupNorm 1": (lambda: nn.GroupNorm(1, 64), image),
        "LayerNorm": (lambda: nn.LayerNorm(768), tokens),
        "LayerNorm no bias": (lambda: nn.LayerNorm(768, bias=False), tokens),
        "LayerNorm image": (lambda: nn.LayerNorm([64, 56, 56]), image),
        "RMSNorm": (lambda: nn.RMSNorm(768), tokens),
        "LocalResponseNorm": (lambda: nn.LocalResponseNorm(5), image),
    }
    for (kind, (make, shape)), dtype in product(kinds.items(), (FLOAT, HALF, BRAIN)):
        yield Operator(f"norm {kind} {_TOLD[dtype]}", called(make, shape, dtype=dtype))
    for dtype in (FLOAT, BRAIN):
        yield Operator(f"norm normalize {_TOLD[dtype]}", applied(F.normalize, tokens, dtype=dtype))


def _recurrent() -> Iterator[Operator]:
    kinds: dict[str, Callable[[], nn.Module]] = {
        "LSTM": lambda: nn.LSTM(256, 256, 1),
        "LSTM 3 layers": lambda: nn.LSTM(256, 256, 3),
        "LSTM bidirectional": lambda: nn.LSTM(256, 256, 2, bidirectional=True),
        "LSTM dropout": lambda: nn.LSTM(256, 256, 2, dropout=0.2),
        "LSTM projected": lambda: nn.LSTM(256, 256, 2, proj_size=64),
        "LSTM no bias": lambda: nn.LSTM(256, 256, 2, bias=False),
        "LSTM batch first": lambda: nn.LSTM(256, 256, 2, batch_first=True),
        "GRU": lambda: nn.GRU(256, 256, 1),
        "GRU bidirectional": lambda: nn.GRU(256, 256, 2, bidirectional=True),
        "GRU dropout": lambda: nn.GRU(256, 256, 2, dropout=0.2),
        "RNN tanh": lambda: nn.RNN(256, 256, 2),
        "RNN relu bidirectional": lambda: nn.RNN(256, 256, 2, nonlinearity="relu", bidirectional=True),
    }
    for (kind, make), dtype in product(kinds.items(), (FLOAT, HALF, BRAIN)):
        yield Operator(f"recurrent {kind} {_TOLD[dtype]}", called(make, (100, 32, 256), dtype=dtype))
    widths: dict[str, Callable[[], nn.Module]] = {
        "LSTM 64 wide": lambda: nn.LSTM(256, 64, 2, bidirectional=True),
        "LSTM 160 wide": lambda: nn.LSTM(256, 160, 1),
        "LSTM 384 wide": lambda: nn.LSTM(256, 384, 1),
        "GRU 192 wide": lambda: nn.GRU(256, 192, 3),
        "RNN 320 wide": lambda: nn.RNN(256, 320, 2),
    }
    for (kind, make), dtype in product(widths.items(), (FLOAT, HALF, BRAIN)):
        yield Operator(f"recurrent {kind} {_TOLD[dtype]}", called(make, (100, 32, 256), dtype=dtype))
    for kind, make in kinds.items():
        if "batch first" not in kind:
            yield Operator(f"recurrent {kind} packed", called(partial(_Packed, make), (100, 32, 256)))
    for dtype in (FLOAT, BRAIN):
        yield Operator(
            f"recurrent LSTMCell {_TOLD[dtype]}", called(lambda: nn.LSTMCell(256, 512), (1024, 256), dtype=dtype)
        )
        yield Operator(
            f"recurrent GRUCell {_TOLD[dtype]}", called(lambda: nn.GRUCell(256, 512), (1024, 256), dtype=dtype)
        )


class _Packed(nn.Module):
    """Sequences of 100 and of 50 words."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.cell = make()

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.tensor([100] * 16 + [50] * 16)
        found: Tensor = self.cell(nn.utils.rnn.pack_padded_sequence(x, lengths))[0].data
        return found


def _losses() -> Iterator[Operator]:
    logits, image, many = (4096, 1000), (8, 21, 128, 128), (4096, 512)
    classes = _numbers(1000, 4096)
    real: Constant = lambda: torch.rand(4096, 512)  # noqa: E731 - one constant among others
    kinds: dict[str, Callable[[torch.dtype], Callable[[], nn.Module]]] = {
        "cross_entropy": lambda d: applied(F.cross_entropy, logits, dtype=d, target=classes),
        "cross_entropy sum": lambda d: applied(
            partial(F.cross_entropy, reduction="sum"), logits, dtype=d, target=classes
        ),
        "cross_entropy none": lambda d: applied(
            partial(F.cross_entropy, reduction="none"), logits, dtype=d, target=classes
        ),
        "cross_entropy smoothed": lambda d: applied(
            partial(F.cross_entropy, label_smoothing=0.1), logits, dtype=d, target=classes
        ),
        "cross_entropy of images": lambda d: applied(F.cross_entropy, image, dtype=d, target=_numbers(21, 8, 128, 128)),
        "cross_entropy of shares": lambda d: applied(
            F.cross_entropy, logits, dtype=d, target=lambda: torch.full(logits, 1e-3).to(d)
        ),
        "nll": lambda d: applied(
            lambda x, target: F.nll_loss(x.log_softmax(1), target), logits, dtype=d, target=classes
        ),
        "binary with logits": lambda d: applied(
            F.binary_cross_entropy_with_logits, many, dtype=d, target=lambda: real().to(d)
        ),
        "mse": lambda d: applied(F.mse_loss, many, dtype=d, target=lambda: real().to(d)),
        "l1": lambda d: applied(F.l1_loss, many, dtype=d, target=lambda: real().to(d)),
        "smooth_l1": lambda d: applied(F.smooth_l1_loss, many, dtype=d, target=lambda: real().to(d)),
        "huber": lambda d: applied(F.huber_loss, many, dtype=d, target=lambda: real().to(d)),
        "kl_div": lambda d: applied(
            partial(F.kl_div, reduction="batchmean"), many, dtype=d, target=lambda: real().to(d)
        ),
        "cosine_similarity": lambda d: applied(F.cosine_similarity, many, many, dtype=d),
        "triplet": lambda d: applied(F.triplet_margin_loss, many, many, many, dtype=d),
        "multi_margin": lambda d: applied(F.multi_margin_loss, logits, dtype=d, target=classes),
        "gaussian_nll": lambda d: applied(
            lambda x, target: F.gaussian_nll_loss(x, target, torch.ones_like(x)),
            many,
            dtype=d,
            target=lambda: real().to(d),
        ),
        "poisson_nll": lambda d: applied(F.poisson_nll_loss, many, dtype=d, target=lambda: real().to(d)),
    }
    for (kind, make), dtype in product(kinds.items(), (FLOAT, BRAIN)):
        yield Operator(f"loss {kind} {_TOLD[dtype]}", make(dtype))
    yield Operator(
        "loss binary", applied(lambda x, target: F.binary_cross_entropy(x.sigmoid(), target), many, target=real)
    )

    def ctc(x: Tensor, targets: Tensor, blank: int) -> Tensor:
        lengths = torch.full((16,), 100), torch.full((16,), 20)
        return F.ctc_loss(x.log_softmax(2), targets, *lengths, blank=blank)

    for blank in (0, 1):
        targets: Constant = lambda: torch.full((16, 20), 5)  # noqa: E731
        yield Operator(f"loss ctc blank {blank}", applied(partial(ctc, blank=blank), (100, 16, 64), targets=targets))


def _indexed() -> Iterator[Operator]:
    words, table, rows = _numbers(5000, 16, 512), (5000, 256), (8192, 256)
    index = _numbers(8192, 8192)
    kinds: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...], dict[str, Constant]]] = {
        "embedding": (lambda w, at: F.embedding(at, w), (table,), {"at": words}),
        "embedding padded": (lambda w, at: F.embedding(at, w, padding_idx=0), (table,), {"at": words}),
        "embedding by frequency": (lambda w, at: F.embedding(at, w, scale_grad_by_freq=True), (table,), {"at": words}),
        "embedding few words": (lambda w, at: F.embedding(at, w), (table,), {"at": _numbers(5000, 2, 512)}),
        "embedding_bag sum": (lambda w, at: F.embedding_bag(at, w, mode="sum"), (table,), {"at": words}),
        "embedding_bag mean": (lambda w, at: F.embedding_bag(at, w, mode="mean"), (table,), {"at": words}),
        "embedding_bag max": (lambda w, at: F.embedding_bag(at, w, mode="max"), (table,), {"at": words}),
        "index_select": (lambda x, at: x.index_select(0, at), (rows,), {"at": index}),
        "index": (lambda x, at: x[at], (rows,), {"at": index}),
        "index of columns": (lambda x, at: x[:, at], (rows,), {"at": _numbers(256, 100)}),
        "index by mask": (lambda x, at: x[at], (rows,), {"at": lambda: torch.arange(8192) % 2 == 0}),
        "index_put": (lambda x, y, at: x.clone().index_put((at,), y), (rows, rows), {"at": index}),
        "index_add": (lambda x, y, at: x.index_add(0, at, y), (rows, rows), {"at": index}),
        "gather": (lambda x, at: x.gather(1, at), (rows,), {"at": _numbers(256, 8192, 256)}),
        "scatter_add": (lambda x, y, at: x.scatter_add(0, at, y), (rows, rows), {"at": _numbers(8192, 8192, 256)}),
        "take_along_dim": (lambda x, at: x.take_along_dim(at, 1), (rows,), {"at": _numbers(256, 8192, 64)}),
        "masked_fill": (lambda x, at: x.masked_fill(at, 0.0), (rows,), {"at": _flags(8192, 256)}),
        "masked_select": (lambda x, at: x.masked_select(at), (rows,), {"at": _flags(8192, 256)}),
        "where": (lambda x, y, at: torch.where(at, x, y), (rows, rows), {"at": _flags(8192, 256)}),
        "repeat_interleave": (lambda x: x.repeat_interleave(3, 0), (rows,), {}),
        "roll": (lambda x: x.roll((5, 3), (0, 1)), (rows,), {}),
        "flip": (lambda x: x.flip(0), (rows,), {}),
        "unfold": (lambda x: x.unfold(0, 16, 8), (rows,), {}),
        "cat": (lambda x, y: torch.cat((x, y)), (rows, rows), {}),
        "stack": (lambda x, y: torch.stack((x, y), 1), (rows, rows), {}),
        "chunk": (lambda x: x.chunk(4)[0] * 2, (rows,), {}),
        "tril": (lambda x: x.tril(), (rows,), {}),
    }
    for (kind, (function, shapes, constants)), dtype in product(kinds.items(), (FLOAT, BRAIN)):
        yield Operator(f"index {kind} {_TOLD[dtype]}", applied(function, *shapes, dtype=dtype, **constants))


def _reduced() -> Iterator[Operator]:
    many = (2048, 2048)
    kinds: dict[str, Callable[[Tensor], Any]] = {
        "sort": lambda x: x.sort(1),
        "sort stable": lambda x: x.sort(dim=0, stable=True),
        "sort all": lambda x: x.flatten().sort(),
        "topk": lambda x: x.topk(10, 1),
        "topk of all": lambda x: x.flatten().topk(1000),
        "kthvalue": lambda x: x.kthvalue(5, 1),
        "median": lambda x: x.median(1),
        "mode": lambda x: x[:64].mode(1),
        "quantile": lambda x: x.float().quantile(0.5, 1),
        "cumsum": lambda x: x.cumsum(1),
        "cumsum over rows": lambda x: x.cumsum(0),
        "cumsum of all": lambda x: x.flatten().cumsum(0),
        "cumprod": lambda x: x.cumprod(1),
        "cummax": lambda x: x.cummax(1),
        "logcumsumexp": lambda x: x.logcumsumexp(1),
        "logsumexp": lambda x: x.logsumexp(1),
        "softmax": lambda x: x.softmax(1),
        "log_softmax": lambda x: x.log_softmax(1),
        "softmax over rows": lambda x: x.softmax(0),
        "gumbel_softmax": F.gumbel_softmax,
        "sum": lambda x: x.sum(),
        "sum over rows": lambda x: x.sum(0),
        "mean": lambda x: x.mean(1),
        "var": lambda x: x.var(1),
        "std": lambda x: x.std(0),
        "var_mean": lambda x: torch.var_mean(x, 1),
        "norm": lambda x: x.norm(),
        "norm of rows": lambda x: x.norm(dim=1),
        "norm 1": lambda x: x.norm(p=1),
        "max": lambda x: x.max(),
        "max of rows": lambda x: x.max(1),
        "amax": lambda x: x.amax(1),
        "aminmax": lambda x: torch.aminmax(x, dim=1),
        "prod": lambda x: x[:, :16].prod(1),
        "prod of all": lambda x: x[:16, :16].prod(),
        "nansum": lambda x: x.nansum(1),
    }
    for (kind, function), dtype in product(kinds.items(), (FLOAT, BRAIN)):
        yield Operator(f"reduced {kind} {_TOLD[dtype]}", applied(function, many, dtype=dtype))


def _pointwise() -> Iterator[Operator]:
    many = (2048, 2048)
    kinds: dict[str, Callable[..., Any]] = {
        **{
            name: getattr(F, name)
            for name in ("relu", "gelu", "silu", "mish", "glu", "rrelu", "softplus", "elu", "celu")
        },
        **{
            name: getattr(F, name)
            for name in ("selu", "hardswish", "hardsigmoid", "hardtanh", "leaky_relu", "logsigmoid")
        },
        **{name: getattr(F, name) for name in ("softsign", "tanhshrink", "relu6", "softshrink")},
        **{
            name: getattr(torch, name)
            for name in ("exp", "sqrt", "sigmoid", "tanh", "sin", "erf", "abs", "sign", "round")
        },
        **{
            name: getattr(torch, name)
            for name in ("reciprocal", "rsqrt", "log1p", "atan", "square", "neg", "nan_to_num")
        },
        "gelu tanh": partial(F.gelu, approximate="tanh"),
        "dropout": F.dropout,
        "dropout in place": lambda x: F.dropout(x * 2, inplace=True),
        "alpha_dropout": F.alpha_dropout,
        "feature dropout": lambda x: F.dropout1d(x.view(64, 32, 2048)),
        "relu in place": lambda x: F.relu(x * 2, inplace=True),
        "clamp": lambda x: x.clamp(-1, 1),
        "power": lambda x: x**3,
        "power of two": lambda x: x**2,
        "expand": lambda x: x[:, :1] * x,
        "to float": lambda x: x.float() * 2,
        "to double": lambda x: x.double(),
        "complex": lambda x: torch.complex(x.float(), x.float()).abs(),
        "transposed": lambda x: x.t().contiguous() * x,
    }
    for (kind, function), dtype in product(kinds.items(), (FLOAT, BRAIN)):
        yield Operator(f"pointwise {kind} {_TOLD[dtype]}", applied(function, many, dtype=dtype))
    pairs = {
        **{name: getattr(torch, name) for name in ("add", "mul", "div", "maximum", "atan2", "hypot", "fmod")},
        "lerp": lambda x, y: torch.lerp(x, y, 0.3),
        "addcmul": lambda x, y: torch.addcmul(x, x, y),
        "prelu": lambda x, y: F.prelu(x, y[0, :2048]),
        "swiglu": lambda x, y: F.silu(x) * y,
    }
    for (kind, function), dtype in product(pairs.items(), (FLOAT, BRAIN)):
        yield Operator(f"pointwise {kind} {_TOLD[dtype]}", applied(function, many, many, dtype=dtype))


def _images() -> Iterator[Operator]:
    image = (8, 16, 64, 64)
    kinds: dict[str, Callable[[Tensor], Any]] = {
        "max_pool2d": lambda x: F.max_pool2d(x, 3, 2, 1),
        "max_pool1d": lambda x: F.max_pool1d(x.flatten(2), 3, 2, 1),
        "max_pool3d": lambda x: F.max_pool3d(x.view(8, 4, 4, 64, 64), 2),
        "avg_pool2d": lambda x: F.avg_pool2d(x, 2),
        "avg_pool1d": lambda x: F.avg_pool1d(x.flatten(2), 4),
        "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, 7),
        "adaptive_avg_pool2d 1": lambda x: F.adaptive_avg_pool2d(x, 1),
        "adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(x, 7),
        "lp_pool2d": lambda x: F.lp_pool2d(x, 2, 2),
        "unfold": lambda x: F.unfold(x, 3),
        "fold": lambda x: F.fold(x.view(8, 16 * 64, 64), (64, 64), 8, stride=8),
        "pixel_shuffle": lambda x: F.pixel_shuffle(x, 2),
        "pixel_unshuffle": lambda x: F.pixel_unshuffle(x, 2),
        "channel_shuffle": lambda x: F.channel_shuffle(x, 4),
        **{
            f"interpolate {mode}": partial(F.interpolate, scale_factor=2.0, mode=mode)
            for mode in ("nearest", "nearest-exact", "bilinear", "bicubic")
        },
        "interpolate area": lambda x: F.interpolate(x, size=(32, 32), mode="area"),
        "interpolate antialias": lambda x: F.interpolate(x, size=(32, 32), mode="bilinear", antialias=True),
        "interpolate down": lambda x: F.interpolate(x, size=(32, 32), mode="bilinear"),
        "grid_sample": lambda x: F.grid_sample(x, x[:, :2].permute(0, 2, 3, 1)),
        **{
            f"pad {mode}": partial(F.pad, pad=(3, 3, 3, 3), mode=mode)
            for mode in ("constant", "reflect", "replicate", "circular")
        },
        "affine": lambda x: F.affine_grid(x[:, 0, :2, :3], [8, 16, 64, 64], align_corners=False),
        "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last) * 2,
    }
    for (kind, function), dtype in product(kinds.items(), (FLOAT, BRAIN)):
        yield Operator(f"image {kind} {_TOLD[dtype]}", applied(function, image, dtype=dtype))


def _products() -> Iterator[Operator]:
    square, batch = (1024, 1024), (16, 512, 512)
    kinds: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
        "mm": (torch.mm, (square, square)),
        "mm transposed": (lambda x, y: x.t() @ y, (square, square)),
        "mv": (torch.mv, (square, (1024,))),
        "dot": (torch.dot, ((2**20,), (2**20,))),
        "bmm": (torch.bmm, (batch, batch)),
        "matmul broadcast": (torch.matmul, ((4, 4, 512, 512), (512, 512))),
        "matmul of heads": (lambda x, y: x @ y.transpose(-1, -2), ((4, 8, 256, 64), (4, 8, 256, 64))),
        "linear": (F.linear, ((8, 512, 1024), square, (1024,))),
        "linear no bias": (F.linear, ((8, 512, 1024), square)),
        "linear narrow": (F.linear, ((8, 512, 1024), (10, 1024), (10,))),
        "linear odd": (F.linear, ((8, 513, 1023), (777, 1023), (777,))),
        "bilinear": (F.bilinear, ((512, 64), (512, 64), (32, 64, 64))),
        "addmm": (torch.addmm, (square, square, square)),
        "baddbmm": (torch.baddbmm, (batch, batch, batch)),
        "einsum": (lambda x, y: torch.einsum("bij,bjk->bik", x, y), (batch, batch)),
        "einsum of heads": (lambda x, y: torch.einsum("bhid,bhjd->bhij", x, y), ((4, 8, 256, 64), (4, 8, 256, 64))),
        "outer": (torch.outer, ((2048,), (2048,))),
        "kron": (torch.kron, ((64, 64), (32, 32))),
        "tensordot": (lambda x, y: torch.tensordot(x, y, 1), (square, square)),
        "linear gelu linear": (
            lambda x, w, v: F.linear(F.gelu(F.linear(x, w)), v),
            ((4096, 512), (2048, 512), (512, 2048)),
        ),
    }
    for (kind, (function, shapes)), dtype in product(kinds.items(), (FLOAT, HALF, BRAIN)):
        yield Operator(f"product {kind} {_TOLD[dtype]}", applied(function, *shapes, dtype=dtype))
    for kind, (function, shapes) in kinds.items():
        yield Operator(f"product {kind} autocast", applied(function, *shapes), precision="bf16-mixed")


def _linalg() -> Iterator[Operator]:
    def positive(x: Tensor) -> Tensor:
        return x @ x.mT + 1000 * torch.eye(x.shape[-1], device=x.device)

    one, several = (256, 256), (16, 64, 64)
    kinds: dict[str, Callable[[Tensor], Any]] = {
        "inverse": torch.linalg.inv,
        "solve": lambda x: torch.linalg.solve(x, x.mT),
        "cholesky": lambda x: torch.linalg.cholesky(positive(x)),
        "qr": torch.linalg.qr,
        "svd values": torch.linalg.svdvals,
        "eigh": lambda x: torch.linalg.eigvalsh(positive(x)),
        "det": torch.linalg.det,
        "slogdet": lambda x: torch.linalg.slogdet(x)[1],
        "pinv": torch.linalg.pinv,
        "matrix_exp": lambda x: torch.linalg.matrix_exp(x / 100),
        "matrix_power": lambda x: torch.linalg.matrix_power(x / 100, 3),
        "matrix_norm": torch.linalg.matrix_norm,
        "triangular": lambda x: torch.linalg.solve_triangular(x.triu(), x, upper=True),
        "cdist": lambda x: torch.cdist(x, x),
        "cdist 1": lambda x: torch.cdist(x, x, p=1.0),
    }
    for kind, function in kinds.items():
        yield Operator(f"linalg {kind}", applied(function, one))
        yield Operator(f"linalg {kind} batch", applied(function, several))


def _fourier() -> Iterator[Operator]:
    image, sound = (16, 32, 64, 64), (16, 16000)
    kinds: dict[str, tuple[Callable[[Tensor], Any], tuple[int, ...]]] = {
        "fft": (torch.fft.fft, image),
        "rfft": (torch.fft.rfft, image),
        "irfft": (lambda x: torch.fft.irfft(torch.fft.rfft(x)), image),
        "fft2": (torch.fft.fft2, image),
        "rfft2": (torch.fft.rfft2, image),
        "irfft2": (lambda x: torch.fft.irfft2(torch.fft.rfft2(x)), image),
        "fftn": (torch.fft.fftn, (4, 16, 16, 16)),
        "fft odd": (torch.fft.fft, (16, 32, 4099)),
        "stft": (
            lambda x: torch.stft(x, 400, 160, window=torch.hann_window(400, device=x.device), return_complex=True),
            sound,
        ),
        "shift": (lambda x: torch.fft.fftshift(torch.fft.fft2(x)), image),
    }
    for kind, (function, shape) in kinds.items():
        yield Operator(f"fourier {kind}", applied(function, shape))


def _optimizers() -> Iterator[Operator]:
    kinds: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "SGD momentum": optimizer_of("SGD", lr=1e-4, momentum=0.9, nesterov=True),
        "SGD fused": optimizer_of("SGD", lr=1e-4, momentum=0.9, fused=True),
        "Adam amsgrad": optimizer_of("Adam", lr=1e-4, amsgrad=True),
        "Adam capturable": optimizer_of("Adam", lr=1e-4, capturable=True),
        "AdamW maximize": optimizer_of("AdamW", lr=1e-4, maximize=True),
        "AdamW fused amsgrad": optimizer_of("AdamW", lr=1e-4, fused=True, amsgrad=True),
        "AdamW for-loop": optimizer_of("AdamW", lr=1e-4, foreach=False),
        **{name: optimizer_of(name, lr=1e-4) for name in ("Adadelta", "Adagrad", "Adamax", "ASGD", "NAdam", "RAdam")},
        **{
            f"{name} for-loop": optimizer_of(name, lr=1e-4, foreach=False)
            for name in ("Adadelta", "Adagrad", "NAdam", "RAdam")
        },
        "Adagrad fused": optimizer_of("Adagrad", lr=1e-4, fused=True),
        "RMSprop": optimizer_of("RMSprop", lr=1e-4),
        "RMSprop centered momentum": optimizer_of("RMSprop", lr=1e-4, centered=True, momentum=0.9),
        "Rprop": optimizer_of("Rprop", lr=1e-4),
        "Adafactor": optimizer_of("Adafactor", lr=1e-4),
        "Muon": optimizer_of("Muon", lr=1e-4),
    }
    for (kind, make), dtype in product(kinds.items(), (FLOAT, BRAIN)):
        model = applied(lambda x, w, v: F.linear(F.linear(x, w), v), (256, 512), (1024, 512), (2000, 1024), dtype=dtype)
        yield Operator(f"optimizer {kind} {_TOLD[dtype]}", model, optimizer=make)


OPERATORS: tuple[Operator, ...] = (
    *_attention(),
    *_convolutions(),
    *_norms(),
    *_recurrent(),
    *_losses(),
    *_indexed(),
    *_reduced(),
    *_pointwise(),
    *_images(),
    *_products(),
    *_linalg(),
    *_fourier(),
    *_optimizers(),
)
