"""Rules: changes of a config for a GPU and its host, with their reasons (pure functions)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vram_guard.language import _, marked
from vram_guard.optimize.names import number
from vram_guard.plan.learning_rate import learning_rate_factor, rule_for
from vram_guard.plan.techniques import mixed_precision

if TYPE_CHECKING:
    from vram_guard.optimize.batch import BatchChoice
    from vram_guard.optimize.document import Entry, Place

#: torch.compile's GPU code generator, Triton, needs this compute capability (torch/_inductor/scheduler.py raises
#: GPUTooOldForTriton below it).
COMPILED_SINCE = (7, 0)

#: Of a switch that does not name a type: the program's own code does.
_SWITCHED = marked("half the bytes of activations; which half precision it is, float16 or bfloat16, your program says")

#: More workers rarely help one GPU, and each holds its batches and a copy of the data set's state in host memory.
MOST_WORKERS = 16

#: Batches that each worker prepares ahead: the guide's value, twice torch's own default of 2.
PREFETCH = 4

#: The guide's bound for the norm of the gradients.
CLIP_NORM = 1.0


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


@dataclass(frozen=True)
class ConfigChange:
    """One value to be written."""

    setting: str
    place: Place
    old: Any
    new: Any
    reason: str
    behind: Place | None = None
    """Set where the entry is new: the neighbour that it comes behind."""

    @property
    def path(self) -> str:
        """As people write it: "train.batch_size"."""
        return ".".join(self.place)


@dataclass(frozen=True)
class Advice:
    """The changes, and why the rest stays."""

    changes: tuple[ConfigChange, ...]
    kept: tuple[tuple[str, str], ...] = field(default=())
    """(setting, reason)."""

    def replaced(self) -> dict[Place, Any]:
        """Place -> new value, of entries that are there already."""
        return {change.place: change.new for change in self.changes if change.behind is None}

    def added(self) -> list[tuple[Place, str, Any]]:
        """(neighbour, key, value) of entries that are new."""
        return [(change.behind, change.place[-1], change.new) for change in self.changes if change.behind is not None]


def advise(found: Mapping[str, list[Entry]], situation: Situation) -> Advice:
    """Decide on the changes of a config.

    Args:
        found: setting -> its entries, checked; with a batch size.
        situation: the GPU, the host, what is known about the batch.
    """
    return _Adviser(found, situation).advice()


class _Adviser:
    def __init__(self, found: Mapping[str, list[Entry]], situation: Situation) -> None:
        self._found, self._at = found, situation
        self._changes: list[ConfigChange] = []
        self._kept: list[tuple[str, str]] = []
        self._workers = self._one("workers").value if "workers" in found else 0

    def advice(self) -> Advice:
        for setting in (self._batch, self._loader, self._precision, self._compile, self._clip):
            setting()
        return Advice(tuple(self._changes), tuple(self._kept))

    # --- the settings -----------------------------------------------------------------------------------------------

    def _batch(self) -> None:
        batch, entry = self._at.batch, self._one("batch_size")
        if batch is None:
            self._keep("batch_size", _("the config names no model that can be built: give --step module:function"))
            return
        if batch.batch_size == entry.value:
            self._keep("batch_size", batch.reason)
            return
        if not self._set("batch_size", batch.batch_size, batch.reason):
            return
        accumulate = self._one("accumulate").value if "accumulate" in self._found else 1
        if batch.accumulate != accumulate:
            self._set("accumulate", batch.accumulate, _("the optimizer step keeps its number of samples"))
        self._learning_rates(entry.value * accumulate, batch.batch_size * batch.accumulate)

    def _learning_rates(self, before: int, after: int) -> None:
        rule = rule_for(self._at.lr_rule, "" if self._at.batch is None else self._at.batch.optimizer)
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
            return
        for entry in self._found["learning_rate"]:
            rate = number(entry.value)
            assert rate is not None  # checked
            self._set("learning_rate", float(f"{rate * factor:.12g}"), why, entry)

    def _loader(self) -> None:
        self._number_of_workers()
        with_workers = _("the loader has no workers") if self._workers == 0 else ""
        self._switch("pin_memory", "workers", _("copies to the GPU from pinned memory need no second copy"))
        for setting, new, why in (
            ("persistent_workers", True, _("workers are not restarted for each epoch")),
            ("prefetch_factor", PREFETCH, _("batches that each worker has ready; torch's default is 2")),
        ):
            if with_workers:  # torch refuses both without workers
                self._keep(setting, with_workers)
            elif new is True:
                self._switch(setting, "workers", why)
            else:
                self._raise_to(setting, new, why)

    def _number_of_workers(self) -> None:
        cores = self._at.cores
        wanted = max(1, min(MOST_WORKERS, cores - 1 if cores > 2 else cores))
        if "workers" in self._found and 0 < self._workers <= cores:
            self._keep("workers", _("{count} workers on {cores} processors", count=self._workers, cores=cores))
            return
        if self._workers > cores:
            why = _("{count} workers would wait for each other on {cores} processors", count=self._workers, cores=cores)
        else:
            why = _("batches are made while the GPU computes; {cores} processors here", cores=cores)
        if self._set("workers", wanted, why, behind="batch_size", name="num_workers"):
            self._workers = wanted

    def _precision(self) -> None:
        entries = self._found.get("precision", [])
        target, reason = mixed_precision(self._at.precision, self._at.capability)
        why = str(reason)
        if target is None:
            self._keep("precision", why)
            return
        written = [entry for entry in entries if precision_value(entry, target) is not None]
        # Where a config has both, bfloat16's own switch is the one to turn.
        own = [entry for entry in written if "bf16" in entry.name.lower()] if target == "bf16-mixed" else []
        others = [entry for entry in written if "bf16" not in entry.name.lower()]
        best = (own or others)[:1]
        if not best:
            if entries:
                self._keep(
                    "precision",
                    _("its present value is not recognised, so it stays (reason for the change: {why})", why=why),
                )
            else:
                self._set(
                    "precision",
                    True,
                    _(_SWITCHED) if target == "bf16-mixed" else why,
                    behind="batch_size",
                    name="use_mixed_precision",
                )
            return
        value = precision_value(best[0], target)
        is_switch = value is True and target == "bf16-mixed" and "bf16" not in best[0].name.lower()
        self._set("precision", value, _(_SWITCHED) if is_switch else why, best[0])

    def _compile(self) -> None:
        capability = self._at.capability
        if capability is None or capability < COMPILED_SINCE:
            named = _("not known") if capability is None else ".".join(map(str, capability))
            self._keep("compile", _("torch.compile needs compute capability 7.0; this is {found}", found=named))
            return
        if "compile" in self._found and not isinstance(self._one("compile").value, bool | None):
            self._keep("compile", _("it must be true or false"))
            return
        why = _("fused kernels; the first steps take minutes, and inputs should keep their shape")
        self._switch("compile", "batch_size", why, name="compile_model")

    def _clip(self) -> None:
        if "clip" in self._found and self._one("clip").value is not None:
            self._keep("clip", _("it is {value} already", value=self._one("clip").value))
            return
        risky = [change.setting for change in self._changes if change.setting in ("learning_rate", "precision")]
        if not risky:
            self._keep("clip", _("neither the learning rate nor the precision changes"))
            return
        why = _("a bound for unstable steps under the new learning rate or precision")
        self._set("clip", CLIP_NORM, why, behind="batch_size", name="grad_clip")

    # --- how they are written ---------------------------------------------------------------------------------------

    def _one(self, setting: str) -> Entry:
        return self._found[setting][0]

    def _switch(self, setting: str, behind: str, why: str, name: str = "") -> None:
        if setting in self._found and self._one(setting).value is True:
            self._keep(setting, _("it is {value} already", value="true"))
        else:
            self._set(setting, True, why, behind=behind, name=name or setting)

    def _raise_to(self, setting: str, new: int, why: str) -> None:
        old = self._one(setting).value if setting in self._found else None
        if old is not None and old >= new:
            self._keep(setting, _("it is {value} already", value=old))
        else:
            self._set(setting, new, why, behind="workers", name=setting)

    def _set(
        self, setting: str, new: Any, why: str, entry: Entry | None = None, *, behind: str = "", name: str = ""
    ) -> bool:
        """Note a change, unless the text forbids it or there is nowhere to write it."""
        if entry is None and setting in self._found:
            entry = self._one(setting)
        if entry is not None:
            if not entry.editable:
                self._keep(setting, _("{path} is shared by an anchor or no plain value: edit it", path=entry.path))
                return False
            self._changes.append(ConfigChange(setting, entry.place, entry.value, new, why))
            return True
        neighbour = self._neighbour(behind)
        if self._at.existing_only or neighbour is None:
            self._keep(setting, _("the config has no such entry; {why}", why=why))
            return False
        prefix = "dataloader_" if neighbour.name.startswith("dataloader_") else ""  # Hugging Face's Trainer
        place = (*neighbour.place[:-1], prefix + name)
        self._changes.append(ConfigChange(setting, place, None, new, why, behind=neighbour.place))
        return True

    def _neighbour(self, setting: str) -> Entry | None:
        """The entry that a new one comes behind, where the text allows it."""
        for name in (setting, "workers", "batch_size"):
            entry = self._found.get(name, [None])[0]
            if entry is not None and entry.editable:
                return entry
        return None

    def _keep(self, setting: str, why: str) -> None:
        self._kept.append((setting, why))


def precision_value(entry: Entry, target: str) -> Any:
    """The value of an entry for "bf16-mixed" or "16-mixed", in its own spelling; None: it has no such value.

    Lightning and plain configs: "precision: 32-true"; Accelerate: "mixed_precision: no"; switches: "use_amp: false".
    """
    name, old = entry.name.lower(), entry.value
    if name == "precision" and old is None:
        return target
    if isinstance(old, bool) or old is None:
        if "bf16" in name and target != "bf16-mixed":
            return None
        return True
    text = str(old).lower()
    if name == "mixed_precision":
        return {"bf16-mixed": "bf16", "16-mixed": "fp16"}[target] if text in ("no", "none", "fp32", "32") else None
    if name == "precision" and text in ("32", "32-true", "fp32", "float32"):
        return target
    return None
