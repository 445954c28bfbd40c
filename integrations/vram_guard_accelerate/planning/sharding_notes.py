"""Parameters on the host by FSDP2, in a plan: where they cannot be, and what whoever chooses them should know."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from vram_guard.errors import UnsupportedTechniqueError
from vram_guard.plan.descriptions import not_possible
from vram_guard.private_names import missing_in_words
from vram_guard.techniques.sharding import check_torch
from vram_guard_accelerate.apply.sharded_saving import lines_that_save_shards
from vram_guard_accelerate.private_api import FSDP2

if TYPE_CHECKING:
    from vram_guard.plan import Plan
    from vram_guard_accelerate.dry_run.run import DryRun

SHARDS = (
    "parameters on the host (Accelerate's FSDP2): the model's parameters are DTensors in the script's hands; "
    "save_state writes FSDP's files, and load_state reads no others"
)

SHARES = (
    "each process holds its share of parameters, gradients and optimizer states; what one process alone does with the "
    "model (an evaluation under is_main_process) waits for the others, for ever. accelerator.get_state_dict(model), "
    "save_model and save_pretrained(..., is_main_process=...) write whole tensors, called by all processes"
)

UNTRIED = (
    "parameters on the host were not tried: they change what a script's checkpoints and state dicts hold, and are used "
    "only where they are named (--allow ...,offload_parameters)"
)


def why_not_sharded(run: DryRun, *, compiled: bool) -> str:
    """Why parameters cannot wait on the host in this script; "" where nothing is known against it.

    What is not seen here (tied weights, lists of parameters that are clipped, averages of weights) is seen when a copy
    of the script is followed.

    Args:
        run: the script, at its first training batch.
        compiled: whether ``torch.compile`` compiles a model as a whole.
    """
    try:
        check_torch()  # Accelerate wants no other torch than we do (``FSDP2_PYTORCH_VERSION``)
    except UnsupportedTechniqueError as error:
        return str(error)
    lacking = missing_in_words(FSDP2)
    if lacking:
        return f"FSDP2 needs Accelerate 1.6 or later; this one lacks {lacking[0]}"
    if run.standby is None:
        return "it has to be known before the Accelerator is made: name it in --allow of vram-guard launch"
    if len(run.models) != 1:
        return f"Accelerate's FSDP2 takes one model, and the script prepares {len(run.models)}"
    if not any(parameter.requires_grad for parameter in run.root.parameters()):
        return "FSDP2 is prepared with an optimizer of the model, and this one is not trained"
    if run.precision == "16-mixed":
        return "the GradScaler of fp16 unscales gradients on the GPU, and these would be on the host"
    if compiled:
        return "torch.compile over FSDP2 is not followed"
    return ""


def about_sharding(run: DryRun, plan: Plan) -> list[str]:
    """What a reader of the plan should know of it."""
    if not plan.recipe.parameters_on_host:
        untried = [] if plan.fits or run.may_shard or len(run.models) != 1 else [UNTRIED]
        return (
            [not_possible("offload_parameters", run.traces.why_not_sharded)] if run.traces.why_not_sharded else untried
        )
    notes = [SHARDS]
    if plan.precision == "bf16-mixed":
        notes.append(
            "under FSDP2, Accelerate's bf16 is no autocast: the model computes in bfloat16 throughout, losses that it "
            "returns too, and gradients are reduced in bfloat16; parameters and optimizer states stay in float32"
        )
    if run.ranks > 1:
        notes.append(SHARES)
        notes += _about_saving(sys.argv[0])
    return notes


def _about_saving(script: str) -> list[str]:
    lines = lines_that_save_shards(script)
    if not lines:
        return []
    where = f"{Path(script).name}, line{'s' if len(lines) > 1 else ''} {', '.join(map(str, lines))}"
    note = (
        f"if this is the sharded model, it is saved in shards, or not at all ({where}): save_pretrained wants "
        "state_dict=accelerator.get_state_dict(model), called by all processes, and so does torch.save"
    )
    return [note]
