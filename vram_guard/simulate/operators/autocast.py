"""CUDA's autocast policy, applied to symbolic tensors.

The tables below are PyTorch's own ("CUDA Op-Specific Behavior" in the documentation of ``torch.amp``; the macros
``AT_FORALL_*`` in ``ATen/autocast_mode.h``), line by line, so that a reader can check them. While a trace runs, kernels
for these operators stand at the dispatch key AutocastCUDA, where C++'s own look only at real CUDA tensors; calls from
inside C++ composites meet them too. ``torch.autocast("cuda")`` switches the key on and off as always.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet

from vram_guard.patching import replaced
from vram_guard.simulate.device.symbolic import is_symbolic
from vram_guard.tensors import map_tensors_in, tensors_in

#: "CUDA Ops that can autocast to float16": inputs are cast to the autocast dtype.
LOWER_PRECISION: tuple[str, ...] = (
    *("_convolution", "_convolution.deprecated", "conv1d", "conv2d", "conv3d", "conv_tbc"),
    *("conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input", "convolution", "prelu"),
    *("addmm", "addmv", "addr", "matmul", "einsum", "mm", "mv", "linalg_vecdot", "linear", "addbmm"),
    *("baddbmm", "bmm", "chain_matmul", "linalg_multi_dot", "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell"),
    *("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"),
    *("_scaled_dot_product_flash_attention", "scaled_dot_product_attention"),
)

#: "CUDA Ops that can autocast to float32": inputs are cast to float32.
FLOAT32: tuple[str, ...] = (
    *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal"),
    *("rsqrt", "sinh", "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus"),
    *("layer_norm", "native_layer_norm", "rms_norm", "group_norm", "frobenius_norm.dim", "nuclear_norm"),
    *("nuclear_norm.dim", "cosine_similarity", "poisson_nll_loss", "cosine_embedding_loss", "nll_loss"),
    *("nll_loss2d", "hinge_embedding_loss", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss"),
    *("margin_ranking_loss", "multilabel_margin_loss", "soft_margin_loss", "triplet_margin_loss"),
    *("multi_margin_loss", "binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm"),
    *("logsumexp", "upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_nearest2d"),
    *("_upsample_nearest_exact2d", "upsample_nearest3d", "_upsample_nearest_exact3d"),
    *("upsample_linear1d", "upsample_bilinear2d", "_upsample_bilinear2d_aa", "upsample_trilinear3d"),
    *("upsample_bicubic2d", "_upsample_bicubic2d_aa"),
)

#: The same list: reductions that take float32 through their ``dtype`` argument, without a cast of the input.
FLOAT32_BY_DTYPE: tuple[str, ...] = (
    *("prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum"),
    *("linalg_vector_norm", "linalg_matrix_norm", "linalg_matrix_norm.str_ord", "sum", "sum.dim_IntList"),
)

#: The same list: ``norm`` without a dtype is redispatched to the overload that has one.
FLOAT32_BY_OVERLOAD: dict[str, str] = {
    "norm.Scalar": "norm.ScalarOpt_dtype",
    "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype",
}

#: "CUDA Ops that promote to the widest input type".
PROMOTE: tuple[str, ...] = (
    *("addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put"),
    *("tensordot", "scatter_add"),
)

_KEY = DispatchKey.AutocastCUDA
_KEYS = DispatchKeySet(_KEY)


class CastCache:
    """Low-precision copies of leaf weights, kept until the outermost autocast region ends.

    As ``cached_cast`` in ``autocast_mode.cpp``: only float32 leaves that require grad and are no views. In inference
    mode weights are cast every time (seen in a history recorded on a GPU with torch 2.11, and on the CPU with 2.13).
    """

    def __init__(self) -> None:
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.in_inference_mode = False

    def cast(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The tensor in ``dtype``: itself, its cached copy, or a new copy."""
        if tensor.dtype == dtype or not _eligible(tensor):
            return tensor
        cacheable = (
            dtype != torch.float32
            and tensor.dtype == torch.float32
            and tensor.requires_grad
            and tensor.is_leaf
            and not tensor._is_view()
            and torch.is_autocast_cache_enabled()
            and not self.in_inference_mode
        )
        if not cacheable:
            return _to_dtype(tensor, dtype)
        known = self._copies.get(id(tensor))
        if known is None or known[0] is not tensor:
            known = self._copies[id(tensor)] = (tensor, _to_dtype(tensor, dtype))
        return known[1]

    def clear(self) -> None:
        """Forget all copies, as at the end of the outermost autocast region."""
        self._copies.clear()


def _to_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    converted: torch.Tensor = torch.ops.aten.to.dtype(tensor, dtype)
    return converted


def _casting(op: Any, cache: CastCache, dtype_of: Callable[[tuple[Any, ...]], torch.dtype]) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_KEYS):
            dtype = dtype_of(args)
            args = map_tensors_in(lambda tensor: cache.cast(tensor, dtype), args)
            kwargs = {name: map_tensors_in(lambda t: cache.cast(t, dtype), value) for name, value in kwargs.items()}
            return op(*args, **kwargs)

    return kernel


def _eligible(tensor: torch.Tensor) -> bool:
    """``is_eligible`` in autocast_mode.h."""
    return is_symbolic(tensor) and tensor.is_floating_point() and tensor.dtype != torch.float64


