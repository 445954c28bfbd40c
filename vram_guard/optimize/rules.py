"""Rules: changes of a config for a GPU and its host, with their reasons."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vram_guard.language import _, marked
from vram_guard.optimize.document import ConfigChange
from vram_guard.optimize.names import number
from vram_guard.plan.learning_rate import learning_rate_factor, rule_for
from vram_guard.plan.techniques import mixed_precision

if TYPE_CHECKING:
    from vram_guard.optimize.batch import BatchChoice
    from vram_guard.optimize.document import Document, Entry

#: A control group's limit, "max 100000" or "200000 100000" (Linux, Documentation/admin-guide/cgroup-v2.rst).
CGROUP_LIMIT = Path("/sys/fs/cgroup/cpu.max")
#: torch.compile's GPU code generator, Triton, needs this compute capability (torch/_inductor/scheduler.py raises
#: GPUTooOldForTriton below it).
COMPILED_SINCE = (7, 0)
#: More workers rarely help one GPU, and each holds its batches and a copy of the data set's state in host memory.
MOST_WORKERS = 16
#: Batches that each worker prepares ahead: the guide's value, twice torch's own default of 2.
PREFETCH = 4
#: The guide's bound for the norm of the gradients.
CLIP_NORM = 1.0

#: Of an entry that stays.
_UNREAD = marked("its present value is not recognised, so it stays (reason for the change: {why})")


@dataclass(frozen=True)
class Situation:
    """The GPU, the host and the wishes that a config is made for."""

    cores: int
    """Processors that one training process may use."""
    capability: tuple[int, int] | None
    """The GPU's compute capability."""
    precision: str = "32-true"
    """As written, in Lightning's words."""
    batch: BatchChoice | None = None
    """None: the model cannot be built, so nothing is known about its batch."""
    lr_rule: str = "linear"
    existing_only: bool = False
    """Add no entries: change only those that are there."""


