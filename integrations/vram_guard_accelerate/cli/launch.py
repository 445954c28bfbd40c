"""``vram-guard launch``: predict, plan, show, and then ``accelerate launch``, under the plan."""

from __future__ import annotations

import json
import os
import shlex
import signal
from collections.abc import Sequence

from vram_guard import signals
from vram_guard.allocator import with_expandable_segments
from vram_guard.cli.exits import EXIT_DOES_NOT_FIT, EXIT_DONE
from vram_guard.codec import to_json
from vram_guard.errors import NoDeviceError
from vram_guard.language import _
from vram_guard.settings import disabled
from vram_guard_accelerate._messages import say
from vram_guard_accelerate.cli import launchers
from vram_guard_accelerate.cli.arguments import LaunchArguments, parsed
from vram_guard_accelerate.cli.target import Target, budget_for, target_of
from vram_guard_accelerate.dry_run.forks import check_forks
from vram_guard_accelerate.launch_plan import BEFORE_START, VARIABLE, LaunchPlan
from vram_guard_accelerate.planning.prediction import Prediction, predict
from vram_guard_accelerate.planning.requests import DryRunRequest


def launch(arguments: Sequence[str]) -> int:
    """The command; its exit code is the script's, 1 where it does not fit, 128 + n where signal n ended it.

    Raises:
        InvalidInputError: something typed makes no sense; nothing was started.
        VramGuardError: the script cannot be followed; it was not started.
        NoDeviceError: no budget, no GPU's name, and no GPU here.
    """
    from rich.console import Console

    given = parsed(arguments)
    target = target_of(given)
    if disabled():
        say(_("vram-guard: switched off (VRAM_GUARD_DISABLE): nothing is predicted or changed"))
        return EXIT_DONE if given.options.dry_run else _launch(given, target, None)
    check_forks()
    local = max(1, target.ranks // target.machines)
    try:
        budget = budget_for(given.settings, local, target.gpu_ids)
    except NoDeviceError as error:
        raise _misplaced(error, given.arguments) from None
    environment = {**target.environment, BEFORE_START: "1"}
    request = DryRunRequest(given.command, given.module, given.settings, budget, target.ranks, environment, local)
    try:
        # A sign of life on a terminal, nothing elsewhere.
        running = _("vram-guard: running the script symbolically, up to two optimizer steps")
        with Console(stderr=True).status(running):
            prediction = predict(request)
    except KeyboardInterrupt:
        say(_("vram-guard: stopped while planning; nothing was started"))
        return signals.EXIT_BASE + signal.SIGINT
    show(
        prediction,
        as_json=given.options.json,
        verbose=given.settings.verbose,
        typed=("vram-guard", "launch", *arguments),
    )
    if not prediction.answer.fits:
        say(_("vram-guard: it does not fit, and is not started"))
        return EXIT_DOES_NOT_FIT
    if prediction.answer.only_told:
        say(_("vram-guard: as it is written it does not fit, and is not started"))
        return EXIT_DOES_NOT_FIT
    if given.options.dry_run:
        return EXIT_DONE
    if given.options.ask and not _agreed():
        say(_("vram-guard: nothing was started"))
        return EXIT_DONE
    handed_over = prediction.answer.changed or target.machines > 1  # machines compare their plans
    return _launch(given, target, prediction.answer.launch_plan if handed_over else None)


def show(prediction: Prediction, *, as_json: bool, verbose: bool, typed: Sequence[str]) -> None:
    """The plan: JSON on standard output, or text on standard error, where it stays apart from the script's own.

    Args:
        prediction: of the launch.
        as_json: for programs.
        verbose: the whole report.
        typed: the command.
    """
    answer = prediction.answer
    remarks = [_untried(shlex.join([*typed, *answer.own_options]))] if answer.own_options else []
    if as_json:
        found = {
            **answer.plan,
            "notes": [*answer.notes, *remarks],
            "only_told": answer.only_told,
            "script_arguments": answer.launch_plan.script_arguments(),
            "own_options": list(answer.own_options),
            "log": prediction.log,
        }
        print(json.dumps(found, indent=2), flush=True)  # noqa: T201
        return
    say(answer.words("-v", verbose=verbose, remarks=remarks))


def _misplaced(error: NoDeviceError, arguments: Sequence[str]) -> NoDeviceError:
    """The same error; where an option behind the script's name says what to plan for, with a sentence about it."""
    behind = next((word for word in arguments if word.partition("=")[0] in ("--budget", "--gpu")), None)
    if behind is None:
        return error
    said = _(
        "{option} stands behind the script's name, and is handed to the script: for vram-guard it has to stand "
        "before that name",
        option=behind.partition("=")[0],
    )
    return NoDeviceError(_("{problem} {remark}", problem=error, remark=said), error.problem)


def _untried(command: str) -> str:
    return _(
        "the script's own options make its batches smaller: {command}. This was not tried: whether it fits, and is the "
        "same training, is not known",
        command=command,
    )


def _agreed() -> bool:
    say(_("Launch with this plan? [Y/n]"))
    try:
        answer = input()
    except EOFError:
        return False
    return answer.strip().lower() in ("", "y", "yes")


def _launch(given: LaunchArguments, target: Target, plan: LaunchPlan | None) -> int:
    """The real thing. A plan that changes nothing leaves the launch to accelerate alone."""
    command = [*(["-m"] if given.module else []), *given.command]
    if plan is not None:
        os.environ[VARIABLE] = to_json(plan)
        if plan.recipe.expandable_segments:
            name, value = with_expandable_segments()
            os.environ[name] = value
        precision = ["--mixed_precision", plan.precision] if plan.precision else []
        command = [*precision, "-m", "vram_guard_accelerate", *command]
    options = [word for word in given.accelerate if word not in ("-m", "--module")]
    return launchers.run(options, command, simple=target.simple)
