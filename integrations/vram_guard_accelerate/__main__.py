"""``python -m vram_guard_accelerate script.py ...``: one process of a launch, under the guard.

``vram-guard launch`` hands its orders to every process. ``accelerate launch ... -m vram_guard_accelerate [options]
script.py ...`` has no one to plan beforehand: the first process plans, and the others wait for what it says.
"""

from __future__ import annotations

import os
import sys

from vram_guard.cli.exits import EXIT_DOES_NOT_FIT, EXIT_ENVIRONMENT, EXIT_USAGE
from vram_guard.errors import DoesNotFitError, InvalidInputError, VramGuardError
from vram_guard.settings import disabled
from vram_guard_accelerate import run_script
from vram_guard_accelerate.cli.arguments import own_arguments
from vram_guard_accelerate.launch_plan import VARIABLE, Orders
from vram_guard_accelerate.messages import say


def main() -> None:
    """Run the script under the orders of this launch."""
    try:
        settings, module, command = own_arguments(sys.argv[1:])
        text = os.environ.get(VARIABLE)
        if text is None and disabled():
            orders = None
        elif text is None:
            from vram_guard_accelerate.planning.ranks import agreed_orders

            orders = agreed_orders(settings, command, module=module)
        else:
            orders = Orders.read(text)
    except VramGuardError as error:
        say(f"vram-guard: {error}")
        sys.exit(_exit_code(error))
    if orders is not None:
        from vram_guard_accelerate.apply.applying import Applied
        from vram_guard_accelerate.apply.fsdp import announce

        if orders.precision:
            os.environ["ACCELERATE_MIXED_PRECISION"] = orders.precision
        if orders.sharded:
            announce(orders.wrapped)
        Applied(orders).install()
        command = [*command, *orders.script_arguments()]
    run_script.run(command, module=module)


def _exit_code(error: VramGuardError) -> int:
    if isinstance(error, DoesNotFitError):
        return EXIT_DOES_NOT_FIT
    return EXIT_USAGE if isinstance(error, InvalidInputError) else EXIT_ENVIRONMENT


if __name__ == "__main__":
    main()
