"""Parameters on the host by FSDP2, in a plan: where they are not possible, and what to know before choosing them."""

from __future__ import annotations

import sys
from pathlib import Path

from vram_guard.errors import UnsupportedTechniqueError
from vram_guard.guard.refusals import Refusal
from vram_guard.language import _
from vram_guard.plan import Plan
from vram_guard.private_names import missing_in_words
from vram_guard.techniques.sharding import check_torch
from vram_guard_accelerate._settings import Settings
from vram_guard_accelerate.apply.sharded_saving import lines_that_save_shards
from vram_guard_accelerate.dry_run.first_batch import FirstBatch
from vram_guard_accelerate.private_api import FSDP2


def why_not_sharded(first: FirstBatch) -> str:
    """The reason why parameters cannot be kept on the host in this script; "" where nothing is known against it.

    What is not seen here (tied weights, lists of parameters that are clipped, averages of weights) is seen when a copy
    of the script is followed.
    """
    try:
        check_torch()  # Accelerate wants no other torch than we do (``FSDP2_PYTORCH_VERSION``)
    except UnsupportedTechniqueError as error:
        return str(error)
    lacking = missing_in_words(FSDP2)
    if lacking:
        return _("FSDP2 needs Accelerate 1.6 or later; this one lacks {name}", name=lacking[0])
    if first.sharded:
        return _("the launch shards the model already; --fsdp_offload_params true keeps it on the host")
    if first.fork_server is None:
        return _("it has to be known before the Accelerator is made: name it in --allow of vram-guard launch")
    if len(first.models) != 1:
        return _("Accelerate's FSDP2 takes one model, and the script prepares {count}", count=len(first.models))
    if not any(parameter.requires_grad for parameter in first.root.parameters()):
        return _("FSDP2 is prepared with an optimizer of the model, and this one is not trained")
    if first.precision == "16-mixed":
        return _("the GradScaler of fp16 unscales gradients on the GPU, and these would be on the host")
    if first.compiled:
        return _("torch.compile over FSDP2 is not followed")
    return ""


def sharding_notes(first: FirstBatch, plan: Plan, settings: Settings, why_not: str) -> list[str]:
    """Notes for a reader of the plan.

    Args:
        first: the script.
        plan: made for it.
        settings: by which.
        why_not: the reason why a sharded copy of the script came to no answer; "" where none failed.
    """
    if not plan.recipe.parameters_on_host:
        if why_not:
            return [Refusal("offload_parameters", why_not).words()]
        if plan.fits or "offload_parameters" in settings.techniques or len(first.models) != 1:
            return []
        untried = _(
            "parameters on the host were not tried: they change what a script's checkpoints and state dicts hold, and "
            "are used only where they are named (--allow ...,offload_parameters)"
        )
        return [untried]
    notes = [
        _(
            "parameters on the host (Accelerate's FSDP2): the script sees the model's parameters as "
            "DTensors; save_state writes FSDP's files, and load_state reads no others"
        )
    ]
    if plan.precision == "bf16-mixed":
        notes.append(
            _(
                "under FSDP2, Accelerate's bf16 is no autocast: the model computes in bfloat16 throughout, losses that "
                "it returns too, and gradients are reduced in bfloat16; parameters and optimizer states stay in float32"
            )
        )
    if first.shape.ranks > 1:
        notes.append(
            _(
                "each process holds its share of parameters, gradients and optimizer states; a process that "
                "uses the model alone (an evaluation under is_main_process) hangs. "
                "accelerator.get_state_dict(model), save_model and save_pretrained(..., is_main_process=...) "
                "write whole tensors, called by all processes"
            )
        )
        lines = lines_that_save_shards(sys.argv[0])
        if lines:
            where = f"{Path(sys.argv[0]).name}, line{'s' if len(lines) > 1 else ''} {', '.join(map(str, lines))}"
            notes.append(
                _(
                    "if this is the sharded model, it is saved in shards, or not at all ({place}): save_pretrained "
                    "needs state_dict=accelerator.get_state_dict(model), called by all processes, and so does "
                    "torch.save",
                    place=where,
                )
            )
    return notes
