"""Settings: what the guard may do to a script, checked before any work."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from vram_guard.errors import InvalidInputError
from vram_guard.language import _, marked
from vram_guard.plan.checks import check_amounts, check_growth, check_switches
from vram_guard.plan.techniques import DEFAULT_ALLOW, checked_techniques
from vram_guard.settings import filled

#: Techniques that cannot be used in a script, which makes model and optimizer by itself, and why.
NOT_HERE: dict[str, str] = {
    "half": marked("the script makes its weights itself, in the precision that it chooses"),
    "offload_frozen": marked("the script moves its frozen models itself"),
    "offload_optimizer": marked(
        "Accelerate's FSDP2 takes an optimizer to the host only together with the parameters (offload_parameters), and "
        "DeepSpeed, which can part them, is not followed"
    ),
    "8bit": marked("the script has made its optimizer before Accelerate sees it"),
}

#: Used only where it is named: "offload", which is allowed by default, does not mean it. It changes what a script's
#: checkpoints and state dicts hold.
ONLY_BY_NAME = frozenset({"offload_parameters"})


@dataclass(frozen=True)
class Settings:
    """The guard's own options.

    Attributes:
        budget: what PyTorch's allocator may reserve on each GPU: "24GiB", or bytes.
        gpu: a whole card by name. With neither, what is free on the GPUs here.
        margin: the share of the budget to leave free, in [0, 1); None: the default.
        allow: what may be changed, see :data:`vram_guard.plan.techniques.TECHNIQUES`.
        grow: where the step fits, enlarge the batch and scale learning rates by ``lr_rule``.
        target_utilization: the share of the memory that growth may fill, in (0, 1].
        lr_rule: "linear", "sqrt" or "none".
        host_budget: host memory that techniques may take; None: what is free.
        loss_weight: what a loss that the model returns is over the samples of a batch, "mean" or "sum"; None: it is
            read from the loss.
    """

    budget: str | int | None = None
    gpu: str | None = None
    margin: float | None = None
    allow: tuple[str, ...] = DEFAULT_ALLOW
    grow: bool = False
    target_utilization: float = 0.8
    lr_rule: str = "linear"
    host_budget: str | int | None = None
    loss_weight: Literal["mean", "sum"] | None = None

    def __post_init__(self) -> None:
        allow: object = self.allow  # text where it comes from a command line
        names = allow.split(",") if isinstance(allow, str) else list(self.allow)
        given = tuple(name.strip() for name in names if name.strip())
        checked_techniques(given)
        object.__setattr__(self, "allow", given)
        check_amounts(self.budget, self.gpu, self.margin, self.host_budget)
        check_growth(self.target_utilization, self.lr_rule)
        check_switches(grow=self.grow)
        if self.loss_weight not in (None, "mean", "sum"):
            raise InvalidInputError(_("loss_weight must be 'mean' or 'sum', not {value}", value=repr(self.loss_weight)))

    @property
    def techniques(self) -> frozenset[str]:
        """Those of the allowed techniques that can be applied to a script."""
        return checked_techniques(self.allow) - NOT_HERE.keys() - (ONLY_BY_NAME - set(self.allow))

    @property
    def refused(self) -> tuple[str, ...]:
        """What was asked for by its own name and cannot be done here, in words."""
        return tuple(
            _("{technique} is not possible here: {reason}", technique=name, reason=_(NOT_HERE[name]))
            for name in self.allow
            if name in NOT_HERE
        )

    def asks(self, technique: str) -> bool:
        """Whether a technique, or "grow", was asked for by its name, or is by default."""
        return self.grow if technique == "grow" else technique in self.allow

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Settings:
        """Settings from the parsed options; other names are left alone.

        What is not given comes from the project's settings, see :mod:`vram_guard.settings`.
        """
        own = {field.name for field in fields(cls)}
        # A switch that was not given is False.
        given = {
            name: value for name, value in values.items() if name in own and value is not None and value is not False
        }
        return cls(**filled(given, own))


def add_options(parser: argparse.ArgumentParser) -> None:
    """The guard's options, for ``vram-guard launch`` and ``python -m vram_guard_accelerate`` alike."""
    group = parser.add_argument_group("vram_guard's options")
    group.add_argument("--budget", metavar="BYTES", help='what PyTorch may reserve on each GPU: "24GiB"')
    group.add_argument("--gpu", metavar="NAME", help='a whole card by name: "RTX 4090" (default: what is free here)')
    group.add_argument("--margin", type=float, metavar="SHARE", help="share of the budget to leave free")
    group.add_argument(
        "--allow",
        metavar="NAMES",
        help=f"what may be changed, comma-separated (default: {','.join(DEFAULT_ALLOW)}; offload_parameters, which is "
        "FSDP2, only where it is named)",
    )
    group.add_argument("--grow", action="store_true", help="where it fits, fill the GPU with a larger batch")
    group.add_argument("--target-utilization", type=float, metavar="SHARE", help="what --grow may fill (default: 0.8)")
    group.add_argument("--lr-rule", metavar="RULE", help="learning rates under --grow: linear, sqrt or none")
    group.add_argument("--host-budget", metavar="BYTES", help="host memory that may be taken (default: what is free)")
    group.add_argument(
        "--loss-weight", metavar="KIND", help="what a loss that the model returns is: mean or sum (default: it is read)"
    )
    group.add_argument("--dry-run", action="store_true", help="only plan: exit code 0 if it fits, 1 if not")
    group.add_argument("--json", action="store_true", help="the plan as JSON, on standard output")
    group.add_argument("--yes", action="store_true", help="launch without asking (the default)")
    group.add_argument("--ask", action="store_true", help="show the plan and ask before launching")
    group.add_argument("--fresh", action="store_true", help="plan anew, though the plan of an equal launch is known")
