"""scaled_dot_product_attention as CUDA runs it: which backend, and what each backend allocates.

The rules are those of ``sdp_utils.cpp`` (choice), ``attention.cu`` and ``attention_backward.cu`` (tensors).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch

from vram_guard.simulate.device.capability import HAS_BFLOAT16, Capability, Version
from vram_guard.simulate.memory.recorder import Recorder
from vram_guard.simulate.operators._attention_math import math_as_on_cuda
from vram_guard.simulate.operators._release import torch_release

Backend = Literal["cudnn", "flash", "efficient", "math"]

_HALVES = (torch.float16, torch.bfloat16)


def choose_backend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    dropout: float,
    is_causal: bool,
    enable_gqa: bool,
    capability: Capability,
) -> Backend:
    """The backend that ``select_sdp_backend`` picks on a GPU of this compute capability.

    Query, key and value are (batch, heads, length, head size). The user's switches
    (``torch.nn.attention.sdpa_kernel``) are honoured.
    """
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        return "math"
    if query.dtype != key.dtype or query.dtype != value.dtype:
        return "math"
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    same_heads = query.shape[1] == key.shape[1] == value.shape[1]
    gqa = enable_gqa and key.shape[1] > 0 and query.shape[1] % key.shape[1] == 0
    dense = all(t.stride(-1) == 1 for t in (query, key, value))
    nonzero = query.shape[2] > 0 and key.shape[2] > 0
    head = query.shape[-1]
    equal_head = head == key.shape[-1] == value.shape[-1]
    common = dense and nonzero and query.shape[0] == key.shape[0] == value.shape[0]

    # The compute capability is asked last: what does not depend on it is the same on every GPU.
    fused = common and mask is None and query.dtype in _HALVES and equal_head and (same_heads or gqa)
    by_cudnn = torch.backends.cuda.cudnn_sdp_enabled() and fused and head <= 128 and head % 8 == 0
    if by_cudnn and capability.says(_prefers_cudnn):
        return "cudnn"
    square = not is_causal or query.shape[2] == key.shape[2]
    if torch.backends.cuda.flash_sdp_enabled() and fused and head <= 256 and square:
        wide_backward = needs_grad and (head > 224 or (head > 192 and dropout > 0))
        if capability.says(HAS_BFLOAT16) and not (wide_backward and capability.says(_is_consumers)):
            return "flash"
    if torch.backends.cuda.mem_efficient_sdp_enabled() and common and same_heads and head == key.shape[-1]:
        mask_taken = mask is None or (not is_causal and (mask.stride(-1) == 1 or mask.shape[-1] == 1))
        if mask_taken and _efficient_takes(query, value, capability):
            return "efficient"
    return "math"


def _prefers_cudnn(version: Version) -> bool:
    """CuDNN attention comes first on data-centre Hopper and Blackwell since torch 2.9.1 (cuDNN 9.15.1)."""
    return version[0] in (9, 10) and torch_release() >= (2, 10)


def _is_consumers(version: Version) -> bool:
    """Multiprocessors whose shared memory is too small for the backward pass of wide heads."""
    return version in ((8, 6), (8, 9), (12, 0), (12, 1))


def _efficient_takes(query: torch.Tensor, value: torch.Tensor, capability: Capability) -> bool:
    """Dtype and alignment rules of the memory-efficient kernel."""
    half = query.dtype in _HALVES
    if query.dtype == torch.bfloat16 and not capability.says(HAS_BFLOAT16):
        return False
    if not half and query.dtype != torch.float32:
        return False
    return capability.says(_Aligned(half, (query.shape[-1], value.shape[-1])))


@dataclass(frozen=True)
class _Aligned:
    """Whether heads of these sizes are aligned for the memory-efficient kernel (``minimum_gemm_alignment``)."""

    half: bool
    heads: tuple[int, int]

    def __call__(self, version: Version) -> bool:
        """The answer."""
        tensor_cores = version[0] >= 8 or (version[0] >= 7 and self.half)
        alignment = 4 if version[0] >= 8 else 1
        if tensor_cores:
            alignment = max(alignment, 8 if self.half else 4)
        return all(head % alignment == 0 for head in self.heads)


def attention(
    capability: Capability,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """``scaled_dot_product_attention`` on symbolic tensors, through the operators that CUDA would run."""
    aten = torch.ops.aten
    backend = choose_backend(
        *(query, key, value, attn_mask),
        dropout=dropout_p,
        is_causal=is_causal,
        enable_gqa=enable_gqa,
        capability=capability,
    )
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    if backend == "flash":
        head = query.shape[-1]
        padded = [_pad_last(t, 8) for t in (query, key, value)]
        scale = scale if scale is not None else 1.0 / math.sqrt(head)
        made = aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, False, scale=scale)
        out: torch.Tensor = made[0]
        return out if out.shape[-1] == head else out[..., :head]
    if backend == "cudnn":
        made = aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, needs_grad, dropout_p, is_causal, False, scale=scale
        )
        return made[0]  # type: ignore[no-any-return]
    mask = _float_mask(attn_mask, query.dtype)
    if backend == "efficient":
        if mask is not None:
            mask = _expanded_mask(mask, query, key)
        made = aten._scaled_dot_product_efficient_attention(
            query, key, value, mask, needs_grad, dropout_p, is_causal, scale=scale
        )
        return made[0]  # type: ignore[no-any-return]
    extra = {"enable_gqa": enable_gqa} if enable_gqa else {}
    with math_as_on_cuda():
        return aten._scaled_dot_product_attention_math(  # type: ignore[no-any-return]
            query, key, value, mask, dropout_p, is_causal, None, scale=scale, **extra
        )[0]


def _pad_last(tensor: torch.Tensor, multiple: int) -> torch.Tensor:
    missing = -tensor.shape[-1] % multiple
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor


def _float_mask(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """A boolean mask becomes a float one of 0 and -inf (``convert_boolean_attn_mask``)."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), float("-inf"))


