"""Where DeepSpeed can be set up otherwise than a script is launched, and where it would be another training.

What stage 3 leaves empty between forwards (weights that a script reads, averages of them) is seen when the script is
followed so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vram_guard.language import _
from vram_guard.parallel import deepspeed

if TYPE_CHECKING:
    from vram_guard_accelerate.dry_run.first_batch import FirstBatch

#: Stages that divide more than the one before.
LAST = max(deepspeed.STAGES.values())


def stage_of(first: FirstBatch) -> int:
    """The stage of ZeRO that the engine was made with; 0 where there is none."""
    return 0 if first.engine is None else deepspeed.STAGES[str(first.engine.kind)]


def why_not_next_stage(first: FirstBatch) -> str:
    """The reason why no other stage divides more; "" where the next one does."""
    if stage_of(first) == LAST:
        return _("stage {stage} of DeepSpeed's ZeRO divides everything already", stage=LAST)
    return _why_not_changed(first)


def why_not_states_on_host(first: FirstBatch) -> str:
    """The reason why DeepSpeed cannot keep this optimizer's states in host memory; "" where it can."""
    config = first.accelerator.deepspeed_plugin.deepspeed_config
    if "offload_optimizer" in deepspeed.offloaded(config):
        return _("DeepSpeed keeps them there already")
    if "optimizer" in config:
        return _("the DeepSpeed config names the optimizer, in whose place DeepSpeed takes another one on the host")
    kind = _own_optimizer(first)
    if not kind.__module__.startswith("torch.optim"):
        return _("{name} is not one of torch's optimizers, which step on the host too", name=kind.__name__)
    return _why_not_changed(first)


def _why_not_changed(first: FirstBatch) -> str:
    if first.script.resumed.files:
        return _("the script goes on from a checkpoint that was written as it is launched")
    return ""


def _own_optimizer(first: FirstBatch) -> type:
    """The class of the script's optimizer, inside what Accelerate and DeepSpeed put around it."""
    found: Any = next(iter(first.accelerator._optimizers), None)  # noqa: SLF001 - see private_api.py
    while hasattr(found, "optimizer"):
        found = found.optimizer
    return type(found)
