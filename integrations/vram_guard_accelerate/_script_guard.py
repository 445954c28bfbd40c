"""``guard``: the same plan for a script that is edited, around ``prepare``.

There is no launcher that could plan beforehand. So at the first ``prepare`` the first process makes a copy of itself,
which becomes the dry run: it prepares symbolically, runs on to the first training batch, plans, and sends the plan
back. Then the real ``prepare`` goes on, under the plan, on every rank alike.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from vram_guard.errors import DoesNotFitError, InvalidInputError, LostCopyError, VramGuardError
from vram_guard.forks.exclusive import alone_in_process, renew_in_copy
from vram_guard.forks.fork import Copy, answer_of
from vram_guard.forks.isolation import isolate
from vram_guard.forks.side_effects import discard_writes
from vram_guard.guard.arrivals import all_arrive, late
from vram_guard.language import _
from vram_guard.limits import IDLE_SECONDS
from vram_guard.patching import replace_attributes
from vram_guard.settings import disabled
from vram_guard.simulate.parallel.groups import pretended_group
from vram_guard.terminal import fitting_log, in_log
from vram_guard_accelerate._messages import say
from vram_guard_accelerate._settings import LaunchSettings
from vram_guard_accelerate.apply import techniques
from vram_guard_accelerate.apply.applying import PlanInstaller
from vram_guard_accelerate.dry_run import forks, patches
from vram_guard_accelerate.dry_run.first_batch import FirstBatch, LaunchShape
from vram_guard_accelerate.dry_run.forks import ForkEntered, ParentPipe
from vram_guard_accelerate.dry_run.phases import DryRun
from vram_guard_accelerate.dry_run.preparing import PreparingPhase
from vram_guard_accelerate.dry_run.results import DryRunFailure
from vram_guard_accelerate.launch_plan import ON_CPU, VARIABLE
from vram_guard_accelerate.planning.caches import caches
from vram_guard_accelerate.planning.requests import DryRunAnswer

if TYPE_CHECKING:
    from typing_extensions import Self

    from vram_guard.budget import Budget

_logger = logging.getLogger("vram_guard")

#: What a copy has entered, and never leaves: it ends where it stands.
_entered = contextlib.ExitStack()


class guard:  # noqa: N801 - used like a function: `with guard(...):`
    """Around ``Accelerator.prepare``: predicts the script's step, and makes it fit.

    ::

        with guard(budget="24GiB"):
            model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    The whole script is followed from there on, up to its second optimizer step, in a copy of the process that writes
    nothing. What comes after the block needs no change. Under ``vram-guard launch``, which has planned already, and
    under ``VRAM_GUARD_DISABLE=1`` it does nothing.

    Args:
        **settings: see :class:`vram_guard_accelerate._settings.LaunchSettings`: budget, gpu, margin, allow.

    Attributes:
        text: the plan in words, on the first rank; "" before, and on other ranks.
        fits: whether a plan was found that fits; None before.

    Raises:
        InvalidInputError: an unknown setting, or ``grow``: schedules are made before ``prepare``, and would not know.
        DoesNotFitError: nothing that is allowed makes it fit; on every rank, nothing was prepared.
        LostRankError: a process of the training ended meanwhile.
        UnsupportedStepError: the script cannot be followed from here. Where the copy dies or hangs, the training goes
            on as it is written, and a warning says where the copy was.

    Example:
        >>> guard(budget="24GiB", allow=["accumulate"]).settings.budget
        '24GiB'
        >>> guard(budget="24GiB", grow=True)
        Traceback (most recent call last):
        vram_guard.errors.InvalidInputError: guard: a larger batch has to be known before loaders ...
    """

    def __init__(self, **settings: Any) -> None:
        if settings.get("grow"):
            raise InvalidInputError(
                _(
                    "guard: a larger batch has to be known before loaders and schedules are made; use vram-guard "
                    "launch --grow"
                )
            )
        self.settings = LaunchSettings.of(settings)
        if self.settings.grow:
            _logger.warning(
                "%s",
                _(
                    "guard: the project's settings say grow, which is ignored here: a larger batch has to be "
                    "known before loaders and schedules are made (vram-guard launch --grow)"
                ),
            )
            self.settings = replace(self.settings, grow=False)
        self.text = ""
        self.fits: bool | None = None
        self._undo: Callable[[], None] = _nothing
        self._planned = False

    def __enter__(self) -> Self:
        from accelerate import Accelerator

        if VARIABLE not in os.environ and not disabled():

            def prepare(accelerator: Any, *args: Any, **kwargs: Any) -> Any:
                return self._prepare(accelerator, args, kwargs)

            own = {"prepare": prepare, "prepare_model": Accelerator.prepare_model}
            self._undo = replace_attributes(Accelerator, own)
        return self

    def __exit__(self, *_error: object) -> None:
        self._undo()  # what is prepared later, by another training of this process, is not this plan's

    def _prepare(self, accelerator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Plan at the first ``prepare``, which is Accelerate's own again from here on."""
        self._undo()
        if self._planned:  # the script holds on to the method that it called first
            return accelerator.prepare(*args, **kwargs)
        self._planned = True
        try:
            answer = self._agreed(accelerator)
        except ForkEntered as entered:
            self._undo = _nothing  # the copy keeps the patches of its dry run
            _become_dry_run(entered.parent, accelerator, self.settings)
            return accelerator.prepare(*args, **kwargs)
        except LostCopyError as error:  # on every rank
            if accelerator.is_main_process:
                _logger.warning("%s", _("no prediction for this training, which is left unchanged: {why}", why=error))
            return accelerator.prepare(*args, **kwargs)
        option, verbose = "verbose=True", self.settings.verbose
        self.text, self.fits = answer.words(option, verbose=True), answer.fits
        if accelerator.is_main_process:
            _report(answer.words(option, verbose=verbose))
        if not self.fits:
            raise DoesNotFitError(_("the training does not fit, and was not prepared.\n{plan}", plan=self.text))
        if answer.launch_plan.precision:
            techniques.set_precision(accelerator, answer.launch_plan.precision)
        PlanInstaller(answer.launch_plan).install()
        return accelerator.prepare(*args, **kwargs)

    def _agreed(self, accelerator: Any) -> DryRunAnswer:
        """The first rank's answer, on every rank."""
        from accelerate.utils import broadcast_object_list

        answers: list[Any] = [None]
        if accelerator.is_main_process:
            try:
                answers = [self._answer_of_copy()]
            except VramGuardError as error:
                answers = [DryRunFailure.of(error)]
        if accelerator.num_processes > 1:
            if not all_arrive(accelerator.num_processes, self.settings.start_seconds + IDLE_SECONDS):
                raise LostCopyError(late())
            broadcast_object_list(answers)
        if isinstance(answers[0], DryRunAnswer):
            return answers[0]
        failure: DryRunFailure = answers[0]
        if failure.error == LostCopyError.__name__:  # where it was is all that is known
            failure = replace(failure, message=f"{failure.message}\n{failure.traceback}")
        raise failure.as_error()

    def _answer_of_copy(self) -> Any:
        """The answer of a copy of this process."""
        forks.check_forks()

        def ask() -> Copy[Any]:
            with alone_in_process():  # no copy of a torch that another thread's trace has half replaced
                return forks.fork(None)

        what = _("the copy of the process that looked at the training")
        return answer_of(ask, what, self.settings.start_seconds)


