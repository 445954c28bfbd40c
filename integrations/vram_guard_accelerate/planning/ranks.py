"""Where nobody planned beforehand: the first process of a launch plans, and all of them hold the same plan."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from vram_guard import errors
from vram_guard.errors import DoesNotFitError, UnsupportedStepError, VramGuardError
from vram_guard_accelerate.launch_plan import Orders
from vram_guard_accelerate.settings import Settings

#: How long the other ranks wait for the plan.
PATIENCE = timedelta(minutes=30)

KEY = "vram_guard/orders"


def agreed_orders(settings: Settings, command: Sequence[str], *, module: bool) -> Orders | None:
    """The orders of this launch, the same on every rank; None where nothing is changed.

    Raises:
        VramGuardError: the first rank's, on every rank.
    """
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if ranks == 1:
        return _decoded(_planned(settings, command, module=module, ranks=1))
    store = _store()
    if rank == 0:
        store.set(KEY, json.dumps(_planned(settings, command, module=module, ranks=ranks)))
    return _decoded(json.loads(store.get(KEY)))


def _store() -> Any:
    """The store of torchrun, which is there before any process group."""
    from torch import distributed

    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "") != "True":
        raise UnsupportedStepError(
            "several processes that torchrun did not start cannot agree on a plan; use vram-guard launch instead"
        )
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    make: Any = getattr(distributed, "TCPStore")  # noqa: B009 - torch does not declare that it exports it
    return make(address, port, is_master=False, timeout=PATIENCE)


def _planned(settings: Settings, command: Sequence[str], *, module: bool, ranks: int) -> dict[str, Any]:
    """The first rank's answer, in a form that travels."""
    from vram_guard_accelerate.cli.launch import show
    from vram_guard_accelerate.cli.target import budget_for
    from vram_guard_accelerate.planning.prediction import Question, predict

    try:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        budget = budget_for(settings, local, "all")
        added = {name: value for name, value in os.environ.items() if name.startswith("ACCELERATE_")}
        prediction = predict(Question(tuple(command), module, settings, budget, ranks, added, local))
        show(prediction, as_json=False)
        if not prediction.fits:
            raise DoesNotFitError("it does not fit, and is not started")
    except VramGuardError as error:
        return {"error": type(error).__name__, "message": str(error)}
    sys.stderr.flush()
    return {"orders": prediction.orders.text() if prediction.changed else None}


def _decoded(answer: dict[str, Any]) -> Orders | None:
    if "error" in answer:
        kind: Callable[[str], VramGuardError] = getattr(errors, answer["error"], UnsupportedStepError)
        raise kind(answer["message"])
    return None if answer["orders"] is None else Orders.read(answer["orders"])
