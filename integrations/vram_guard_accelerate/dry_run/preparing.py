"""The first phase: the script until ``Accelerator.prepare``, real on the CPU, with a simulated GPU."""

from __future__ import annotations

from typing import Any

from torch import nn

from vram_guard.language import _
from vram_guard_accelerate.dry_run._cuda_shim import CudaShim
from vram_guard_accelerate.dry_run._following import FollowingPhase
from vram_guard_accelerate.dry_run._fork_server import ForkServer
from vram_guard_accelerate.dry_run._proving import ProvingPhase
from vram_guard_accelerate.dry_run.forks import ForkEntered
from vram_guard_accelerate.dry_run.phases import DryRun, Phase
from vram_guard_accelerate.dry_run.results import stopped

#: Bytes of weights and buffers. A model that is larger takes too long on a CPU, and its weights would stay in memory.
LARGEST_PROVEN = 4 * 2**30


class PreparingPhase(Phase):
    """The script builds its models, data and optimizers."""

    def __init__(self, run: DryRun) -> None:
        super().__init__(run)
        self._shim = CudaShim(run.shape.capability)

    def state_made(self) -> None:
        """From here on there is a GPU. Not earlier: libraries that are imported would look for its driver."""
        self._shim.begin()

    def differentiates_for_real(self) -> None:
        """Refuse: from here on the script would train on the CPU, and write what it has trained."""
        if self.run.script.uses_accelerate:
            stopped(
                _(
                    "it computes gradients before Accelerator.prepare, which a dry run would do for real; prepare the "
                    "model, the optimizer and the loader first"
                )
            )
        stopped(
            _(
                "it trains without Accelerate, whose loops are followed here; make it one of them with accelerator = "
                "Accelerator(), model, optimizer, loader = accelerator.prepare(model, optimizer, loader), and "
                "accelerator.backward(loss) in place of loss.backward()"
            )
        )

    def prepare(self, original: Any, accelerator: Any, args: Any, kwargs: Any) -> Any:
        """The first ``prepare``: from here on, the process is symbolic, and its copies that prove a plan are real."""
        try:
            if self._may_be_proven(args):
                self.run.proof_server = ForkServer()
            self.run.phase = FollowingPhase(self.run, accelerator, self._shim.end())
        except ForkEntered as entered:
            self.run.sharding.take_off()
            self.run.phase = ProvingPhase(self.run, entered.task, entered.parent)
        return self.run.phase.prepare(original, accelerator, args, kwargs)

    def _may_be_proven(self, prepared: tuple[Any, ...]) -> bool:
        models = [thing for thing in prepared if isinstance(thing, nn.Module)]
        weights = sum(one.nbytes for model in models for one in (*model.parameters(), *model.buffers()))
        return self.run.may_prove and self.run.sharding.may_be_proven and weights <= LARGEST_PROVEN
