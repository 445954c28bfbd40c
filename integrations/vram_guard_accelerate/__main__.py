"""``python -m vram_guard_accelerate script.py ...``: one process of ``vram-guard launch``, under its plan."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Any, NoReturn

from vram_guard.cli.exits import exit_code
from vram_guard.codec import from_json
from vram_guard.errors import InvalidInputError, UnsupportedStepError, VramGuardError
from vram_guard.language import _
from vram_guard_accelerate import _run_script
from vram_guard_accelerate._messages import say
from vram_guard_accelerate.launch_plan import VARIABLE, LaunchPlan

#: Where the first of several machines leaves its plan, and how long the others wait for it.
KEY = "vram_guard/launch_plan"
PATIENCE = timedelta(minutes=30)


def main() -> None:
    """Run the script under the plan of this launch."""
    module = sys.argv[1:2] == ["-m"]
    command = sys.argv[1 + module :]
    try:
        plan = _plan()
    except VramGuardError as error:
        _refused(error)
    _run_script.end_process_groups_at_exit()
    if plan.precision:
        os.environ["ACCELERATE_MIXED_PRECISION"] = plan.precision
    from vram_guard_accelerate.apply.applying import OtherModelError, PlanInstaller

    PlanInstaller(plan).install()
    try:
        _run_script.run([*command, *plan.script_arguments()], module=module)
    except OtherModelError as error:
        _refused(error)


def _plan() -> LaunchPlan:
    """The launcher's plan, the same on all machines.

    Raises:
        InvalidInputError: no launcher has made one.
        UnsupportedStepError: that of another machine is another one.
    """
    text = os.environ.get(VARIABLE)
    if text is None:
        raise InvalidInputError(
            _("no plan was made for this process: start it with vram-guard launch, on every machine")
        )
    ranks = os.environ.get("WORLD_SIZE", "1")
    if os.environ.get("LOCAL_WORLD_SIZE", ranks) != ranks:
        _check_equal(text)
    return from_json(LaunchPlan, text)


def _check_equal(text: str) -> None:
    """Compare the plan with that of the first process, through torchrun's store, which is there before any group."""
    from torch import distributed

    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "") != "True":
        raise UnsupportedStepError(
            _("processes on several machines that torchrun did not start cannot compare their plans")
        )
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    make: Any = getattr(distributed, "TCPStore")  # noqa: B009 - torch does not declare that it exports it
    store = make(address, port, is_master=False, timeout=PATIENCE)
    if os.environ["RANK"] == "0":
        store.set(KEY, text)
    elif store.get(KEY).decode() != text:
        raise UnsupportedStepError(
            _(
                "the launch on this machine has made another plan than the first machine's: give both the same --gpu "
                "or --budget, and the same script, data and releases"
            )
        )


def _refused(error: VramGuardError) -> NoReturn:
    say(f"vram-guard: {error}")
    sys.exit(exit_code(error))


if __name__ == "__main__":
    main()
