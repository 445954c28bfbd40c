"""Weights that bitsandbytes has quantised, or will quantise on their way to the GPU: packed values, and their scales.

The scales are tensors that no module registers: they hang on the weight, in a ``QuantState`` (4 bits) or as ``SCB``
(8 bits), and on the layer (``bitsandbytes/nn/modules.py``, ``bitsandbytes/functional.py``).
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

#: Values that a block of scales has a scale of its own for (``functional.quantize_4bit``), and entries of their table.
_SCALES_IN_BLOCK = 256

_LIBRARY = "bitsandbytes"


def from_bitsandbytes(value: object) -> bool:
    """True for the library's own weights and for what they keep."""
    return type(value).__module__.partition(".")[0] == _LIBRARY


#: Libraries whose quantised layers run compiled kernels of their own (GPTQ, AWQ, AQLM, EETQ, VPTQ).
_COMPILED = frozenset({"gptqmodel", "auto_gptq", "awq", "aqlm", "eetq", "vptq", "exllamav2"})


def compiled_elsewhere(module: nn.Module) -> str:
    """The library of a quantised layer whose kernels nobody can follow; "" for every other layer."""
    library = type(module).__module__.partition(".")[0]
    return library if library in _COMPILED else ""


def packs(tensor: torch.Tensor) -> bool:
    """True for a weight that lies on the GPU in 4 or 8 bits."""
    in_four_bits = hasattr(tensor, "quant_state")
    return from_bitsandbytes(tensor) and (in_four_bits or not getattr(tensor, "has_fp16_weights", True))


def packed(tensor: Any, dtype: torch.dtype | None, copied: Callable[[Any], Any]) -> nn.Parameter:
    """The symbolic twin of a weight as it lies on the GPU.

    Args:
        tensor: the weight; where it is not quantised yet, the library does that on its way to the GPU.
        dtype: of unquantised weights on the GPU; None: their own.
        copied: makes a symbolic copy of what a quantised weight keeps.
    """
    if hasattr(tensor, "quant_state"):
        if tensor.quant_state is not None:
            return _with(tensor, _like(tensor), quant_state=copied(tensor.quant_state))
        data, state = _in_four_bits(tensor, dtype or tensor.dtype)
        return _with(tensor, data, quant_state=state, bnb_quantized=True)
    twin = _with(tensor, torch.empty(tensor.shape, dtype=torch.int8, device="meta"))
    twin.__dict__["SCB"] = copied(tensor.SCB)
    if tensor.dtype != torch.int8:
        twin.__dict__["SCB"] = torch.empty(tensor.shape[0], device="meta")
    if tensor.dtype != torch.int8 or tensor.CB is not None:  # the layer takes both at its first forward
        twin.__dict__["CB"] = twin.detach()
    return twin


def _with(tensor: torch.Tensor, data: torch.Tensor, **attributes: Any) -> nn.Parameter:
    twin = nn.Parameter(data, requires_grad=False)
    twin.__dict__.update(vars(tensor))
    twin.__dict__.update(attributes)
    return twin


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _in_four_bits(weight: Any, dtype: torch.dtype) -> tuple[torch.Tensor, Any]:
    """What ``functional.quantize_4bit`` makes of a weight: the packed values, and the state with the scales."""
    kind = sys.modules[f"{_LIBRARY}.functional"].QuantState
    blocks = -(-weight.numel() // weight.blocksize)
    storage: torch.dtype = weight.quant_storage
    data = torch.empty(((weight.numel() + 1) // (2 * storage.itemsize), 1), dtype=storage, device="meta")
    known = {"shape": weight.shape, "blocksize": weight.blocksize, "quant_type": weight.quant_type, "dtype": dtype}
    code = torch.empty(16, device="meta")
    if not weight.compress_statistics:
        return data, kind(torch.empty(blocks, device="meta"), code=code, **known)
    of_scales = kind(
        torch.empty(-(-blocks // _SCALES_IN_BLOCK), device="meta"),
        code=torch.empty(_SCALES_IN_BLOCK, device="meta"),
        blocksize=_SCALES_IN_BLOCK,
        dtype=torch.float32,
    )
    scales = torch.empty(blocks, dtype=torch.uint8, device="meta")
    return data, kind(scales, code=code, offset=torch.empty((), device="meta"), state2=of_scales, **known)


def kept(value: Any) -> list[torch.Tensor]:
    """The tensors that a weight, or an object of the library, keeps beside the weight, in the order of ``to``."""
    if isinstance(value, torch.Tensor):
        held = (vars(value).get(name) for name in ("quant_state", "SCB"))
        return [tensor for one in held for tensor in ([one] if isinstance(one, torch.Tensor) else kept(one))]
    if not from_bitsandbytes(value):
        return []
    names = ("code", "absmax", "offset", "state2", "CB", "SCB")
    found: list[torch.Tensor] = []
    for one in (getattr(value, name, None) for name in names):
        found += [one] if isinstance(one, torch.Tensor) else kept(one)
    return found


def copied(value: Any, twin_of: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A copy of an object of the library with the twins of the tensors that it holds."""
    made = copy.copy(value)
    for name, one in vars(value).items():
        if isinstance(one, torch.Tensor):
            setattr(made, name, twin_of(one))
        elif from_bitsandbytes(one):
            setattr(made, name, copied(one, twin_of))
    return made
