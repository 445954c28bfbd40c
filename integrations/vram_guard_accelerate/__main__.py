"""``python -m vram_guard_accelerate script.py ...``: one process of a launch, under the guard.

``vram-guard launch`` hands its plan to every process. ``accelerate launch ... -m vram_guard_accelerate [options]
script.py ...`` has no one to plan beforehand: the first process plans, and the others wait for its plan.
"""

from __future__ import annotations

import os
import sys

from vram_guard.cli.exits import EXIT_DONE, exit_code
from vram_guard.codec import from_json
from vram_guard.errors import VramGuardError
from vram_guard.settings import disabled
from vram_guard_accelerate import _run_script
from vram_guard_accelerate._messages import say
from vram_guard_accelerate.cli.arguments import LaunchArguments, own_arguments
from vram_guard_accelerate.launch_plan import VARIABLE, LaunchPlan


def main() -> None:
    """Run the script under the plan of this launch."""
    try:
        given = own_arguments(sys.argv[1:])
        plan = _plan(given)
    except VramGuardError as error:
        say(f"vram-guard: {error}")
        sys.exit(exit_code(error))
    if given.options.dry_run:
        sys.exit(EXIT_DONE)
    _run_script.end_process_groups_at_exit()
    if plan is None:
        _run_script.run(given.command, module=given.module)
        return
    _install(plan)
    from vram_guard_accelerate.apply.applying import OtherModelError

    try:
        _run_script.run([*given.command, *plan.script_arguments()], module=given.module)
    except OtherModelError as error:
        say(f"vram-guard: {error}")
        sys.exit(exit_code(error))


def _plan(given: LaunchArguments) -> LaunchPlan | None:
    """The launcher's plan, or one that all processes agree on; None where nothing is changed."""
    text = os.environ.get(VARIABLE)
    if text is not None:
        return from_json(LaunchPlan, text)
    if disabled():
        return None
    from vram_guard_accelerate.cli.agreed_plan import agreed_plan

    return agreed_plan(given)


def _install(plan: LaunchPlan) -> None:
    from vram_guard_accelerate.apply.applying import PlanInstaller

    if plan.precision:
        os.environ["ACCELERATE_MIXED_PRECISION"] = plan.precision
    PlanInstaller(plan).install()


if __name__ == "__main__":
    main()
