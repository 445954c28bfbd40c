"""Operands of matrix products that cuBLAS cannot read as they lie (Blas.cpp)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

#: Operator -> the position of its first matrix.
_FIRST = {"aten::bmm": 0, "aten::baddbmm": 1, "aten::mm": 0, "aten::addmm": 1}


def copied_operands(func: Any, args: tuple[Any, ...], out: torch.Tensor) -> list[int]:
    """Bytes of each operand's copy, in the order in which they are made; they live as long as the call.

    cuBLAS writes columns: for a result of rows it multiplies the transposed matrices, the second one first
    (``bmm_out_cuda_impl``, ``cublasCommonArgs``).
    """
    at = _FIRST.get(func._schema.name)
    if at is None or not out.numel():
        return []
    left, right = args[at : at + 2]
    if left.dim() == 2:
        copied = (tensor for tensor in (right, left) if _is_copied_matrix(tensor))
        return [tensor.numel() * tensor.element_size() for tensor in copied]
    columns = out.stride(1) == 1 and (out.shape[2] == 1 or out.stride(2) >= max(1, out.shape[1]))
    inner = left.shape[2]
    if columns:
        pairs = (left, out.shape[1], inner), (right, inner, out.shape[2])
    else:
        pairs = (right, out.shape[2], inner), (left, inner, out.shape[1])
    copied = (tensor for tensor, rows, width in pairs if _is_copied(tensor, rows, width, fast=1 if columns else 2))
    return [tensor.numel() * tensor.element_size() for tensor in copied]


def _is_copied_matrix(tensor: torch.Tensor) -> bool:
    """``prepare_matrix_for_cublas``: neither its rows nor its columns lie one after the other."""
    (rows, columns), (down, across) = tensor.shape, tensor.stride()
    by_columns = down == 1 and across >= max(1, rows)
    return not (tensor.is_contiguous() or by_columns or (across == 1 and down >= max(1, columns)))


def _is_copied(tensor: torch.Tensor, rows: int, width: int, *, fast: int) -> bool:
    """``prepare_batch_matrix_for_cublas``: neither its rows nor its columns lie one after the other.

    A conjugate is read as one only where it is transposed too.
    """
    leading = 3 - fast
    if tensor.stride(fast) == 1 and tensor.stride(leading) >= max(1, rows):
        return tensor.is_conj()
    if tensor.stride(leading) == 1 and tensor.stride(fast) >= max(1, width):
        return False
    if tensor.is_contiguous() and tensor.stride(1) != 0 and tensor.stride(2) != 0:
        return fast == 2 and tensor.is_conj()
    return True
