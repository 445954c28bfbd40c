"""The consequence, by mode, of a plan that does not fit or of a missing prediction: an error, or a warning."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING, Any

from vram_guard.errors import DoesNotFitError
from vram_guard.language import _
from vram_guard.report.text import render
from vram_guard.user_code import leads_to_stand_ins, said_of_failure

if TYPE_CHECKING:
    from vram_guard.guard.ranks import Outcome
    from vram_guard.plan import Plan
    from vram_guard.plan.checks import Mode


def judge(plan: Plan, mode: Mode) -> str:
    """The warning that a plan deserves; "" for none.

    Raises:
        DoesNotFitError: in mode "strict" the step does not fit as written, whatever a plan could make of it.
    """
    if mode == "strict" and not plan.fits_as_written:
        said = _("the training does not fit as written.")
        if plan.fits:
            said += " " + _("The plan that would make it fit:")
        raise DoesNotFitError(f"{said}\n{render(plan, verbose=False)}")
    if mode == "fit" and not plan.fits:
        said = (
            _("the pinned settings are not applied.")
            if plan.fits_as_written
            else _("this training is not known to fit.")
        )
        return " ".join([said, *plan.reasons])
    return ""


def judge_failure(outcome: Outcome[Any], mode: Mode, *, verbose: bool) -> str:
    """The warning where there is no prediction; with a traceback where no line of the user's code tells enough.

    Args:
        outcome: of the decision.
        mode: the guard's.
        verbose: whether the traceback is shown in any case.

    Raises:
        Exception: the error itself, in mode "strict", and in mode "fit" where settings are wrong. Whether the user's
            own code is wrong, or only cannot be looked at, the training itself shows.
    """
    failure = outcome.failure
    if failure is None:
        return ""
    if mode == "strict" or (mode == "fit" and not (failure.unsupported or failure.foreign)):
        outcome.unwrap()
    why = failure.message
    if failure.foreign and failure.line:
        stand_ins = leads_to_stand_ins(failure.kind, why, ours=failure.ours)
        why = said_of_failure(failure.line, f"{failure.kind}: {why}", "verbose=True", stand_ins=stand_ins)
    said = _("no prediction for this training, which is left unchanged: {why}", why=why)
    told = failure.line and not failure.ours and not verbose
    if failure.unsupported or outcome.error is None or told:
        return said
    return said + "\n" + "".join(traceback.format_exception(outcome.error))