def _nothing() -> None:
    """In place of an undo, where nothing was changed."""


def _become_dry_run(parent: ParentPipe, accelerator: Any, settings: LaunchSettings) -> None:
    """In the copy: nothing is printed or written from here on, and there is one process with a GPU."""
    import torch
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    from vram_guard_accelerate.cli.target import budget_for

    renew_in_copy()
    isolate(parent.home.numbers)
    discard_writes(caches())
    os.environ.update({ON_CPU: str(accelerator.device.type == "cpu"), "ACCELERATE_USE_CPU": "False"})
    ranks = accelerator.num_processes
    try:
        budget = budget_for(settings, ranks, "all")
    except VramGuardError as error:
        parent.send(DryRunFailure.of(error))
    shape = LaunchShape.of(budget, ranks, int(os.environ.get("LOCAL_WORLD_SIZE", ranks)))
    run = DryRun(shape, lambda first: _decided(first, settings, budget, parent), planned_batch=settings.planned_batch)
    run.phase = PreparingPhase(run)

    def failed(_kind: Any, error: BaseException, _traceback: Any) -> NoReturn:
        run.phase.failed(error, sys.argv[0])
        parent.send(DryRunFailure.of(error, sys.argv[0]))

    def ended() -> NoReturn:
        run.phase.ended()
        parent.send(DryRunFailure.unsupported(_("the script ended without asking for a training batch")))

    atexit.register(ended)
    if torch.distributed.is_initialized():  # the other ranks wait for the original, over connections of its own
        _entered.enter_context(pretended_group(ranks))
    one = {"distributed_type": DistributedType.NO, "num_processes": 1, "process_index": 0, "local_process_index": 0}
    for state in (PartialState, AcceleratorState):  # the second takes the first one's whenever it is asked for
        state._shared_state.update(one, device=torch.device("cuda", 0), backend=None)  # noqa: SLF001 - see private_api.py
    sys.excepthook = failed
    patches.install(run)
    run.script.uses_accelerate = True  # its Accelerator is there already
    run.phase.begins()


def _report(text: str) -> None:
    """In the script's log, or on standard error where it shows none: a plan is not applied without a word."""
    if _logger.hasHandlers() and _logger.isEnabledFor(logging.INFO):
        _logger.info("%s", in_log(fitting_log(text, _logger), _logger))
    else:
        say(text)


def _decided(first: FirstBatch, settings: LaunchSettings, budget: Budget, parent: ParentPipe) -> NoReturn:
    from vram_guard_accelerate.planning.followed_script import answer_for

    answer = answer_for(first, settings, budget, sys.argv[0])
    parent.send(answer)
