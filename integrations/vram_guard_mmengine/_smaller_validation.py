"""Smaller batches of a runner's validation: where they are refused, how they are rehearsed and applied."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from mmengine.hooks import Hook
from torch.utils import _pytree as pytree

from vram_guard.guard.evaluation import smaller_batches, why_not_smaller
from vram_guard.guard.refusals import Refusal
from vram_guard.job import evenly
from vram_guard.language import _
from vram_guard.proof.evaluations import EvaluationRehearsal, RehearsedEvaluation
from vram_guard_mmengine import _rehearsal
from vram_guard_mmengine._shadow import is_users

if TYPE_CHECKING:
    from vram_guard.guard.applied import Applied
    from vram_guard.plan.model import SmallerEvaluation
    from vram_guard.proof.observed import Observed
    from vram_guard_mmengine._evaluation import EvaluationLoop

# ruff: noqa: SLF001 - the runner has no public names for what is not built yet

#: What the visualizer is given is written down: it has to be the same.
_DRAWN = ("add_config", "add_datasample", "add_graph", "add_image", "add_scalar", "add_scalars")


def objection(runner: Any, rounds: EvaluationLoop | None, size: int, training: Any) -> Refusal | None:
    """The refusal of smaller batches of validation; None where only a run can tell.

    Args:
        runner: whose loops are not built yet.
        rounds: of its validation.
        size: of the smaller batches.
        training: the train loader.
    """
    why = next(filter(None, _why_not(runner, rounds, size, training)), "")
    return Refusal("evaluation", why) if why else None


def _why_not(runner: Any, rounds: EvaluationLoop | None, size: int, training: Any) -> Iterator[str]:
    for hook in runner.hooks:
        for name in ("before_val_iter", "after_val_iter"):
            if is_users(hook) and getattr(type(hook), name) is not getattr(Hook, name):
                yield _("{name} of {kind} is called for every batch", name=name, kind=type(hook).__name__)
    if rounds is None or rounds.batches is None:
        yield _("its loader has no known end")
        return
    if rounds.loader is training:
        yield _("the training reads the same loader")
    if getattr(rounds.loader.dataset, "num_samples", None) is not None:  # MMEngine's _SlicedDataset
        yield _("num_batch_per_epoch counts batches of the configured size")
    yield why_not_smaller(rounds.loader, size, ranks=runner.world_size)


def install(runner: Any, change: SmallerEvaluation, applied: Applied) -> None:
    """Deliver batches of at most so many samples.

    Args:
        runner: whose loops are not built yet.
        change: of its validation.
        applied: the changes of the guard.
    """
    loop = runner._val_loop
    given = runner._val_dataloader if isinstance(loop, dict) else loop.dataloader
    if isinstance(given, dict):  # copied: configs often have one dict for val and test
        changed = copy.copy(given)
        changed["batch_size"] = evenly(given["batch_size"], change.batch_size)
        applied.replace(runner, "_val_dataloader", changed)
    else:
        smaller_batches(given, change.batch_size, applied)


def rehearse(runner: Any, rounds: EvaluationLoop, rehearsal: EvaluationRehearsal) -> Observed:
    """Run validation for real on the CPU; what is done to the runner is not undone.

    Args:
        runner: of a copy of the process, whose loops are not built yet, inside the guarded ``train``.
        rounds: of its validation.
        rehearsal: how it is run.

    Raises:
        Exception: whatever the user's code or MMEngine raises.
    """
    model = _rehearsal.on_cpu(runner)
    run = RehearsedEvaluation(model)
    loader: Any = rehearsal.loader(rounds.loader)
    if rehearsal.double:
        torch.set_default_dtype(torch.float64)
        model.double()
        collate = loader.collate_fn
        loader.collate_fn = lambda samples: pytree.tree_map_only(torch.Tensor, _rehearsal.doubled, collate(samples))
    given = runner._val_loop
    _rehearsal.quiet(runner)
    runner._val_loop, runner._val_dataloader = given, loader
    if not isinstance(given, dict):
        given.dataloader = loader
    run.compare_calls(runner.visualizer, _DRAWN, "visualizer.")
    run.begin()
    runner.val()  # the guard is active: as written
    return run.result(logged=_rehearsal.logged(runner))
