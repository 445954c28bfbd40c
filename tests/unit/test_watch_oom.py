"""What counts as out of memory, and what is left of such an error."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import oom_cases
import torch
from each import each

from vram_guard.errors import RecoveryFailedError
from vram_guard.watch.memory import drop_traceback, free
from vram_guard.watch.oom import is_out_of_memory

#: What torch 2.13 appends to errors of the CUDA runtime; it must not be mistaken for an assertion that failed.
APPENDED = (
    "\nSearch for `cudaErrorMemoryAllocation' in https://docs.nvidia.com/cuda/cuda-runtime-api for more information."
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\nCompile with `TORCH_USE_CUDA_DSA` to enable "
    "device-side assertions."
)


@each(
    "text",
    [
        "CUDA out of memory. Tried to allocate 20.00 MiB",
        "CUDA error: out of memory" + APPENDED,
        "CUDA driver error: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
        "NCCL error in: NCCLUtils.hpp:275, unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'",
        "Failed to CUDA calloc async 608 bytes",
        "HIP out of memory. Tried to allocate 2.00 GiB",
        "HIP error: out of memory",
        "MPS backend out of memory (MPS allocated: 17.43 GiB, other allocations: 544.00 KiB)",
        "XPU out of memory. Tried to allocate 2.00 GiB",
        "[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to",
        "[enforce fail at alloc_cpu.cpp:80] data. DefaultCPUAllocator: not enough memory: you tried to allocate 8.",
    ],
)
def test_is_out_of_memory(text: str) -> None:
    assert is_out_of_memory(RuntimeError(text))
    assert not is_out_of_memory(ValueError(text)), "somebody else's error that quotes it"


@each(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered" + APPENDED),
        RuntimeError("CUDA error: device-side assert triggered" + APPENDED),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"),
        RuntimeError("NCCL error: unhandled system error, NCCL version 2.21.5"),
        RuntimeError("shape '[2, 3]' is invalid for input of size 7"),
        RuntimeError("Caught RuntimeError in DataLoader worker process 0.\nDefaultCPUAllocator: can't allocate memory"),
        MemoryError(),
        MemoryError("Caught MemoryError in DataLoader worker process 0."),
        KeyboardInterrupt(),
        RecoveryFailedError("CUDA out of memory"),
    ],
)
def test_is_something_else(error: BaseException) -> None:
    assert not is_out_of_memory(error)


def caught(raising: Any) -> BaseException:
    try:
        raising()
    except BaseException as error:  # noqa: BLE001 - whatever it is
        return error
    raise AssertionError


def test_wrapped_errors() -> None:
    def explicitly() -> None:
        try:
            raise oom_cases.no_memory()
        except RuntimeError as error:
            raise ValueError("my layer failed") from error

    def while_handling() -> None:
        try:
            raise oom_cases.no_memory()
        except RuntimeError:
            {}["missing"]

    def hidden() -> None:
        try:
            raise oom_cases.no_memory()
        except RuntimeError:
            raise ValueError("has nothing to do with it") from None

    def broken_context() -> None:
        try:
            raise oom_cases.no_memory()
        except RuntimeError as error:
            raise RuntimeError("CUDA error: an illegal memory access was encountered") from error

    def given_up() -> None:
        try:
            raise oom_cases.no_memory()
        except RuntimeError as error:
            raise RecoveryFailedError("no smaller micro-batch") from error

    assert is_out_of_memory(oom_cases.no_memory())
    assert is_out_of_memory(caught(explicitly))
    assert is_out_of_memory(caught(while_handling))
    assert not is_out_of_memory(caught(hidden))
    assert not is_out_of_memory(caught(broken_context))
    assert not is_out_of_memory(caught(given_up))
    ring = RuntimeError("first")
    ring.__context__ = other = RuntimeError("second")
    other.__context__ = ring
    assert not is_out_of_memory(ring)


def test_the_real_cpu_allocator() -> None:
    error = caught(lambda: torch.empty(2**60, dtype=torch.uint8))
    assert is_out_of_memory(error)


def test_what_the_traceback_held_is_let_go() -> None:
    held: list[weakref.ref[torch.Tensor]] = []

    def broken() -> None:
        activations = torch.zeros(1000)
        held.append(weakref.ref(activations))
        try:
            raise oom_cases.no_memory()
        except RuntimeError as error:
            raise ValueError("wrapped") from error

    error = caught(broken)
    assert held[0]() is not None
    failure = drop_traceback(error)
    free(None)
    assert held[0]() is None
    assert failure.kind == "ValueError"
    assert "in broken" in failure.trace
    assert oom_cases.TEXT in failure.trace
    gc.collect()