def _expanded_mask(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """The bias as the kernel wants it: rows padded to 16 elements, expanded to (batch, heads, q, k)."""
    length = mask.shape[-1]
    if length % 16:
        mask = _pad_last(mask, 16)[..., :length]
    batch, heads, rows = query.shape[:3]
    return mask.expand(batch, heads, rows, key.shape[2])


# --- allocations of the operators -----------------------------------------------------------------------------


def _like_query(query: torch.Tensor, head: int) -> torch.Tensor:
    """Efficient attention's result: (batch, heads, length, head) over memory laid out (batch, length, heads, head)."""
    batch, heads, length = query.shape[:3]
    return torch.empty((batch, length, heads, head), dtype=query.dtype, device="meta").transpose(1, 2)


def _float(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float32, device="meta")


def _seed(dtype: torch.dtype = torch.int64, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def flash_forward(_r: Recorder, _func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """Output, log-sum-exp (batch, heads, length) in float32, the two words of the random state.

    ``mha_fwd``: the output lies in memory as the query does (``empty_like``), so that what follows copies it, or not.
    """
    query, key = args[:2]
    batch, heads, length = query.shape[:3]
    out = torch.empty_like(query, device="meta")
    lse = _float(batch, heads, length)
    uint64 = getattr(torch, "uint64", torch.int64)
    empty = _seed(query.dtype, 0)
    return out, lse, None, None, length, key.shape[2], _seed(uint64, 2), _seed(uint64), empty


def flash_backward(recorder: Recorder, func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """Gradients; for the time of the call a float32 accumulator of dq, padded, and the row sums.

    ``mha_bwd``: lengths rounded up to 128, head sizes to 32 (to 64 above 128). ``_flash_attention_backward``: the
    output and its gradient are copied where they do not lie as (batch, length, heads, head).
    """
    query, key, value = args[1:4]
    batch, heads, length, head = query.shape
    name = str(func)
    scattered = (each for each in (args[0], args[4]) if not each.transpose(1, 2).is_contiguous())
    copies = [recorder.hold(each.numel() * each.element_size(), name) for each in scattered]
    made = tuple(torch.empty_like(t, device="meta") for t in (query, key, value))
    rounded_length = -(-length // 128) * 128
    rounded_head = -(-head // 32) * 32 if head <= 128 else -(-head // 64) * 64
    for tensor in made:
        recorder.track(tensor, name)
    sizes = [batch * heads * rounded_length * 4, batch * heads * rounded_length * rounded_head * 4]
    if key.shape[1] != heads:  # grouped queries: dk and dv come out per query head and are summed
        sizes += [batch * heads * key.shape[2] * head * query.element_size()] * 2
    recorder.together(sizes, name)
    recorder.release(copies)
    return made


def efficient_forward(_r: Recorder, _func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """Output, and for training the log-sum-exp with rows rounded up to 32, in float32."""
    query, _key, value, _bias, with_lse = args[:5]
    batch, heads, length = query.shape[:3]
    rows = -(-length // 32) * 32 if with_lse else 0
    return _like_query(query, value.shape[-1]), _float(batch, heads, rows), _seed(), _seed()


def efficient_backward(recorder: Recorder, func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """Gradients of query, key, value and bias; the row sums (and, in float32, their product) for a moment.

    ``_efficient_attention_backward`` and ``kernel_backward.h``: half precision accumulates dq in a float32
    workspace (``kNeedsAccumGradQ``), dk and dv too where they do not stay in registers (head size over 128).
    """
    query, key, value, bias = args[1:5]
    wanted = args[10] if len(args) > 10 else (True, True, True, False)
    batch, heads, length = query.shape[:3]
    made = [_like_query(t, t.shape[-1]) for t in (query, key, value)]
    if bias is not None and bias.numel() and wanted[3]:
        made.append(torch.empty(bias.shape, dtype=bias.dtype, device="meta"))
    name = str(func)
    for tensor in made:
        recorder.track(tensor, name)
    gathered = [(t.shape[2], t.shape[3]) for t in (query, key, value)]
    _row_sums(recorder, name, batch * heads * length, batch * heads, gathered, half=query.element_size() == 2)
    while len(made) < 4:
        made.append(None)  # type: ignore[arg-type]
    return tuple(made)


def _row_sums(
    recorder: Recorder, name: str, rows: int, parts: int, gathered: list[tuple[int, int]], *, half: bool
) -> None:
    """What the memory-efficient backward holds beside its gradients: sums of so many rows, in float32.

    Args:
        recorder: of the trace.
        name: of the operator.
        rows: of the query, over all heads.
        parts: sequences times heads.
        gathered: (length, head size) of query, key and value.
        half: whether they are in half precision, whose gradients are summed in float32, in tiles of 64.
    """
    if half:
        tiles = [(-(-length // 64) * 64) * (-(-head // 64) * 64) for length, head in gathered]
        recorder.together([rows * 4, parts * sum(tiles[:1] if gathered[0][1] <= 128 else tiles) * 4], name)
    else:
        recorder.together([rows * gathered[2][1] * 4, rows * 4], name)


def direct_efficient_forward(_r: Recorder, _func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """``_efficient_attention_forward``, which libraries call too (xformers): (batch, length, heads, head size).

    Packed sequences are one sample, with the places where they start; log-sum-exps are those of the longest, for each.
    """
    query, key, value, _bias, starts, _key_starts, longest, longest_key = args[:8]
    batch, length, heads = query.shape[:3]
    if starts is None:
        parts, longest, longest_key = batch, length, key.shape[1]
    else:
        parts = starts.numel() - 1
    rows = -(-longest // 32) * 32 if len(args) > 10 and args[10] else 0
    out = torch.empty((batch, length, heads, value.shape[-1]), dtype=query.dtype, device="meta")
    return out, _float(parts, heads, rows), _seed(), _seed(), longest, longest_key


def direct_efficient_backward(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``_efficient_attention_backward``, by the same rules as :func:`efficient_backward`.

    A gradient that is not contiguous is copied. The two words of the random state lie in host memory.
    """
    grad, query, key, value, bias, _out, starts, _key_starts, longest, longest_key = args[:10]
    batch, length, heads, head = query.shape
    name = str(func)
    copies = [] if grad.is_contiguous() else [recorder.hold(grad.numel() * grad.element_size(), name)]
    if kwargs.get("shared_storage_dqdkdv"):
        chunk = torch.empty((batch, length, 3, heads, head), dtype=query.dtype, device="meta")
        made: list[Any] = list(chunk.unbind(2))
    else:
        made = [torch.empty(t.shape, dtype=t.dtype, device="meta") for t in (query, key, value)]
    if bias is not None and args[15]:
        padded = -(-bias.shape[-1] // 16) * 16
        made.append(torch.empty((*bias.shape[:-1], padded), dtype=bias.dtype, device="meta")[..., : bias.shape[-1]])
    for tensor in made:
        recorder.track(tensor, name)
    if starts is None:
        parts, longest, longest_key = batch, length, key.shape[1]
    else:
        parts = starts.numel() - 1
    gathered = [(longest, head), (longest_key, head), (longest_key, value.shape[-1])]
    _row_sums(recorder, name, batch * heads * length, parts * heads, gathered, half=query.element_size() == 2)
    recorder.release(copies)
    return (*made, *[None] * (4 - len(made)))


def cudnn_forward(_r: Recorder, _func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """Output and log-sum-exp (batch, heads, length, 1) in float32; MHA.cpp, ``alloc_with_matching_layout``."""
    query, key = args[:2]
    with_lse = args[4]
    batch, heads, length = query.shape[:3]
    lse = _float(batch, heads, length if with_lse else 0, 1)
    out = torch.empty_like(query, device="meta")
    return out, lse, None, None, length, key.shape[2], _seed(), _seed(), None


def cudnn_backward(_r: Recorder, _func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """Gradients of query, key and value, each laid out as its tensor."""
    return tuple(torch.empty_like(t, device="meta") for t in args[1:4])
