"""The first phase: the script until ``Accelerator.prepare``, real on the CPU, with a simulated GPU."""

from __future__ import annotations

from typing import Any

from vram_guard_accelerate.dry_run._cuda_shim import CudaShim
from vram_guard_accelerate.dry_run._following import FollowingPhase
from vram_guard_accelerate.dry_run.phases import DryRun, Phase


class PreparingPhase(Phase):
    """The script builds its models, data and optimizers."""

    def __init__(self, run: DryRun) -> None:
        super().__init__(run)
        self._shim = CudaShim(run.shape.capability)

    def state_made(self) -> None:
        """From here on there is a GPU. Not earlier: libraries that are imported would look for its driver."""
        self._shim.begin()

    def prepare(self, original: Any, accelerator: Any, args: Any, kwargs: Any) -> Any:
        """The first ``prepare``: from here on, the process is symbolic."""
        self.run.phase = FollowingPhase(self.run, accelerator, self._shim.end())
        return self.run.phase.prepare(original, accelerator, args, kwargs)
