"""Settings: what the guard may do to a script, checked before any work."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vram_guard.cli import options
from vram_guard.errors import InvalidInputError
from vram_guard.guard.settings import ADVANCED, PlanSettings
from vram_guard.language import _, marked
from vram_guard.plan.checks import check_seconds
from vram_guard.plan.techniques import DEFAULT_ALLOW
from vram_guard.settings import filled, read

if TYPE_CHECKING:
    from typing_extensions import Self

#: Why the guard leaves a model divided, or whole, as it is launched.
ELSEWHERE = marked(
    "how a model is divided, and whether it lies on the host, is chosen by accelerate's own options, which are "
    "predicted as they are given (--use_fsdp --fsdp_version 2 --fsdp_offload_params true)"
)

#: Techniques that cannot be used in a script, which makes model and optimizer by itself, and why.
NOT_HERE: dict[str, str] = {
    "accumulate": marked("a script computes its loss by itself, once for each batch; slices leave that as it is"),
    "half": marked("the script makes its weights itself, in the precision that it chooses"),
    "offload_frozen": marked("the script moves its frozen models itself"),
    "offload_optimizer": marked(
        "accelerate's own options take an optimizer to the host: together with the parameters under FSDP2 "
        "(--fsdp_offload_params true), alone under DeepSpeed (--use_deepspeed)"
    ),
    "8bit": marked("the script has made its optimizer before Accelerate sees it"),
    "evaluation": marked("what a script makes of the outputs of its evaluations is not known"),
    "offload_parameters": ELSEWHERE,
    "shard": ELSEWHERE,
    "optimizer_in_backward": marked("a script may do anything with its gradients before it steps"),
}


@dataclass(frozen=True, kw_only=True)
class LaunchSettings(PlanSettings):
    """The guard's own options.

    Args:
        start_seconds: that the script may take until it begins to train.
    """

    allow: tuple[str, ...] | None = None
    """In order: it travels as JSON."""
    start_seconds: float = 1800.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._keep("allow", tuple(sorted(self.allow or ())))
        check_seconds("start_seconds", self.start_seconds)

    @property
    def techniques(self) -> frozenset[str]:
        """Those of the allowed techniques that can be applied to a script."""
        return super().techniques - NOT_HERE.keys()

    def asks(self, technique: str) -> bool:
        """True if a technique, or "grow", was asked for by its name, or is by default."""
        return self.grow if technique == "grow" else technique in (self.allow or ())

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Settings of what is given; the rest comes from the project's settings, see :mod:`vram_guard.settings`."""
        own = {name: value for name, value in cls.flat(given).items() if value is not None}
        return cls(**filled(own, cls.names()))

    @classmethod
    def of_options(cls, options: Mapping[str, Any]) -> Self:
        """The same of parsed command-line options, among which there are others; a switch that is off was not given.

        Raises:
            InvalidInputError: an option makes no sense.
        """
        own = {name: value for name, value in options.items() if name in cls.names() and value is not False}
        advanced = dict(_assigned(one) for one in options.get("advanced") or ())
        return cls.of({**own, "advanced": advanced})


def _assigned(word: str) -> tuple[str, Any]:
    """``NAME=VALUE`` as a setting and its value."""
    name, equals, value = word.partition("=")
    if not equals:
        raise InvalidInputError(_("--advanced takes NAME=VALUE, not {value}", value=repr(word)))
    return name, read(name, value, "--advanced")


def add_options(parser: argparse.ArgumentParser) -> None:
    """The guard's options of ``vram-guard launch``."""
    group = parser.add_argument_group(_("vram_guard's options"))
    options.add_options(group, "budget", "gpu", "verbose")
    options.add_options(group, "margin", type=float)
    group.add_argument(
        "--allow",
        metavar="NAMES",
        help=_(
            "what may be changed, comma-separated (default: {default})",
            default=",".join(name for name in DEFAULT_ALLOW if name not in (*NOT_HERE, "reshard")),
        ),
    )
    group.add_argument("--grow", action="store_true", help=_("where it fits, fill the GPU with a larger batch"))
    group.add_argument(
        "--longest",
        metavar="WHICH",
        help=_("the batch that is planned for: largest or first (default: largest)"),
    )
    group.add_argument(
        "--advanced",
        action="append",
        metavar="NAME=VALUE",
        help=_(
            "another setting: {names}; such as whole_job=false, which stops after two steps",
            names=", ".join(sorted(set(ADVANCED) & set(LaunchSettings.names()))),
        ),
    )
    group.add_argument("--dry-run", action="store_true", help=_("only plan: exit code 0 if it fits, 1 if not"))
    options.add_options(group, "json")
    group.add_argument("--ask", action="store_true", help=_("show the plan and ask before launching"))
