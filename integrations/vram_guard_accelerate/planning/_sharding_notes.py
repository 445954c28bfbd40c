"""FSDP2 that the guard switches on, in a plan: where it is not possible, and what to know before choosing it."""

from __future__ import annotations

import sys
from pathlib import Path

from vram_guard.guard.refusals import Refusal
from vram_guard.language import _
from vram_guard.parallel import deepspeed
from vram_guard.plan import Plan
from vram_guard.proof.prove import not_in_copy
from vram_guard_accelerate._settings import LaunchSettings
from vram_guard_accelerate._sharding_change import ShardingChange
from vram_guard_accelerate.apply.sharded_saving import lines_that_save_shards
from vram_guard_accelerate.dry_run.first_batch import FirstBatch
from vram_guard_accelerate.relaunch.divisible import why_not_fsdp2
from vram_guard_accelerate.relaunch.engine import LAST, why_not_next_stage, why_not_states_on_host

#: Techniques that only a relaunch can have.
SHARDINGS = ("reshard", "shard")


def why_not_on_host(first: FirstBatch) -> str:
    """The reason why FSDP2 cannot keep parameters on the host in this script; "" where nothing is known against it."""
    if first.sharded:
        return _("the launch shards the model already; --fsdp_offload_params true keeps it on the host")
    if first.fork_server is None:
        return _("it has to be known before the Accelerator is made: name it in --allow of vram-guard launch")
    if first.precision == "16-mixed":
        return _("the GradScaler of fp16 unscales gradients on the GPU, and these would be on the host")
    return why_not_fsdp2(first)


def sharding_notes(first: FirstBatch, plan: Plan, settings: LaunchSettings, why_not: str) -> list[str]:
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
        if first.engine is not None and not plan.fits:
            return _unnamed(first, settings)
        if plan.fits or first.sharded or "offload_parameters" in settings.techniques or len(first.models) != 1:
            return []
        notes = [] if first.shape.ranks == 1 or "shard" in settings.techniques else [_not_divided()]
        untried = _(
            "parameters on the host were not tried: they change what a script's checkpoints and state dicts hold, and "
            "are used only where they are named (--allow ...,offload_parameters)"
        )
        return [*notes, untried]
    on_host = _(
        "parameters on the host (Accelerate's FSDP2): the script sees the model's parameters as "
        "DTensors; save_state writes FSDP's files, and load_state reads no others"
    )
    return [on_host, not_in_copy(_("parameters on the host")), *_of_shards(first, plan)]


def _not_divided() -> str:
    return _(
        "FSDP2 was not tried in place of DistributedDataParallel: it changes what a script's checkpoints and state "
        "dicts hold, and is used only where it is named (--allow ...,shard)"
    )


def _unnamed(first: FirstBatch, settings: LaunchSettings) -> list[str]:
    """What DeepSpeed could do besides, and was not allowed by name."""
    possible = {"shard": why_not_next_stage(first), "offload_optimizer": why_not_states_on_host(first)}
    names = [name for name, why in possible.items() if not why and not settings.asks(name)]
    if not names:
        return []
    untried = _(
        "DeepSpeed can divide more, or keep optimizer states on the host; its checkpoints hold other files then, so "
        "this is used only where it is named (--allow ...,{names})",
        names=",".join(names),
    )
    return [untried]


def divided_notes(first: FirstBatch, plan: Plan) -> list[str]:
    """Notes on a script that FSDP2 was switched on for, for a reader of its plan."""
    divided = _(
        "FSDP2 in place of DistributedDataParallel: the script sees the model's parameters as DTensors; save_state "
        "writes FSDP's files, and load_state reads no others"
    )
    return [divided, *_of_shards(first, plan)]


def engine_notes(first: FirstBatch, plan: Plan, change: ShardingChange) -> list[str]:
    """Notes on a script whose DeepSpeed is set up otherwise, for a reader of its plan."""
    where = _("settings of DeepSpeed's config change where the script calls prepare; the file stays as it is")
    if change.planned is None:
        return [where]
    notes = [where, deepspeed.how_to_resume(change.planned)]
    if change.stage != LAST:
        return notes
    divided = _(
        "stage {stage} of DeepSpeed's ZeRO: weights are empty outside of the forward and backward of their modules",
        stage=LAST,
    )
    return [divided, *notes, *_of_shards(first, plan)]


def _of_shards(first: FirstBatch, plan: Plan) -> list[str]:
    notes = []
    if plan.precision == "bf16-mixed" and first.engine is None:
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
            path = Path(sys.argv[0]).name
            where = _("{path}, line {line}", path=path, line=lines[0])
            if lines[1:]:
                where = _("{path}, lines {lines}", path=path, lines=_(", ").join(map(str, lines)))
            notes.append(
                _(
                    "if this is the sharded model, it is saved in shards, or not at all ({place}): save_pretrained "
                    "needs state_dict=accelerator.get_state_dict(model), called by all processes, and so does "
                    "torch.save",
                    place=where,
                )
            )
    return notes
