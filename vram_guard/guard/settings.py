"""The settings of every guard, checked before any work; an adapter's class adds the fields of its own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final, Literal

from vram_guard.budget import Budget
from vram_guard.errors import InvalidInputError
from vram_guard.language import _
from vram_guard.longest.planned_batch import PlannedBatch
from vram_guard.plan.checks import (
    Mode,
    check_amounts,
    check_cudnn,
    check_growth,
    check_longest,
    check_loss_weight,
    check_mode,
    check_seconds,
    check_switches,
)
from vram_guard.plan.pins import Pins
from vram_guard.plan.techniques import DEFAULT_ALLOW, OFFLOADS, checked_techniques

if TYPE_CHECKING:
    from typing_extensions import Self

    from vram_guard.apply.loss_weight import LossWeight

#: Settings of a guard that stand in ``advanced={...}``.
ADVANCED: Final = (
    *("blocks", "cudnn", "gpu_memory", "host_budget", "longest_seconds", "lr_rule"),
    *("priority", "remember", "start_seconds", "target_utilization", "whole_job"),
)


def suggestion(name: object, known: Iterable[str], advanced: Collection[str] = ()) -> str:
    """The end of a message about an unknown name: the nearest known one, or where it belongs; "" where none is near."""
    if name in advanced:
        return _("; did you mean {near}?", near=f"advanced=dict({name}=...)")
    near = get_close_matches(str(name), tuple(known), n=1)
    return _("; did you mean {near}?", near=repr(near[0])) if near else ""


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """Techniques that a plan may use and parts of the training that it may change.

    Args:
        budget: what PyTorch's allocator may reserve: "24GiB", bytes, or a ``vram_guard.Budget``.
        gpu: a whole card by name ("RTX 4090") or by its size ("24GB"). With neither, what is free on the device that
            trains.
        gpu_memory: a whole card by its size: "24GiB"; a number without a unit is GB.
        margin: the share of the budget to leave free, in [0, 1); None: the default.
        allow: what may be changed, see :data:`vram_guard.plan.techniques.TECHNIQUES`; None: the default.
        grow: where the step fits, enlarge the batch up to ``target_utilization`` and scale learning rates by
            ``lr_rule``.
        target_utilization: the share of the memory that growth may fill, in (0, 1].
        lr_rule: "linear", "sqrt", "none" or "auto" ("linear" for SGD, "sqrt" for Adam-like optimizers).
        host_budget: host memory that techniques may take: "64GiB" or bytes; None: what is free now.
        longest: the batch that is planned for, where samples differ in size: "largest" that the loader can make, as far
            as the sizes of samples can be known; "first": the largest of the first samples.
        longest_seconds: that looking for it may take.
        whole_job: predict and plan also for what the training does besides its first steps: resuming, validation,
            saving, steps of later epochs that differ. False: for the first steps alone.
        verbose: print the whole report: tables, reasons, alternatives. False: about a dozen lines, and the path of a
            page that has it all.

    Raises:
        InvalidInputError: a setting makes no sense.
    """

    budget: Budget | str | int | None = None
    gpu: str | None = None
    gpu_memory: str | float | None = None
    margin: float | None = None
    allow: str | Iterable[str] | None = None
    """Names as they were given, a frozenset after the check; see :attr:`techniques`."""
    grow: bool = False
    target_utilization: float = 0.8
    lr_rule: str = "linear"
    host_budget: str | int | None = None
    longest: str = "largest"
    longest_seconds: float = 2.0
    whole_job: bool = True
    verbose: bool = False

    def __post_init__(self) -> None:
        allow = DEFAULT_ALLOW if self.allow is None else self.allow
        names = [name.strip() for name in allow.split(",")] if isinstance(allow, str) else list(allow)
        checked_techniques(names)
        self._keep("allow", frozenset(names) - {""})
        check_amounts(self.budget, self.gpu, self.margin, self.host_budget, self.gpu_memory)
        check_growth(self.target_utilization, self.lr_rule)
        check_longest(self.longest)
        check_seconds("longest_seconds", self.longest_seconds)
        check_switches(grow=self.grow, whole_job=self.whole_job, verbose=self.verbose)

    def _keep(self, name: str, value: object) -> None:
        """Replace a value by its checked form."""
        object.__setattr__(self, name, value)

    @property
    def names_no_memory(self) -> bool:
        """True if it is left to the device that trains how much memory there is."""
        return self.budget is None and self.gpu is None and self.gpu_memory is None

    def resolved_budget(self, device: object = None) -> Budget:
        """The budget that these settings mean; see :meth:`vram_guard.Budget.resolve` for the errors.

        Args:
            device: whose free memory counts where the settings name none; None: the current device.
        """
        device = device if self.names_no_memory else None
        return Budget.resolve(self.budget, self.gpu, self.margin, device, self.gpu_memory)

    @property
    def planned_batch(self) -> PlannedBatch:
        """The batch that is planned for."""
        return PlannedBatch(self.longest, self.longest_seconds)

    @property
    def techniques(self) -> frozenset[str]:
        """The allowed techniques, "offload" spelt out."""
        return checked_techniques(self.allow or ())

    @property
    def asked_for(self) -> frozenset[str]:
        """Techniques whose refusal is reported: all but the kinds of offload that only the default stands for.

        Those of smaller batches of an evaluation, and of slices, are among the plan's reasons, where they would help.
        """
        by_default = OFFLOADS if self.allow == frozenset(DEFAULT_ALLOW) else ()
        return self.techniques - {*by_default, "evaluation", "slices"}

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The settings of a guard."""
        return tuple(one.name for one in fields(cls))

    @classmethod
    def flat(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """The keys of a config or the arguments of a guard, those of ``advanced`` among them.

        Raises:
            InvalidInputError: an unknown key; the message suggests the right one.
        """
        if not isinstance(given, Mapping):
            raise InvalidInputError(_("vram_guard must be a dict(...) in the config, not {value}", value=repr(given)))
        advanced = tuple(name for name in cls.names() if name in ADVANCED)
        known = tuple(name for name in cls.names() if name not in ADVANCED)
        own = {name: value for name, value in given.items() if name != "advanced"}
        held = given.get("advanced") or {}
        if not isinstance(held, Mapping):
            raise InvalidInputError(_("advanced must be a mapping of settings, not {value}", value=repr(held)))
        for names, among in ((own, (*known, "advanced")), (held, advanced)):
            for key in names:
                if key not in among:
                    raise InvalidInputError(
                        _("vram_guard: unknown key {key}, known are {known}", key=repr(key), known=", ".join(among))
                        + suggestion(key, cls.names(), advanced if among is not advanced else ())
                    )
        return {**own, **held}

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Settings from the keys of a config.

        Raises:
            InvalidInputError: an unknown key, or a value that makes no sense.
        """
        return cls(**cls.flat(given))


@dataclass(frozen=True, kw_only=True)
class GuardSettings(PlanSettings):
    """The settings of a guard that works inside the training's own process.

    Args:
        mode: "fit": where the step does not fit, the smallest change that makes it fit is applied. "report": nothing is
            changed and nothing raised. "strict": nothing is changed; a step that does not fit as written, or cannot be
            predicted, raises.
        loss_weight: what the loss is over the samples of a batch. "auto": it is found out and proven, and where it
            cannot be, batches are not cut; "mean": their mean; "sum": their sum; or a function ``batch -> count`` where
            it is the mean over something else, such as labels that are not ignored.
        pin: parts of the plan that are fixed, see :class:`vram_guard.plan.Pins`.
        blocks: names of the modules that may be checkpointed or offloaded; None: repeated modules are found.
        recover: in mode "fit", go on after a real out-of-memory error: the batch that failed is rolled back and runs
            again in smaller micro-batches. In one process; with several, the error stops them with the plan to use.
        remember: read timelines that were traced before, as long as nothing that the trace has read has changed; keep
            how measured memory compares with the prediction, for this model on this GPU, and raise later
            predictions by it.
        cudnn: the cuDNN that is asked for the workspaces of convolutions, as in :func:`vram_guard.simulate.trace`.

    Raises:
        InvalidInputError: a setting makes no sense.
    """

    mode: Mode = "fit"
    loss_weight: Literal["auto", "mean", "sum"] | Callable[[Any], Any] = "auto"
    pin: Mapping[str, Any] | Pins | None = None
    blocks: str | Iterable[str] | None = None
    """A tuple after the check."""
    recover: bool = True
    remember: bool = True
    cudnn: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_mode(self.mode)
        check_loss_weight(self.loss_weight)
        check_switches(recover=self.recover, remember=self.remember)
        check_cudnn(self.cudnn)
        self._keep("pin", self.pins)
        if self.grow:
            self.pins.check_growth()
        if self.blocks is not None:
            self._keep("blocks", (self.blocks,) if isinstance(self.blocks, str) else tuple(self.blocks))

    @property
    def said_loss_weight(self) -> LossWeight | None:
        """How the user said that the losses of micro-batches are weighed; None: it is to be found out."""
        return None if self.loss_weight == "auto" else self.loss_weight

    @property
    def may_recover(self) -> bool:
        """True if batches may be cut after an out-of-memory error, as far as the settings go."""
        return self.mode == "fit" and self.recover and "accumulate" in self.techniques

    @property
    def pins(self) -> Pins:
        """The parts of the plan that are fixed."""
        return Pins.of(self.pin)
