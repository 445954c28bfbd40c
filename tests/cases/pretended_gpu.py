"""Imported first by a process whose torch is to believe in a GPU, on which nothing works.

Autograd starts a thread for it, and one that starts in a copy of the process ends that copy, as CUDA would.
"""

from __future__ import annotations

import ctypes
import os
import threading

import torch

from vram_guard.forks import autograd_threads

_process, _main = os.getpid(), threading.get_ident()


def _answers(_gpu: int | None) -> int:
    """Of every method of the GPU: CUDA's number among the types of devices is 1, and so is the number of GPUs."""
    if os.getpid() != _process and threading.get_ident() != _main:
        os.abort()
    return 1


_method = ctypes.CFUNCTYPE(ctypes.c_int8, ctypes.c_void_p)(_answers)
_methods = (ctypes.c_void_p * 64)(*[ctypes.cast(_method, ctypes.c_void_p).value] * 64)
_gpu = (ctypes.c_void_p * 1)(ctypes.addressof(_methods))
autograd_threads._registered()[autograd_threads._CUDA] = ctypes.addressof(_gpu)  # type: ignore[index]
torch._C._cuda_getDeviceCount = lambda: 1  # type: ignore[attr-defined]
torch.cuda._is_compiled = lambda: False  # type: ignore[attr-defined]


def _cuda_fails(*_args: object) -> None:
    raise RuntimeError("CUDA error: initialization error")


def _in_copy() -> None:
    """What a copy of a process finds that has used CUDA."""
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    torch.cuda.mem_get_info = _cuda_fails  # type: ignore[assignment]
    torch.cuda.is_current_stream_capturing = _cuda_fails
    if hasattr(torch, "accelerator"):
        torch.accelerator.current_accelerator = lambda check_available=False: torch.device("cuda")
        torch.accelerator.current_stream = _cuda_fails  # type: ignore[assignment]


os.register_at_fork(after_in_child=_in_copy)