class Advice:
    """The changes of a config, and why the rest stays.

    Args:
        document: the config.
        found: setting -> its entries, checked; with a batch size.
        situation: the GPU, the host, what is known about the batch.
    """

    def __init__(self, document: Document, found: Mapping[str, list[Entry]], situation: Situation) -> None:
        self._document, self._found, self._at = document, found, situation
        self.changes: list[ConfigChange] = []
        self.kept: list[tuple[str, str]] = []
        """(setting, reason)."""
        self._batch()
        self._loader()
        self._precision()
        self._compile()
        self._clip()

    def _batch(self) -> None:
        batch, before = self._at.batch, self._value("batch_size")
        if batch is None:
            self._keep("batch_size", _("the config names no model that can be built: give --step module:function"))
        elif batch.batch_size == before:
            self._keep("batch_size", batch.reason)
        elif self._set("batch_size", batch.batch_size, batch.reason):
            accumulate = self._value("accumulate") or 1
            if batch.accumulate != accumulate:
                self._set("accumulate", batch.accumulate, _("the optimizer step keeps its number of samples"))
            self._learning_rates(before * accumulate, batch.batch_size * batch.accumulate, batch.optimizer)

    def _learning_rates(self, before: int, after: int, optimizer: str) -> None:
        rule = rule_for(self._at.lr_rule, optimizer)
        factor = learning_rate_factor(rule, before, after)
        if factor == 1:
            return
        why = _(
            "the {rule} rule: {after} samples a step in place of {before}; warm up (Goyal et al. 2017)",
            rule=rule,
            after=after,
            before=before,
        )
        if "learning_rate" not in self._found:
            self._keep("learning_rate", _("none in the config: multiply yours by {factor}", factor=f"{factor:g}"))
        for entry in self._found.get("learning_rate", ()):
            rate = number(entry.value)
            assert rate is not None  # checked
            self._set("learning_rate", float(f"{rate * factor:.12g}"), why, entry)

    def _loader(self) -> None:
        cores, workers = self._at.cores, self._value("workers") or 0
        why = _("batches are made while the GPU computes; {cores} processors here", cores=cores)
        if not isinstance(workers, int) or workers < 0:
            self._keep("workers", _UNREAD, why)
        elif not 0 < workers <= cores:
            wanted = max(1, min(MOST_WORKERS, cores - 1 if cores > 2 else cores))
            if workers:
                why = _("{count} workers would wait for each other on {cores} processors", count=workers, cores=cores)
            workers = wanted if self._set("workers", wanted, why, key="num_workers") else workers
        self._at_least("pin_memory", True, _("copies to the GPU from pinned memory need no second copy"))
        if workers:  # torch refuses both without
            self._at_least("persistent_workers", True, _("workers are not restarted for each epoch"))
            self._at_least("prefetch_factor", PREFETCH, _("batches that each worker has ready; torch's default is 2"))

    def _precision(self) -> None:
        entries = self._found.get("precision", [])
        target, why = mixed_precision(self._at.precision, self._at.capability)
        if target is None:
            self._keep("precision", str(why))
            return
        writable = [entry for entry in entries if precision_value(entry, target) is not None]
        # Where a config has both, bfloat16's own switch is the one to turn.
        writable.sort(key=lambda entry: ("bf16" in entry.name.lower()) != (target == "bf16-mixed"))
        if entries and not writable:
            self._keep("precision", _UNREAD, str(why))
            return
        value = precision_value(writable[0], target) if writable else True
        named = not writable or "bf16" not in writable[0].name.lower()
        if value is True and target == "bf16-mixed" and named:
            why_so = _(
                "half the bytes of activations; which half precision it is, float16 or bfloat16, your program says"
            )
        else:
            why_so = str(why)
        self._set("precision", value, why_so, writable[0] if writable else None, key="use_mixed_precision")

    def _compile(self) -> None:
        capability = self._at.capability
        if capability is None or capability < COMPILED_SINCE:
            named = _("not known") if capability is None else ".".join(map(str, capability))
            self._keep("compile", _("torch.compile needs compute capability 7.0; this is {found}", found=named))
            return
        why = _("fused kernels; the first steps take minutes, and inputs should keep their shape")
        self._at_least("compile", True, why, key="compile_model")

    def _clip(self) -> None:
        changes = {change.setting for change in self.changes}
        if self._value("clip") is None and not changes.isdisjoint(("learning_rate", "precision")):
            why = _("a bound for unstable steps under the new learning rate or precision")
            self._set("clip", CLIP_NORM, why, key="grad_clip")

    # --- how they are written ---------------------------------------------------------------------------------------

    def _value(self, setting: str) -> Any:
        return self._found[setting][0].value if setting in self._found else None

    def _at_least(self, setting: str, new: int, why: str, key: str = "") -> None:
        """A switch that is to be on, or a number that is to be as large."""
        old = self._value(setting)
        if old is not None and not isinstance(old, bool | int):
            self._keep(setting, _UNREAD, why)
        elif old is None or old < new:
            self._set(setting, new, why, key=key or setting)

    def _set(self, setting: str, new: Any, why: str, entry: Entry | None = None, *, key: str = "") -> bool:
        """Note a change, unless the text forbids it or there is nowhere to write it."""
        entry = entry or next(iter(self._found.get(setting, ())), None)
        if entry is not None:
            if not entry.editable:
                self._keep(setting, _("{path} is shared by an anchor or no plain value: edit it", path=entry.path))
                return False
            self.changes.append(ConfigChange(setting, entry.place, entry.value, new, why))
            return True
        of_loader = setting in ("pin_memory", "persistent_workers", "prefetch_factor")
        beside = [*self._found.get("workers", ()), *self._found["batch_size"]]
        beside = [one for one in (beside if of_loader else beside[::-1]) if one.editable]
        if self._at.existing_only or not beside or not self._document.can_add_behind(beside[0].place):
            self._keep(setting, _("the config has no such entry; {why}", why=why))
            return False
        prefix = "dataloader_" if beside[0].name.startswith("dataloader_") else ""  # Hugging Face's Trainer
        place = (*beside[0].place[:-1], prefix + key)
        self.changes.append(ConfigChange(setting, place, None, new, why, behind=beside[0].place))
        return True

    def _keep(self, setting: str, said: str, why: str = "") -> None:
        self.kept.append((setting, _(said, why=why) if why else said))


def precision_value(entry: Entry, target: str) -> Any:
    """The value of an entry for "bf16-mixed" or "16-mixed", in its own spelling; None: it has no such value.

    Lightning and plain configs: "precision: 32-true"; Accelerate: "mixed_precision: no"; switches: "use_amp: false".
    """
    name, old = entry.name.lower(), entry.value
    if name == "precision" and (old is None or str(old).lower() in ("32", "32-true", "fp32", "float32")):
        return target
    if isinstance(old, bool) or old is None:
        return None if "bf16" in name and target != "bf16-mixed" else True
    if name == "mixed_precision" and str(old).lower() in ("no", "none", "fp32", "32"):
        return {"bf16-mixed": "bf16", "16-mixed": "fp16"}[target]
    return None


def usable_cores(limit: Path = CGROUP_LIMIT) -> int:
    """Processors that this process may run on: its affinity, and within it the limit of its container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = limit.read_text(encoding="ascii").split()
        cores = min(cores, max(1, math.floor(int(quota) / int(period))))
    except (OSError, ValueError):  # no such file, or "max"
        pass
    return max(1, cores)
