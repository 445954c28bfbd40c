"""Which backend runs scaled_dot_product_attention on CUDA (``sdp_utils.cpp``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from vram_guard.simulate.device.capability import HAS_BFLOAT16, Capability, Version
from vram_guard.torch_release import torch_release

Backend = Literal["cudnn", "flash", "efficient", "math"]

_HALVES = (torch.float16, torch.bfloat16)

#: ``check_cudnn_tensor_shapes``: heads of cuDNN's attention, and those on compute capability 9.0 in torch 2.10 and
#: 2.11 (cuDNN from 9.10 on). Later releases ask cuDNN's frontend too: wider ones are left out there.
_CUDNN_HEAD, _CUDNN_HEAD_HOPPER = 128, 256

#: ``check_cudnn_dropout``, since torch 2.12: cuDNN drops in steps of one sixteenth.
_DROPOUT_STEPS = 16


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
    half = common and query.dtype in _HALVES and (same_heads or gqa)
    if half and _cudnn_takes(query, key, value, mask, dropout, is_causal=is_causal, capability=capability):
        return "cudnn"
    fused = half and mask is None and equal_head
    square = not is_causal or query.shape[2] == key.shape[2]
    if torch.backends.cuda.flash_sdp_enabled() and fused and head <= 256 and square:
        wide_backward = needs_grad and (head > 224 or (head > 192 and dropout > 0))
        if capability.says(HAS_BFLOAT16) and not (wide_backward and capability.says(_is_consumers)):
            return "flash"
    if torch.backends.cuda.mem_efficient_sdp_enabled() and common and same_heads and head == key.shape[-1]:
        mask_taken = mask is None or (not is_causal and _is_dense(mask))
        if mask_taken and _efficient_takes(query, value, capability):
            return "efficient"
    return "math"


def _is_dense(mask: torch.Tensor | None) -> bool:
    """``check_last_dim_stride_equals_1_dense`` of the mask: one that is expanded over the keys is not taken."""
    return mask is None or mask.stride(-1) == 1 or mask.shape[-1] == 1


def _cudnn_takes(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    *,
    is_causal: bool,
    capability: Capability,
) -> bool:
    """``can_use_cudnn_attention`` for half precision on a card where it comes first.

    A mask is an additive bias here (``check_attn_mask_shape``). One key, or one query with dropout, is not taken.
    """
    heads = query.shape[-1], value.shape[-1]
    if not torch.backends.cuda.cudnn_sdp_enabled() or query.shape[-1] != key.shape[-1] or any(h % 8 for h in heads):
        return False
    if torch_release() >= (2, 12) and (dropout * _DROPOUT_STEPS) % 1:
        return False
    if key.shape[2] == 1 or (dropout and query.shape[2] == 1) or (is_causal and mask is not None):
        return False
    if not _is_dense(mask):
        return False
    if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
        return False  # ``check_cudnn_deterministic``
    widest = max(heads)
    return widest <= _CUDNN_HEAD_HOPPER and capability.says(
        _prefers_cudnn if widest <= _CUDNN_HEAD else _prefers_wide_cudnn
    )


def _prefers_wide_cudnn(version: Version) -> bool:
    """The same for heads of over 128 elements."""
    return version == (9, 0) and torch_release() in ((2, 10), (2, 11))


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
