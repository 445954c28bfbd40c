"""A plan that was not made beforehand: the first process of a launch plans, and all of them hold the same plan."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Any

from vram_guard.codec import from_json, to_json
from vram_guard.errors import DoesNotFitError, UnsupportedStepError, VramGuardError
from vram_guard.language import _
from vram_guard.releases.required import RequiredReleases
from vram_guard_accelerate.cli.arguments import LaunchArguments
from vram_guard_accelerate.cli.launch import show
from vram_guard_accelerate.cli.target import budget_for
from vram_guard_accelerate.dry_run.forks import check_forks
from vram_guard_accelerate.dry_run.results import DryRunFailure
from vram_guard_accelerate.launch_plan import LaunchPlan
from vram_guard_accelerate.planning.prediction import predict
from vram_guard_accelerate.planning.requests import DryRunRequest

#: How long the other ranks wait for the plan.
PATIENCE = timedelta(minutes=30)

KEY = "vram_guard/launch_plan"


def agreed_plan(given: LaunchArguments) -> LaunchPlan | None:
    """The plan of this launch, the same on every rank; None where nothing is changed.

    Raises:
        VramGuardError: the first rank's, on every rank.
    """
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    store = _store() if ranks > 1 else None
    if rank == 0 or store is None:
        found = _planned(given, ranks)
        if store is not None:
            store.set(KEY, to_json(found))
    else:
        kinds: Any = LaunchPlan | DryRunFailure | None
        found = from_json(kinds, store.get(KEY))
    if isinstance(found, DryRunFailure):
        raise found.as_error()
    return found


def _store() -> Any:
    """The store of torchrun, which is there before any process group."""
    from torch import distributed

    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "") != "True":
        raise UnsupportedStepError(
            _("several processes that torchrun did not start cannot agree on a plan; use vram-guard launch instead")
        )
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    make: Any = getattr(distributed, "TCPStore")  # noqa: B009 - torch does not declare that it exports it
    return make(address, port, is_master=False, timeout=PATIENCE)


def _planned(given: LaunchArguments, ranks: int) -> LaunchPlan | DryRunFailure | None:
    """The first rank's answer."""
    settings, only_look = given.settings, given.options.dry_run
    try:
        check_forks()
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        budget = budget_for(settings, local, "all")
        required = RequiredReleases.read(settings.releases)
        added = {name: value for name, value in os.environ.items() if name.startswith("ACCELERATE_")}
        request = DryRunRequest(given.command, given.module, settings, budget, ranks, added, local)
        prediction = predict(request)
        answer = prediction.answer
        remarks = required.remarks(answer.releases)
        show(prediction, as_json=given.options.json, verbose=settings.verbose, remarks=remarks)
        if not answer.fits or (answer.only_told and not only_look):
            raise DoesNotFitError(_("it does not fit, and is not started"))
    except VramGuardError as error:
        return DryRunFailure(type(error).__name__, str(error))
    sys.stderr.flush()
    return answer.launch_plan if answer.changed else None