def _setting_dtype(op: Any) -> Callable[..., Any]:
    """``fp32_set_opt_dtype``: the operator gets ``dtype=float32`` unless the caller named one."""
    position = next(i for i, argument in enumerate(op._schema.arguments) if argument.name == "dtype")
    keyword = op._schema.arguments[position].kwarg_only

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_KEYS):
            if not _eligible(args[0]):
                return op(*args, **kwargs)
            if keyword:
                if kwargs.get("dtype") is None:
                    kwargs["dtype"] = torch.float32
            elif len(args) <= position:
                kwargs.setdefault("dtype", torch.float32)
            elif args[position] is None:
                args = (*args[:position], torch.float32, *args[position + 1 :])
            return op(*args, **kwargs)

    return kernel


def _appending_dtype(op: Any, with_dtype: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_KEYS):
            if not _eligible(args[0]):
                return op(*args, **kwargs)
            filled = list(args)
            rest = op._schema.arguments[len(args) :]
            filled += [kwargs.get(argument.name, argument.default_value) for argument in rest]
            return with_dtype(*filled, dtype=torch.float32)

    return kernel


def _recurrent(cache: CastCache) -> Callable[..., Any]:
    """Recurrent layers of cuDNN run in float16 whatever the autocast dtype is: ``_cudnn_rnn_cast_reflatten``.

    ``ATen/cudnn/AutocastRNN.cpp`` copies the weights into one flat buffer anew each time, as autograd sees it, so that
    each weight's gradient is cast back by itself.
    """
    op = torch.ops.aten._cudnn_rnn.default

    def kernel(source: torch.Tensor, weights: Any, stride: int, buffer: Any, *args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_KEYS):
            weights = list(weights)
            if _eligible(weights[0]) and weights[0].dtype != torch.float16:
                weights = _flat_copies(weights, torch.float16)
            source, args = map_tensors_in(lambda tensor: cache.cast(tensor, torch.float16), (source, args))
            return op(source, weights, stride, buffer, *args, **kwargs)

    return kernel


def _flat_copies(weights: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """As ``copy_weights_to_flat_buf_views``: a buffer of zeros, and weights set to its parts (not views of it)."""
    flat = torch.zeros(sum(weight.numel() for weight in weights), dtype=dtype, device=weights[0].device)
    copies = []
    offset = 0
    for weight in weights:
        part = torch.empty(0, dtype=dtype, device=flat.device)
        part.set_(flat.untyped_storage(), offset, weight.shape, weight.stride())
        copies.append(part.copy_(weight))
        offset += weight.numel()
    return copies


def _low_precision(_args: tuple[Any, ...]) -> torch.dtype:
    return torch.get_autocast_dtype("cuda")


def _float32(_args: tuple[Any, ...]) -> torch.dtype:
    return torch.float32


def _widest(args: tuple[Any, ...]) -> torch.dtype:
    dtypes = {tensor.dtype for tensor in tensors_in(args) if is_symbolic(tensor)}
    return torch.float32 if torch.float32 in dtypes else torch.get_autocast_dtype("cuda")


def operator(name: str) -> Any | None:
    """The operator overload for "softmax.int" or "mm" (default overload); None if this torch lacks it."""
    packet, _, overload = name.partition(".")
    found = getattr(torch.ops.aten, packet, None)
    return None if found is None else getattr(found, overload or "default", None)


def _kernels(cache: CastCache) -> Iterator[tuple[str, Callable[..., Any]]]:
    policies = ((LOWER_PRECISION, _low_precision), (FLOAT32, _float32), (PROMOTE, _widest))
    for names, dtype_of in policies:
        for name in names:
            op = operator(name)
            if op is not None:
                yield name, _casting(op, cache, dtype_of)
    yield "_cudnn_rnn", _recurrent(cache)
    for name in FLOAT32_BY_DTYPE:
        op = operator(name)
        if op is not None:
            yield name, _setting_dtype(op)
    for name, other in FLOAT32_BY_OVERLOAD.items():
        op, with_dtype = operator(name), operator(other)
        if op is not None and with_dtype is not None:
            yield name, _appending_dtype(op, with_dtype)


@contextlib.contextmanager
def _inference_mode(cache: CastCache) -> Iterator[None]:
    """Inside the block ``torch.inference_mode`` switches off gradients and the copies of weights, and nothing else.

    Symbolic tensors must stay out of the real one: it leaves out autograd's dispatch keys, so that composite operators
    would be met in one piece.
    """
    entered: list[tuple[bool, bool]] = []

    def enter(self: torch.inference_mode) -> None:
        entered.append((torch.is_grad_enabled(), cache.in_inference_mode))
        torch.set_grad_enabled(not self.mode)
        cache.in_inference_mode = self.mode

    def leave(_self: torch.inference_mode, *_error: object) -> None:
        grad, cache.in_inference_mode = entered.pop()
        torch.set_grad_enabled(grad)

    with replaced(torch.inference_mode, {"__enter__": enter, "__exit__": leave}):
        yield


@contextlib.contextmanager
def cuda_autocast() -> Iterator[None]:
    """Inside the block ``torch.autocast("cuda")`` acts on symbolic tensors as it does on CUDA tensors."""
    cache = CastCache()
    library = torch.library.Library("aten", "IMPL")
    clear = torch.clear_autocast_cache

    def clear_both() -> None:
        cache.clear()
        clear()

    try:
        with warnings.catch_warnings():
            # torch warns once that a kernel is overridden: that is what is meant here.
            warnings.simplefilter("ignore")
            for name, kernel in _kernels(cache):
                library.impl(name, kernel, "AutocastCUDA")
        before = torch._C._dispatch_tls_is_dispatch_key_included(_KEY)
        torch._C._dispatch_tls_set_dispatch_key_included(_KEY, True)
        try:
            with replaced(torch, {"clear_autocast_cache": clear_both}), _inference_mode(cache):
                yield
        finally:
            torch._C._dispatch_tls_set_dispatch_key_included(_KEY, before)
    finally:
        cache.clear()
        library._destroy()
