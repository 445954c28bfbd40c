"""Recognise errors that say that device memory ran out.

PyTorch has a class for its own allocator's refusals only. Libraries below it (cuBLAS, cuDNN, NCCL, the driver)
report the same thing as a ``RuntimeError`` with a text of their own, so texts have to be read, and read
narrowly: retrying after an illegal memory access would train on with a broken CUDA context.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

#: Texts of a ``RuntimeError`` that mean "no memory". Sources: c10/cuda/CUDACachingAllocator.cpp and
#: c10/cuda/CUDAException ("CUDA out of memory", "CUDA error: out of memory", "CUDA driver error: out of memory"),
#: the status enumerations of cuBLAS, cuDNN, cuSPARSE, cuSOLVER, cuFFT and their ROCm kin as ATen prints them,
#: NCCL's and torch's NCCLUtils ("Failed to CUDA calloc", "Cuda failure 2 'out of memory'"),
#: aten/src/ATen/mps/MPSAllocator.mm, c10/xpu/XPUCachingAllocator.cpp, c10/core/impl/alloc_cpu.cpp.
_NO_MEMORY = re.compile(
    r"""
      \b(cuda|hip|mps\ backend|xpu)\ out\ of\ memory
    | \b(cuda|hip)\ (driver\ )?error:\ out\ of\ memory
    | \b(cudaErrorMemoryAllocation|hipErrorOutOfMemory|CUDA_ERROR_OUT_OF_MEMORY)\b
    | \b(cublas|cudnn|cusolver|cusparse|hipblas|hipsolver|hipsparse)_status_alloc_failed\b
    | \bcusparse_status_insufficient_resources\b
    | \bcufft_alloc_failed\b | \bhipfft_alloc_failed\b
    | \bmiopenStatusAllocFailed\b | \brocblas_status_memory_error\b
    | \bnccl[\s\S]*(out\ of\ memory|failed\ to\ cuda\ (host\ )?(m|c)alloc)
    | \bfailed\ to\ cuda\ calloc\b
    | \bDefaultCPUAllocator:\ (can't\ allocate|not\ enough)\ memory
    """,
    re.IGNORECASE | re.VERBOSE,
)

#: After these the context is broken, or the memory is that of another process: nothing here can help.
_SOMETHING_ELSE = re.compile(
    r"illegal memory access|illegal instruction|misaligned address|device-side assert triggered"
    r"|unspecified launch failure|uncorrectable ECC|in DataLoader worker process|in pin memory thread",
    re.IGNORECASE,
)


def is_out_of_memory(error: BaseException) -> bool:
    """Check whether an error, or what it was raised from, says that device memory ran out.

    Recognised: ``torch.OutOfMemoryError`` (also of HIP and XPU builds), the texts of the CUDA runtime and driver, of
    cuBLAS, cuDNN, cuSPARSE, cuSOLVER, cuFFT, NCCL and their ROCm kin, of MPS, and of PyTorch's CPU allocator. An
    error wrapped into another one (``raise ... from``, or raised while the first was handled) counts like it.

    Never: an illegal memory access or another error that breaks the CUDA context, Python's own ``MemoryError``,
    anything out of a data loader's worker, and what vram_guard raises itself after it gave up.
    """
    from vram_guard.errors import VramGuardError

    chain = list(_chain(error))
    if any(isinstance(link, VramGuardError) or _SOMETHING_ELSE.search(str(link)) for link in chain):
        return False
    return any(_says_so(link) for link in chain)


def _says_so(error: BaseException) -> bool:
    import torch

    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error)) is not None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and what it was raised from, the latest first; rings are walked once."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
