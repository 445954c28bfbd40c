"""Autograd without a thread for each GPU, in copies of a process that trains on none.

torch's autograd starts a thread for every GPU at the first backward pass of a process. In a copy of a process that has
used CUDA, such a thread ends the copy: CUDA does not work there (`issue 33248
<https://github.com/pytorch/pytorch/issues/33248>`_). And where these threads run, torch refuses backward passes in
further copies. A copy that follows symbolic tensors and computes on the CPU needs none: autograd is made to start while
no GPU is registered (``Engine::start_device_threads`` in ``torch/csrc/autograd/engine.cpp`` asks
``c10::impl::device_guard_impl_registry`` for their number).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from pathlib import Path

#: ``c10::impl::device_guard_impl_registry``: one pointer for each type of device.
_REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"

#: ``c10::DeviceType::CUDA``, which is ROCm's too.
_CUDA = 1


def start_without_gpus() -> None:
    """Have autograd start as the first backward pass of a process does, for no GPU; nothing is computed.

    Called first in a copy of a process. Where autograd of the original has threads already, backward passes are refused
    in the copy as before. In the middle of a backward pass nothing is started: that pass is still to go on.

    Example:
        >>> start_without_gpus()
    """
    import torch

    if torch._C._current_graph_task_id() != -1:  # noqa: SLF001 - there is no public word for it
        return
    engine = torch.autograd.Variable._execution_engine  # noqa: SLF001 - torch.autograd.backward wants tensors
    with _no_gpu_registered(), contextlib.suppress(RuntimeError):
        engine.run_backward((), (), False, False, (), allow_unreachable=True, accumulate_grad=True)


@contextlib.contextmanager
def _no_gpu_registered() -> Iterator[None]:
    registered = _registered()
    if registered is None:
        yield
        return
    found, registered[_CUDA] = registered[_CUDA], None
    try:
        yield
    finally:
        registered[_CUDA] = found


@functools.cache
def _registered() -> ctypes.Array[ctypes.c_void_p] | None:
    import torch

    library = Path(torch.__file__).parent / "lib" / "libc10.so"
    try:
        return (ctypes.c_void_p * (_CUDA + 1)).in_dll(ctypes.CDLL(str(library)), _REGISTRY)
    except (OSError, ValueError):  # a torch that is built otherwise: its autograd starts as it always does
        return None
