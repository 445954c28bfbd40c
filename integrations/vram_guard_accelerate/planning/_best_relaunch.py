"""The best answer of a launch and its relaunches, each of which is run dry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from vram_guard.language import _
from vram_guard.limits import RELAUNCHES_TRIED
from vram_guard.plan.descriptions import RelativeTime
from vram_guard.units import format_bytes
from vram_guard_accelerate.dry_run.results import DryRunFailure
from vram_guard_accelerate.planning.requests import DryRunAnswer
from vram_guard_accelerate.relaunch.relaunch import LaunchChange, Relaunch


def best_of(
    first: DryRunAnswer,
    run: Callable[[Relaunch], DryRunAnswer | DryRunFailure],
    progress: Callable[[str], None] = lambda _line: None,
) -> DryRunAnswer:
    """The answer that is taken, with notes about the others.

    Args:
        first: the answer of the launch as it was typed, with its relaunches.
        run: runs one of these dry.
        progress: called with a relaunch's options before it is run.
    """
    best, waiting, notes, seconds = first, list(first.relaunches), list[str](), dict(first.seconds)
    tried = set[LaunchChange]()  # several ways lead to one
    for _number in range(RELAUNCHES_TRIED + sum(bool(one.change.sharding.kind) for one in first.relaunches)):
        if not waiting:
            break
        change = waiting[0].change
        tried.add(change)
        progress(change.words)
        answer = run(waiting.pop(0))
        if isinstance(answer, DryRunFailure):
            notes.append(_not_taken(change.words, answer.message))
            waiting = [other for other in waiting if other.change.kind != change.kind]
            continue
        seconds = {name: seconds[name] + answer.seconds[name] for name in seconds}
        told = bool(best.only_told) and not answer.only_told
        if answer.fits and (not best.fits or told or answer.slowdown < best.slowdown):
            best, waiting = answer, [other for other in answer.relaunches if other.change not in tried]
        else:
            notes.append(_not_taken(change.words, _why_worse(answer)))
            further = [other for other in answer.relaunches if other.change not in tried]
            others = [other for other in waiting if other.change not in {one.change for one in further}]
            waiting = sorted([*further, *others], key=_lateness)
    return replace(best, notes=(*best.notes, *notes), seconds=seconds, relaunches=())


def _lateness(relaunch: Relaunch) -> int:
    """States on the host take most time; with another stage as well they change more than alone."""
    sharding = relaunch.change.sharding
    return sharding.states_on_host and 1 + (sharding.stage is not None)


def _why_worse(answer: DryRunAnswer) -> str:
    if answer.fits:
        return _("takes {time}", time=RelativeTime(answer.slowdown))
    return _("it takes {peak}, which does not fit", peak=format_bytes(answer.plan["estimate"]["peak_reserved"]))


def _not_taken(options: str, why: str) -> str:
    return _("{options} was tried in a dry run of its own, and is not taken: {why}", options=options, why=why)
