"""Tensors on a GPU, for a copy of the process: CUDA does not work there, so their values are brought to the host.

MMEngine's Runner and transformers' Trainer place a model on the GPU as they are made, before anything of the training
can be looked at.
"""

from __future__ import annotations

import gc
import logging
import sys
from typing import TYPE_CHECKING

from vram_guard.budget.host import host_memory
from vram_guard.limits import SHARE_OF_FREE_MEMORY
from vram_guard.units import format_bytes

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


class HostCopies:
    """The values of this process's tensors on GPUs, read before the process is copied.

    Tensors that share memory share it on the host too. Tensors of classes of their own, and all of them where the host
    has too little memory, stay on the GPU, where a copy of the process cannot read them.

    Example:
        >>> HostCopies().take_over()  # no GPU was used: nothing to do
    """

    def __init__(self) -> None:
        self._tensors = _gpu_tensors()
        self._storages: dict[int, torch.UntypedStorage] = {}
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in self._tensors}
        size = sum(storage.nbytes() for storage in storages.values())
        if size > SHARE_OF_FREE_MEMORY * host_memory().available:
            logger.warning("%s on the GPU are not read: the host has too little memory", format_bytes(size))
            self._tensors = []
        else:
            self._storages = {address: storage.cpu().clone() for address, storage in storages.items()}

    def take_over(self) -> None:
        """Called in the copy: the tensors, the same objects, lie on the host from now on."""
        import torch

        kept = []
        with torch.no_grad():
            for tensor in self._tensors:
                storage = self._storages[tensor.untyped_storage().data_ptr()]
                kept.append(tensor.data)  # CUDA's allocator is not told of an end here: it would call CUDA
                host = torch.empty(0, dtype=tensor.dtype, device="cpu")
                tensor.data = host.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
        _never_freed.extend(kept)


_never_freed: list[torch.Tensor] = []


def _gpu_tensors() -> list[torch.Tensor]:
    """All that Python code of this process can reach; none where CUDA was not used, or was in the original only."""
    torch = sys.modules.get("torch")
    # What torch.cuda.is_initialized answers, but for the real device even while a trace runs.
    if torch is None or not torch.cuda._initialized or torch.cuda._is_in_bad_fork():  # noqa: SLF001
        return []
    kinds = [getattr(torch.nn, name) for name in ("Parameter", "Buffer") if hasattr(torch.nn, name)]
    found = [one for one in gc.get_objects() if type(one) in (torch.Tensor, *kinds)]
    on_gpu = torch._C.TensorBase.is_cuda.__get__  # noqa: SLF001 - as above
    return [one for one in found if on_gpu(one) and one.layout is torch.strided and not one.is_inference()]
