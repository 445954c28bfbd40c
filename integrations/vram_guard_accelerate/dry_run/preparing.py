"""The first phase: the script until ``Accelerator.prepare``, real on the CPU, with a simulated GPU.

A script without Accelerate is followed from where its loop asks for the first batch, or calls its model first.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
from torch import nn

from vram_guard.language import _, marked
from vram_guard.simulate.parallel.own_replicas import replicas_in
from vram_guard.simulate.tracing.uncompiled import compiler_not_imported
from vram_guard_accelerate._alive import alive
from vram_guard_accelerate.apply.own_loop import ModelCalls, OwnLoop, models_on_gpu, optimizers_of
from vram_guard_accelerate.dry_run import own_ranks
from vram_guard_accelerate.dry_run._following import FollowingPhase
from vram_guard_accelerate.dry_run.cuda_shim import CudaShim
from vram_guard_accelerate.dry_run.phases import BatchIterator, DryRun, DryRunPhase
from vram_guard_accelerate.dry_run.results import stopped

#: What makes a script one that can be followed.
THREE_LINES = """
    accelerator = Accelerator()
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.backward(loss)  # in place of loss.backward()"""

#: Packages that run a training loop themselves, and what brings the guard into it.
_FRAMEWORKS = dict.fromkeys(
    ("lightning", "pytorch_lightning"),
    marked("it trains under Lightning: there the guard is a callback, Trainer(callbacks=[VramGuard()])"),
) | {
    "mmengine": marked(
        "it trains under MMEngine: there the guard is set in the config; start the script without vram-guard launch, "
        "with --cfg-options runner_type=vram_guard_mmengine.GuardRunner vram_guard.budget=10GiB"
    )
}


class PreparingPhase(DryRunPhase):
    """The script builds its models, data and optimizers."""

    def __init__(self, run: DryRun) -> None:
        super().__init__(run)
        self._shim = CudaShim(run.shape.capability, run.shape.memory)
        self._calls = ModelCalls(self._shim.holds, self._too_early, self._follow)

    def begins(self) -> None:
        """From the first line on there is a GPU, but for libraries, which would look for its driver."""
        self._compiler = compiler_not_imported()
        self._compiler.__enter__()  # for good: the process ends with the dry run
        self._shim.begin()
        self._calls.watch()

    def differentiates_for_real(self) -> None:
        """Refuse: from here on the script would train on the CPU, and write what it has trained."""
        if self.run.script.uses_accelerate:
            stopped(
                _(
                    "it computes gradients before Accelerator.prepare, which a dry run would do for real; prepare the "
                    "model, the optimizer and the loader first"
                )
            )
        own_ranks.refuse_divided_models()
        framework = _framework_that_trains()
        if framework:
            stopped(_(framework))
        stopped(
            _(
                "it trains without Accelerate, on the CPU: the loops that are followed train a model that was moved to "
                "the GPU, or one that Accelerate prepares, for which a script needs three lines:{lines}",
                lines=THREE_LINES,
            )
        )

    # --- scripts without Accelerate -----------------------------------------------------------------------------

    def next_batch(self, batches: BatchIterator) -> Any:
        """Where the models and optimizers are there, and Accelerate is not, the loop begins."""
        made = self.run.script.optimizers
        if self._may_follow and any(made):
            models = models_on_gpu(self._shim.holds)
            if optimizers_of(models, made):
                self._follow(models)
                return self.run.phase.next_batch(batches)
        return super().next_batch(batches)

    @property
    def _may_follow(self) -> bool:
        return self._shim.used and not self.run.script.uses_accelerate

    def _too_early(self, module: nn.Module) -> bool:
        """True for a check of the model before its optimizer is made, in eval mode."""
        if not self._may_follow:
            return True
        if optimizers_of([module], self.run.script.optimizers):
            return False
        own = (parameter for part in module.modules() if part.training for parameter in part.parameters(recurse=False))
        return not any(parameter.requires_grad for parameter in own)

    def _follow(self, models: list[nn.Module]) -> None:
        """From here on these models are symbolic, as if they had been prepared."""
        if self.run.shape.ranks > 1 and not any(map(replicas_in, models)):
            stopped(
                _(
                    "it trains without Accelerate and without DistributedDataParallel, which is followed in one "
                    "process only; launch it with --num_processes 1"
                )
            )
        loop = OwnLoop(self.run.script.optimizers)
        loop.train(models)
        self.prepare(lambda *_args, **_kwargs: None, loop, tuple(models), {})

    # --- scripts with Accelerate --------------------------------------------------------------------------------

    def prepare(self, original: Any, accelerator: Any, args: Any, kwargs: Any) -> Any:
        """The first ``prepare``: from here on, the process is symbolic."""
        self._calls.end()  # Dynamo would follow what lies around the calls of modules
        self.run.phase = self._next(accelerator)
        return self.run.phase.prepare(original, accelerator, args, kwargs)

    def _next(self, accelerator: Any) -> DryRunPhase:
        """What comes after this phase."""
        tensors = alive(torch.Tensor)
        moved, shared = self._shim.moved(tensors), self._shim.shared()
        del tensors  # what the script lets go of is gone
        self._shim.end()
        return FollowingPhase(self.run, accelerator, moved, shared, self._shim.loads)


def _framework_that_trains() -> str:
    """What is said of a training loop that a framework runs, which called this; "" where none does."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package in _FRAMEWORKS:
            return _FRAMEWORKS[package]
        frame = frame.f_back
    return ""
