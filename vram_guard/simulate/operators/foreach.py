"""What operators on lists of tensors hold besides their results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from vram_guard.simulate.memory.recorder import Recorder

#: ``ForeachReduceOp.cu``, ``foreach_tensor_norm_cuda``.
NORMS = frozenset({"aten::_foreach_norm"})

#: Elements of a chunk: ``MultiTensorApply.cuh``, ``kChunkSize``.
_CHUNK = 65536


def norm_parts(recorder: Recorder, func: Any, tensors: Sequence[torch.Tensor]) -> list[int | None]:
    """Hold what norms are gathered in, until they are done: room for the chunks of the largest tensor, for each one."""
    if func._schema.name not in NORMS or recorder.on_host(tensors[0]):
        return []
    chunks = max(-(-tensor.numel() // _CHUNK) for tensor in tensors)
    width = 8 if tensors[0].dtype == torch.float64 else 4
    return [recorder.hold(len(tensors) * chunks * width, str(func))]
