"""Variants of a launch: the same script with other options of its own, or in another precision from its beginning.

What a script does with its options, or with the precision that it asks for, is the script's own business: it makes
loaders, schedules and casts of it before it trains. So nothing is assumed. The changed command line is run dry in a
process of its own, which must turn out to be the same training (:mod:`.equivalence`), and which is
then planned for as it is. The plan of the launch as written stands until a variant is cheaper.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from vram_guard.language import _
from vram_guard.plan.descriptions import Reason, Why
from vram_guard.plan.step_time import seconds_as_written

if TYPE_CHECKING:
    from vram_guard.plan import Plan
    from vram_guard_accelerate.dry_run.loop_profile import Conduct
    from vram_guard_accelerate.launch_plan import Orders

#: Variants that are run dry for one launch, at most: each costs the script's start once more.
MOST = 3


@dataclass(frozen=True)
class Variant:
    """What is changed in a launch.

    Attributes:
        precision: "fp16" or "bf16" from the script's beginning on; "" leaves it.
        precision_option: the script's own option for it; "": Accelerate's environment variable alone.
        splits: by how much the script's batches are smaller, and its optimizer steps more batches long.
        batch_size: the script's own, under this variant; 0 leaves it.
        batch_option: the option that is set for it.
        accumulation: batches of an optimizer step, under this variant.
        accumulation_option: the option that is set for it.
    """

    precision: str = ""
    precision_option: str = ""
    splits: int = 1
    batch_size: int = 0
    batch_option: str = ""
    accumulation: int = 0
    accumulation_option: str = ""

    @property
    def kind(self) -> Literal["options", "precision"]:
        """What is new in it."""
        return "options" if self.splits > 1 else "precision"

    @property
    def arguments(self) -> list[str]:
        """What is added to the script's command line; the last of two equal options counts."""
        return [
            *([self.precision_option, self.precision] if self.precision_option else []),
            *([self.batch_option, str(self.batch_size)] if self.batch_option else []),
            *([self.accumulation_option, str(self.accumulation)] if self.accumulation_option else []),
        ]

    @property
    def environment(self) -> dict[str, str]:
        """What is set in the script's environment."""
        return {"ACCELERATE_MIXED_PRECISION": self.precision} if self.precision else {}

    @property
    def words(self) -> str:
        """As it would be typed."""
        typed = [] if self.precision_option or not self.precision else ["--mixed_precision", self.precision]
        return " ".join([*typed, *self.arguments])

    def in_orders(self, orders: Orders) -> Orders:
        """The orders of a plan for this variant, for a launch of the script as it was typed."""
        own: dict[str, Any] = {}
        if self.precision:
            own.update(precision=self.precision, precision_option=self.precision_option)
        if self.splits > 1:
            own.update(batch_option=self.batch_option, accumulation_option=self.accumulation_option)
            own.update(accumulation=self.accumulation)
        return replace(orders, **own)


@dataclass(frozen=True)
class Origin:
    """What a variant is compared with."""

    plan: Plan
    """Of the launch as it was typed; without its timelines."""
    seconds: float
    """The modelled time of an optimizer step of it."""
    conduct: Conduct
    """What the launch does from which this variant was made."""

    def packed(self) -> str:
        """As text, for another process of ours; :meth:`unpacked` reads it back."""
        return base64.b64encode(pickle.dumps(self)).decode("ascii")

    @classmethod
    def unpacked(cls, text: str) -> Origin:
        """From :meth:`packed`."""
        found: Origin = pickle.loads(base64.b64decode(text))  # noqa: S301 - from our own process
        return found


