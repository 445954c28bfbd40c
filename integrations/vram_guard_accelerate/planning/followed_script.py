"""The script of a dry run, from its first line to its plan."""

from __future__ import annotations

import gc
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from vram_guard.budget import Budget
from vram_guard.codec import from_json, to_json
from vram_guard.forks import ended, tied
from vram_guard.forks.fork import write_all
from vram_guard.language import _
from vram_guard_accelerate import _run_script
from vram_guard_accelerate._settings import LaunchSettings
from vram_guard_accelerate.dry_run import own_ranks, patches, subprocess_policy
from vram_guard_accelerate.dry_run.first_batch import FirstBatch, LaunchShape
from vram_guard_accelerate.dry_run.phases import DryRun
from vram_guard_accelerate.dry_run.preparing import PreparingPhase
from vram_guard_accelerate.dry_run.results import DryRunFailure, at_line, stopped
from vram_guard_accelerate.dry_run.time_limit import limit, no_limit
from vram_guard_accelerate.planning.decide import decide
from vram_guard_accelerate.planning.requests import ANSWER, REQUEST, DryRunAnswer, DryRunRequest


def follow(folder: Path) -> NoReturn:
    """Follow the script that the request in a folder names, and write the answer next to the request."""
    request = from_json(DryRunRequest, (folder / REQUEST).read_text(encoding="utf-8"))
    try:
        _follow(request, lambda answer: _answer(folder, answer))
    except BaseException as error:  # noqa: BLE001 - whatever it is, the launcher has to be told
        _answer(folder, DryRunFailure.of(ended.instead_of(error), request.command[0]))


def _follow(request: DryRunRequest, answer: Callable[[DryRunAnswer | DryRunFailure], NoReturn]) -> NoReturn:
    """Run a script until it is planned for; never returns.

    Raises:
        StoppedError, Exception: in the original process, what ended the script before.
    """
    settings = request.settings

    def decided(first: FirstBatch) -> NoReturn:
        no_limit()
        answer(answer_for(first, settings, request.budget, request.command[0]))

    shape = LaunchShape.of(request.budget, request.ranks, request.local_ranks)
    tied.keep_programs()
    run = DryRun(shape, decided, planned_batch=settings.planned_batch)
    run.phase = PreparingPhase(run)
    own_ranks.announce(shape, request.command[0])
    patches.install(run)
    subprocess_policy.refuse_writing_programs(stopped)
    run.phase.begins()
    gc.freeze()  # what is there is none of the script's
    limit(settings.start_seconds, lambda frame: answer(DryRunFailure.unsupported(at_line(_too_long(settings), frame))))
    try:
        _run_script.run(request.command, module=request.module)
    except BaseException as error:
        run.phase.failed(error, request.command[0])
        raise
    run.phase.ended()
    stopped(
        _(
            "the script ended without asking for a training batch; give the options with which it trains (many need "
            "--do_train, and one that resumes may have nothing left to train) after its name"
        )
    )


def answer_for(first: FirstBatch, settings: LaunchSettings, budget: Budget, title: str) -> DryRunAnswer | DryRunFailure:
    """The answer for a script at its first training batch.

    Raises:
        UnsupportedStepError: the script cannot be followed; the message says where and why.
    """
    found = decide(first, settings, budget, title)
    missing = ended.not_known()
    return found if missing is None else DryRunFailure.of(missing)


def _too_long(settings: LaunchSettings) -> str:
    return _(
        "it has not begun to train after {seconds} s; where it needs more, --advanced start_seconds=N is the time that "
        "it may take",
        seconds=f"{settings.start_seconds:g}",
    )


def _answer(folder: Path, answer: DryRunAnswer | DryRunFailure) -> NoReturn:
    """Write the answer and end at once, without the script's own exit handlers (trackers, threads)."""
    code = 1
    try:
        handle = os.open(folder / ANSWER, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        write_all(handle, memoryview(to_json(answer).encode()))
        sys.stdout.flush()
        sys.stderr.flush()
        code = 0
    except BaseException:  # noqa: BLE001 - the launcher shows where this is printed
        traceback.print_exc()
    finally:
        os._exit(code)
