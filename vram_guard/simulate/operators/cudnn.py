"""Convolutions as PyTorch describes them to cuDNN, and the cuDNN that is asked for their workspaces, if any.

:mod:`.cudnn_library` asks an installed cuDNN, without a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Literal, NamedTuple, Protocol

from vram_guard.timeline import CudnnAnswers

Direction = Literal["forward", "backward_data", "backward_filter"]
Element = Literal["float32", "float16", "bfloat16"]

#: By compute capability: shared memory that a block can opt in to, and that the system reserves for each block, both
#: in bytes; blocks and threads resident on a multiprocessor. CUDA C++ Programming Guide, "Technical Specifications per
#: Compute Capability" and the sections on shared memory.
_LIMITS: dict[tuple[int, int], tuple[int, int, int, int]] = {
    (7, 0): (98304, 0, 32, 2048),
    (7, 5): (65536, 0, 16, 1024),
    (8, 0): (166912, 1024, 32, 2048),
    (8, 6): (101376, 1024, 16, 1536),
    (8, 9): (101376, 1024, 24, 1536),
    (9, 0): (232448, 1024, 32, 2048),
    (10, 0): (232448, 1024, 32, 2048),
    (10, 3): (232448, 1024, 32, 2048),
    (12, 0): (101376, 1024, 24, 1536),
}


class DeviceProperties(NamedTuple):
    """The description of a GPU that cuDNN is given."""

    capability: tuple[int, int]
    multiprocessors: int
    memory: int
    """Bytes, as CUDA reports them."""
    l2_cache: int
    """Bytes."""
    clock: int
    """Of the multiprocessors, in kHz."""
    memory_clock: int
    """In kHz."""

    @classmethod
    def of(cls, capability: tuple[int, int]) -> DeviceProperties:
        """Some GPU of this compute capability.

        cuDNN 9.8 and 9.26 answered alike for 833 convolutions of five networks whatever number of multiprocessors,
        memory, cache and clocks they were told; only the capability counted. The figures here are those of an RTX 3060.
        """
        return cls(capability, 28, 12 * 2**30, 2304 * 1024, 1777000, 7501000)

    def json(self) -> str:
        """The description that cuDNN reads.

        Raises:
            KeyError: nothing is known of this compute capability.
        """
        shared, reserved, blocks, threads = _LIMITS[self.capability]
        major, minor = self.capability
        return json.dumps(
            {
                "deviceVer": 100 * major + 10 * minor,
                "multiProcessorCount": self.multiprocessors,
                "warpSize": 32,
                "maxSharedMemoryPerBlock": 48 * 1024,
                "maxSharedMemoryPerBlockOptin": shared,
                "reservedSharedMemoryPerBlock": reserved,
                "maxRegistersPerSM": 65536,
                "maxCtasPerSM": blocks,
                "maxThreadsPerBlock": 1024,
                "maxThreadsPerSM": threads,
                "regsPerBlock": 65536,
                "totalGlobalMem": self.memory,
                "smClockRateKHz": self.clock,
                "l2CacheSize": self.l2_cache,
                "maxBlockSize": [1024, 1024, 64],
                "memClockRateKHz": self.memory_clock,
                "maxGridSize": [2**31 - 1, 65535, 65535],
                "supportCoopLaunch": 1,
                "pciDeviceId": 0,
                "isTccDriver": 0,
                "cudaDeviceId": 0,
                "driverVer": 12040,
                "deviceName": "",
            }
        )


class Tensor(NamedTuple):
    """Sizes and strides, in elements."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]


class Convolution(NamedTuple):
    """One call of a convolution, in one direction, as PyTorch describes it to cuDNN."""

    direction: Direction
    element: Element
    source: Tensor
    """The input, or its gradient."""
    weight: Tensor
    out: Tensor
    padding: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    allow_tf32: bool = True
    deterministic: bool = False


class CudnnRefusedError(Exception):
    """A cuDNN that gives no answers: it was told of a GPU and did not take it; the message says why."""


class WorkspaceSource(Protocol):
    """Something that knows the workspaces of convolutions."""

    @property
    def release(self) -> str:
        """Its release, as "9.26.0"."""

    def check(self, device: DeviceProperties, /) -> None:
        """Raise :class:`CudnnRefusedError` if it does not answer for this GPU."""

    def workspace(self, call: Convolution, device: DeviceProperties, /) -> int | None:
        """Bytes of workspace of this call on this GPU; None where nothing is known."""


Answer = Callable[[Convolution], "int | None"]

_answer: ContextVar[Answer | None] = ContextVar("_answer", default=None)
_asked: ContextVar[CudnnAnswers | None] = ContextVar("_asked", default=None)


def workspace(call: Convolution) -> int | None:
    """Bytes of workspace for this call; None where no library is asked, or nothing is known."""
    answer = _answer.get()
    return None if answer is None else answer(call)


@contextlib.contextmanager
def asking(library: WorkspaceSource, device: DeviceProperties) -> Iterator[CudnnAnswers]:
    """While the block runs, :func:`workspace` answers for this device, unless the library refuses it."""
    token = _answer.set(functools.lru_cache(maxsize=None)(lambda call: library.workspace(call, device)))
    try:
        library.check(device)
    except CudnnRefusedError as error:
        answers = CudnnAnswers(library.release, str(error))
        _answer.set(None)
    else:
        answers = CudnnAnswers(library.release)
    said = _asked.set(answers)
    try:
        yield answers
    finally:
        _asked.reset(said)
        _answer.reset(token)


def asked() -> CudnnAnswers | None:
    """The cuDNN that is asked at this moment, or would be; None where none is."""
    return _asked.get()
