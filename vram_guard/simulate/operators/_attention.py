"""scaled_dot_product_attention as CUDA runs it: through the operators of a backend, and what these allocate.

The rules are those of ``attention.cpp`` (operators), ``attention.cu`` and ``attention_backward.cu`` (tensors).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from vram_guard.simulate.device.capability import Capability
from vram_guard.simulate.memory.recorder import Recorder
from vram_guard.simulate.operators._attention_backend import choose_backend
from vram_guard.simulate.operators._attention_math import math_as_on_cuda
from vram_guard.torch_release import torch_release


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
    mask = _float_mask(attn_mask, query.dtype)
    if backend == "cudnn":
        made = aten._scaled_dot_product_cudnn_attention(
            query, key, value, mask, needs_grad, dropout_p, is_causal, False, scale=scale
        )
        return made[0]  # type: ignore[no-any-return]
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
    """A boolean mask becomes a float one of 0 and -inf (``convert_boolean_attn_mask``).

    Since torch 2.6 by a choice between two numbers; cuDNN's is another than -inf (``convert_boolean_attn_mask_cudnn``).
    """
    if mask is None or mask.dtype != torch.bool:
        return mask
    if torch_release() >= (2, 6):
        return torch.where(mask, 0.0, torch.scalar_tensor(float("-inf"), dtype=dtype, device=mask.device))
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
    """Gradients of query, key, value and bias; for the call the row sums, and what the kernel sums gradients in.

    A gradient that is not contiguous with its heads behind its positions is copied: measured on an H100.
    """
    arrived, query, key, value, bias = args[:5]
    wanted = args[10] if len(args) > 10 else (True, True, True, False)
    batch, heads, length = query.shape[:3]
    name = str(func)
    copied = not arrived.transpose(1, 2).is_contiguous()
    held = [recorder.hold(arrived.numel() * arrived.element_size(), name)] if copied else []
    made = [_like_query(t, t.shape[-1]) for t in (query, key, value)]
    if bias is not None and bias.numel() and wanted[3]:
        made.append(torch.empty(bias.shape, dtype=bias.dtype, device="meta"))
    for tensor in made:
        recorder.track(tensor, name)
    gathered = [(t.shape[2], t.shape[3]) for t in (query, key, value)]
    _row_sums(recorder, name, batch * heads * length, batch * heads, gathered, half=query.element_size() == 2)
    recorder.release(held)
    while len(made) < 4:
        made.append(None)  # type: ignore[arg-type]
    return tuple(made)


#: ``kernel_backward.h``: rows and columns of the tiles of gradients; ``GradQTempStorage``: a lock, a counter, padding
#: for 64 rows and 128 columns, and for 128 rows in half precision where a head has 65 to 128 numbers (on an H100).
_TILE, _LOCK = 64, 16


def _row_sums(
    recorder: Recorder, name: str, rows: int, parts: int, gathered: list[tuple[int, int]], *, half: bool
) -> None:
    """What the memory-efficient backward holds beside its gradients: sums of so many rows, and its workspace.

    ``_efficient_attention_backward`` and ``kernel_backward.h``: in float32 the rows are summed outside of the kernel,
    a product and its sums, which are copied into the order of heads (``kKernelComputesDelta``). dq is summed in float32
    in tiles, each with its lock (``kNeedsAccumGradQ``, ``GradQTempStorage``: several blocks of keys add to it); in half
    precision dk and dv too where they do not stay in registers (head size over 128).

    Args:
        recorder: of the trace.
        name: of the operator.
        rows: of the query, over all heads.
        parts: sequences times heads.
        gathered: (length, head size) of query, key and value.
        half: whether they are in half precision.
    """
    length, head = gathered[0]
    tiles = [-(-length // _TILE) * -(-head // _TILE) for length, head in gathered]
    rows_of_lock = 2 * _TILE if half and _TILE < head <= 2 * _TILE else _TILE
    locks = -(-length // rows_of_lock) * -(-head // (2 * _TILE))
    workspace = tiles[0] * _TILE * _TILE * 4 + locks * _LOCK
    if half and head > 128:
        workspace += sum(tiles[1:]) * _TILE * _TILE * 4
    elements = 0 if half else rows * gathered[2][1] * 4
    sums = [recorder.hold(elements, name), recorder.hold(rows * 4, name)] if elements else []
    of_rows = [recorder.hold(rows * 4, name)]
    recorder.release(sums)
    held = [recorder.hold(parts * workspace, name)]
    recorder.release(of_rows)  # as a history of torch 2.11 shows
    recorder.release(held)


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


#: What a plan of cuDNN takes for its own counters: 256 bytes for each of the plans that a history recorded on an H200
#: with cuDNN 9.19 shows, forward and backward, with and without mask, dropout and grouped queries.
_CUDNN_PLAN = 256


def cudnn_forward(recorder: Recorder, func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """Output and log-sum-exp (batch, heads, length, 1) in float32; MHA.cpp, ``alloc_with_matching_layout``."""
    query, key, value = args[:3]
    with_lse = args[4]
    batch, heads, length = query.shape[:3]
    seeds = _seed(), _seed()
    if value.shape[-1] == query.shape[-1]:
        out = torch.empty_like(query, device="meta")
    else:
        out = _ordered_as(query, (batch, heads, length, value.shape[-1]))
    lse = _float(batch, heads, length if with_lse else 0, 1)
    for tensor in (*seeds, out, lse):
        recorder.track(tensor, str(func))
    recorder.temporary(_CUDNN_PLAN, str(func), "workspace")
    return out, lse, None, None, length, key.shape[2], *seeds, None


def _ordered_as(query: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Memory in the query's order of dimensions."""
    order = sorted(range(len(shape)), key=query.stride, reverse=True)
    laid = torch.empty([shape[dim] for dim in order], dtype=query.dtype, device="meta")
    return laid.permute([order.index(dim) for dim in range(len(shape))])


def cudnn_backward(recorder: Recorder, func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """Gradients of query, key and value, each laid out as its tensor; the gradient in the output's order; a workspace.

    ``run_cudnn_SDP_bprop``. The workspace is that of cuDNN's frontend (scaled_dot_product_flash_attention.h,
    ``SDPABackwardNode``, 1.12 to 1.23): dq and the row sums in float32; for grouped queries dk and dv of each head of
    the query (``dK_fullhead``, in the dtype of the operands), which are then summed; and the plan's own.
    """
    gradient, query, key, value, out = args[:5]
    batch, heads, length, head = query.shape
    name = str(func)
    made = tuple(torch.empty_like(t, device="meta") for t in (query, key, value))
    for tensor in made:
        recorder.track(tensor, name)
    copied = 0 if _same_order(gradient, out) else gradient.numel() * gradient.element_size()
    workspace = batch * heads * length * (head + 1) * 4 + _CUDNN_PLAN
    for each in (key, value):
        if each.shape[1] != heads:
            workspace += batch * heads * each.shape[2] * each.shape[3] * each.element_size()
    recorder.together([copied, workspace], name)
    return made


def _same_order(gradient: torch.Tensor, out: torch.Tensor) -> bool:
    """``same_strides``: of the dimensions that have more than one place."""
    one, other = ([t.stride(dim) for dim in range(t.dim()) if t.shape[dim] > 1] for t in (gradient, out))
    return one == other
