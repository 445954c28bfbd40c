"""Matrix products that Inductor pads to aligned sizes where that is faster (``torch/_inductor/fx_passes/pad_mm.py``).

It measures both on the GPU. Without one, what decides is whether rows begin at multiples of 4 bytes: no fewer can be
copied to shared memory asynchronously (PTX ISA, ``cp.async``), which kernels for tensor cores are built on. On an H200
with torch 2.11 the three products over GPT-2's 50,257 words are padded in bfloat16 and are not in float32, and those
over BERT's 30,522 are not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
import torch._inductor.config
import torch._inductor.fx_passes.pad_mm

from vram_guard.budget.catalogue import GPU, catalogue

#: Bytes to which kernels for tensor cores want rows aligned at least.
_ALIGNED: Final = 4

#: Torch's own share of the card's FLOP a byte above which a product counts as compute bound (``is_mm_compute_bound``).
_BALANCE: Final = 0.5

#: What decides: from torch 2.10 on the first, before that the second.
_MEASURED: Final = ("_should_pad", "should_pad_bench")


def padding_decided(capability: tuple[int, int]) -> tuple[Any, dict[str, Any]]:
    """What is to be replaced, so that nothing is measured.

    Args:
        capability: of the GPU that is meant.
    """

    def decided(*args: Any, **kwargs: Any) -> bool:
        mat1, mat2 = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)][:2]
        return bool(getattr(torch._inductor.config, "force_shape_pad", False)) or is_padded(mat1, mat2, capability)

    module: Any = torch._inductor.fx_passes.pad_mm
    names = [name for name in _MEASURED if hasattr(module, name)][:1]
    if hasattr(module, "PaddingPlan") or not names:  # after torch 2.13 what is chosen is more than yes or no
        return torch._inductor.config, {"shape_padding": False}
    return module, {names[0]: decided, "has_triton": lambda *_args, **_kwargs: True}


def is_padded(mat1: torch.Tensor, mat2: torch.Tensor, capability: tuple[int, int]) -> bool:
    """True if a product of these matrices, or of batches of them, is padded on a GPU of this compute capability."""
    rows, inner, columns = map(_known, (*mat1.shape[-2:], mat2.shape[-1]))
    begins = (_row_of(mat1), _row_of(mat2), columns if rows != 1 else 0)
    if all(row * mat1.element_size() % _ALIGNED == 0 for row in begins):
        return False
    cards = [card for card in catalogue() if card.compute_capability == capability]
    flops = _flops_of(mat1.dtype)
    balances = [flops(card) / card.memory_bandwidth for card in cards if flops(card)]
    if cards and not balances:
        return False
    moved = rows * inner + inner * columns + rows * columns
    # Cards of one compute capability differ: the one on which most products are compute bound.
    return bool(rows * inner * columns > _BALANCE * min(balances, default=0.0) * moved)


def _known(size: int | torch.SymInt) -> int:
    """A size that may be a symbol, without a guard on what it is now."""
    return size if isinstance(size, int) else int(size.node.hint)


def _row_of(matrix: torch.Tensor) -> int:
    """Elements from one row to the next, or from one column where they lie in a row; 0 where there is but one."""
    strides = (
        _known(stride) for stride, size in zip(matrix.stride()[-2:], matrix.shape[-2:], strict=True) if size != 1
    )
    found = max(strides, default=0)
    return found if found > 1 else 0


def _flops_of(dtype: torch.dtype) -> Callable[[GPU], int]:
    """FLOP a second of a card's tensor cores; 0 where they do not compute in this dtype."""
    if dtype is torch.float16:
        return lambda card: card.fp16_flops or 0
    if dtype is torch.bfloat16:
        return lambda card: card.bf16_flops or 0
    return lambda _card: 0