@dataclass(frozen=True)
class Varied:
    """A launch that is a variant of another."""

    variant: Variant
    origin: Origin
    splits: int = 1
    """By how much batches are smaller than the origin's."""

    @classmethod
    def read(cls, asked: Mapping[str, Any] | None) -> Varied | None:
        """From :meth:`asked`."""
        if not asked:
            return None
        return cls(Variant(**asked["variant"]), Origin.unpacked(asked["origin"]), asked["splits"])

    def asked(self) -> dict[str, Any]:
        """Plain values, for the process that runs it dry."""
        return {"variant": asdict(self.variant), "origin": self.origin.packed(), "splits": self.splits}

    @property
    def settled(self) -> set[str]:
        """What this launch has been chosen for already, and is not to be planned once more."""
        variant = self.variant
        done = {"grow": True, "accumulate": variant.splits > 1, "precision": bool(variant.precision)}
        return {name for name, chosen in done.items() if chosen}

    def disagreement(self, conduct: Conduct, ranks: int) -> str:
        """Why this launch, over so many processes, is another training than the one that it is a variant of.

        "" where it is the same.
        """
        from vram_guard_accelerate.relaunch.equivalence import disagreement

        return disagreement(self.origin.conduct, conduct, self.splits, ranks, losses=self.splits > 1)

    def combined(self, plan: Plan) -> Plan:
        """A plan for the variant, as a plan for the launch as it was typed."""
        written = self.origin.plan
        slowdown = round((plan.slowdown or 1.0) * seconds_as_written(plan) / self.origin.seconds, 4)
        own = [reason for reason in plan.reason_values if reason.kind is not Why.CHEAPEST] if plan.changed else []
        return replace(
            plan,
            precision_before=written.precision_before,
            accumulate_before=written.accumulate_before,
            batch_size_before=written.batch_size_before,
            effective_batch_size_before=written.effective_batch_size_before,
            before=written.before,
            timeline_before=None,
            slowdown=slowdown,
            reason_values=(
                written.reason_values[0],
                Reason(Why.LAUNCHED_WITH, options=self.variant.words),
                *(Reason(Why.LAUNCHED_SO, reason=reason) for reason in own[:1]),
                *own[1:],
                Reason(Why.CHEAPEST, factor=f"{slowdown:.2f}"),
            ),
        )

    def notes(self) -> list[str]:
        """What a reader of the plan should know."""
        variant = self.variant
        found = [
            _(
                "{options}: seen in a dry run of its own, with the same samples and learning rates at every optimizer "
                "step",
                options=variant.words,
            )
        ]
        if variant.splits > 1:
            found.append(
                _(
                    "the script's own batches are smaller and its loader is {count} times as long: what it counts in "
                    "batches (prints, limits, progress) comes {count} times as often; what it counts in optimizer "
                    "steps stays. What is drawn at random (noise, dropout) is drawn for smaller batches: other "
                    "numbers, as random as before. No forward runs twice",
                    count=variant.splits,
                )
            )
        return found


def settled(
    first: dict[str, Any], run: Callable[[Mapping[str, Any]], dict[str, Any]], progress: Callable[[str], None]
) -> dict[str, Any]:
    """The best answer of a launch and its variants.

    Args:
        first: the answer of the launch as it was typed, with the variants that it wants.
        run: runs one of these dry, and returns its answer.
        progress: called with a line of text before each.
    """
    best, waiting, notes, seconds, tried = first, list(first.get("wanted", ())), list[str](), first["seconds"], 0
    while waiting and tried < MOST:
        asked, tried = waiting.pop(0), tried + 1
        variant = Variant(**asked["variant"])
        progress(variant.words)
        answer = run(asked)
        if "error" in answer:
            notes.append(_not_taken(variant, answer["message"]))
            waiting = [other for other in waiting if Variant(**other["variant"]).kind != variant.kind]
            continue
        seconds = {name: seconds[name] + answer["seconds"][name] for name in seconds}
        if _is_better(answer, best):
            best, waiting = answer, list(answer.get("wanted", ()))
        else:
            notes.append(_not_taken(variant, _why_worse(answer)))
            waiting = [*answer.get("wanted", ()), *waiting]
    return {**best, "notes": [*best["notes"], *notes], "seconds": seconds, "wanted": []}


def _not_taken(variant: Variant, why: str) -> str:
    return _("{options} was tried in a dry run of its own, and is not taken: {why}", options=variant.words, why=why)


def _why_worse(answer: Mapping[str, Any]) -> str:
    if not answer["fits"]:
        return _("it does not fit")
    return _("costs {factor} times the step time", factor=f"{answer['plan']['slowdown'] or 1.0:.2f}")


def _is_better(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    if one["fits"] != other["fits"]:
        return bool(one["fits"])
    return bool(one["fits"]) and (one["plan"]["slowdown"] or 1.0) < (other["plan"]["slowdown"] or 1.0)
