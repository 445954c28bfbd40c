"""Where Accelerate's FSDP2 can be put on a script that was not written for it, and where it would be another training.

What is not seen here (tied weights, lists of parameters that are clipped, averages of weights) is seen when the script
is followed so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vram_guard.errors import UnsupportedTechniqueError
from vram_guard.language import _
from vram_guard.limits import NAMED
from vram_guard.private_names import missing_in_words
from vram_guard.techniques.sharding import check_torch
from vram_guard_accelerate.private_api import FSDP2

if TYPE_CHECKING:
    from vram_guard_accelerate.dry_run.first_batch import FirstBatch
    from vram_guard_accelerate.dry_run.results import LoopFacts


def why_not_fsdp2(first: FirstBatch) -> str:
    """The reason why FSDP2 cannot be prepared in this script; "" where nothing is known against it."""
    try:
        check_torch()  # Accelerate wants no other torch than we do (``FSDP2_PYTORCH_VERSION``)
    except UnsupportedTechniqueError as error:
        return str(error)
    lacking = missing_in_words(FSDP2)
    if lacking:
        return _("FSDP2 needs Accelerate 1.6 or later; this one lacks {name}", name=lacking[0])
    if len(first.models) != 1:
        return _("Accelerate's FSDP2 takes one model, and the script prepares {count}", count=len(first.models))
    if not any(parameter.requires_grad for parameter in first.root.parameters()):
        return _("FSDP2 is prepared with an optimizer of the model, and this one is not trained")
    return (
        _("FSDP2 under a model that torch.compile compiles as a whole, or wraps, was not proven")
        if first.compiled
        else ""
    )


def why_not_divided(first: FirstBatch, facts: LoopFacts) -> str:
    """The reason why FSDP2 in place of DistributedDataParallel would be another training; "" where none is known.

    Args:
        first: the script, whose processes share the work.
        facts: of its loop.
    """
    why = why_not_fsdp2(first)
    if why:
        return why
    handler = getattr(first.accelerator, "ddp_handler", None)
    hook = getattr(handler, "comm_hook", None)
    if str(getattr(hook, "value", hook) or "no") != "no":
        return _("the script chose how DistributedDataParallel sends gradients (comm_hook), which FSDP2 does not do")
    if first.precision == "16-mixed":
        return _("under FSDP2, Accelerate's fp16 is no autocast: the model would compute in float16 throughout")
    if facts.advances and getattr(handler, "broadcast_buffers", True):
        return _(
            "every step changes buffers or attributes of the model ({names}): DistributedDataParallel copies buffers "
            "from the first process to the others, and FSDP2 does not",
            names=", ".join(facts.advances[:NAMED]),
        )
    return ""
