"""Launches of Triton kernels do nothing in a trace: a kernel takes no memory, what the Python around it makes is seen.

Nothing is compiled and no GPU is asked for. The first launch of an autotuned kernel measures its configurations, and
clears the L2 cache between them with a buffer of its own (``triton/runtime/autotuner.py``, and
``get_empty_cache_for_benchmark`` of ``backends/nvidia/driver.py``): that one is counted.
"""

from __future__ import annotations

import contextlib
import sys
from types import SimpleNamespace
from typing import Any

import torch

from vram_guard.patching import replaced
from vram_guard.simulate.device.capability import Capability
from vram_guard.simulate.device.cuda_module import CUDA
from vram_guard.simulate.device.import_guard import Activity

#: Bytes of the buffer that clears the L2 cache.
_CACHE = 256 * 2**20


class _Driver:
    """Triton's driver, as code around kernels asks it."""

    def __init__(self, capability: Capability) -> None:
        self._capability = capability
        self.utils = SimpleNamespace(get_device_properties=self._properties)

    @property
    def target(self) -> SimpleNamespace:
        major, minor = self._capability.version
        return SimpleNamespace(backend="cuda", arch=10 * major + minor, warp_size=32)

    def get_current_target(self) -> object:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return CUDA

    def get_current_stream(self, _device: object = 0) -> int:
        return 0

    def _properties(self, device: object) -> dict[str, int]:
        return {
            "multiprocessor_count": torch.cuda.get_device_properties(device).multi_processor_count,  # type: ignore[arg-type]
            "max_shared_mem": 164 * 1024,  # CUDA C++ Programming Guide, table of compute capabilities: 8.0
            "max_num_regs": 65536,
            "warpSize": 32,
        }


class TritonLaunches:
    """Takes over the launches; a Triton that is imported during the trace is treated so from its import on.

    Args:
        state: launches are as always while it is not active.
        capability: of the GPU that is simulated.
        stack: gives Triton back.
    """

    def __init__(self, state: Activity, capability: Capability, stack: contextlib.ExitStack) -> None:
        self._state = state
        self._capability = capability
        self._stack = stack
        self._done = False
        self._tuned: set[int] = set()

    def look(self) -> None:
        """Take over the launches, if Triton is there."""
        jit, tuner = sys.modules.get("triton.runtime.jit"), sys.modules.get("triton.runtime.autotuner")
        if self._done or jit is None or tuner is None or not hasattr(tuner, "Heuristics"):
            return
        self._done = True
        config: Any = sys.modules["triton.runtime.driver"].driver
        active = "_active" if hasattr(config, "_active") else "active"
        for kind, launch in ((jit.JITFunction, None), (tuner.Heuristics, None), (tuner.Autotuner, self._tune)):
            self._stack.enter_context(replaced(kind, {"run": self._launch(kind.run, launch)}))
        self._stack.enter_context(replaced(config, {active: _Driver(self._capability)}))

    def _launch(self, original: Any, first: Any) -> Any:
        def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._state.active:
                return original(kernel, *args, **kwargs)
            if first is not None:
                first(kernel)
            return None

        return run

    def _tune(self, kernel: Any) -> None:
        if len(kernel.configs) > 1 and id(kernel) not in self._tuned:
            self._tuned.add(id(kernel))
            torch.empty(_CACHE // 4, dtype=torch.int, device=CUDA)
