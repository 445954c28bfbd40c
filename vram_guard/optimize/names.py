"""Names of a training's settings in people's configs, and checks of their values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import isfinite
from typing import Any, Final

from vram_guard.closed_form.from_config import ELSEWHERE, NAMES
from vram_guard.config_file import leaves
from vram_guard.errors import InvalidInputError
from vram_guard.language import _
from vram_guard.optimize.document import Entry
from vram_guard.step import checked_count

#: Setting -> names of its key, those of the guides, Lightning, Hugging Face's Trainer and OpenMMLab among them.
SETTINGS: Final[Mapping[str, tuple[str, ...]]] = {
    "batch_size": NAMES["batch"],
    "accumulate": NAMES["accumulate"],
    "learning_rate": ("lr", "learning_rate", "base_lr", "initial_lr", "init_lr"),
    "workers": ("num_workers", "dataloader_num_workers", "workers_per_gpu", "n_workers", "workers"),
    "pin_memory": ("pin_memory", "dataloader_pin_memory"),
    "persistent_workers": ("persistent_workers", "dataloader_persistent_workers"),
    "prefetch_factor": ("prefetch_factor", "dataloader_prefetch_factor"),
    "precision": (
        "precision",
        "mixed_precision",
        "use_mixed_precision",
        "use_amp",
        "amp",
        "bf16",
        "fp16",
        "use_fp16",
    ),
    "compile": ("compile_model", "torch_compile", "use_compile", "compile"),
    "clip": ("grad_clip", "gradient_clip_val", "max_grad_norm", "clip_grad_norm", "grad_clip_norm", "gradient_clip"),
}

#: Keys of a LightningCLI's config, beside those that a program adds.
LIGHTNING_CLI: Final = frozenset(
    {"seed_everything", "trainer", "model", "data", "optimizer", "lr_scheduler", "ckpt_path", "weights_only"}
)

#: Settings that may well stand in several places, all of which are meant.
EVERYWHERE: Final = frozenset({"learning_rate", "precision"})


def find(entries: Iterable[Entry]) -> dict[str, list[Entry]]:
    """Setting -> its entries in the config; several only for :data:`EVERYWHERE`.

    Sections about validation and tests are left aside; of several entries, those in a section about training count,
    then the one nearest to the top of the tree.

    Args:
        entries: of the config.

    Raises:
        InvalidInputError: an entry cannot be told from others.
    """
    known = list(entries)
    found: dict[str, list[Entry]] = {}
    for setting, names in SETTINGS.items():
        if matching := _matching(setting, names, known):
            found[setting] = _holders(matching, known)
    return found


def _holders(matching: list[Entry], entries: list[Entry]) -> list[Entry]:
    """The entries that hold the values: of several that refer to one, that one, once."""
    by_place = {entry.place: entry for entry in entries}
    held = [by_place.get(entry.holder, entry) for entry in matching]
    return list({entry.place: entry for entry in held}.values())


def holds_arguments(config: Mapping[str, Any]) -> bool:
    """True for a config of LightningCLI or Hydra, whose keys are the arguments of classes: others may be refused."""
    if any(path.rpartition(".")[2] in ("class_path", "_target_", "seed_everything") for path, _value in leaves(config)):
        return True
    section = config["fit"] if isinstance(config.get("fit"), Mapping) else config
    return isinstance(section.get("trainer"), Mapping) and section.keys() <= LIGHTNING_CLI


def _matching(setting: str, names: tuple[str, ...], entries: list[Entry]) -> list[Entry]:
    for name in names if setting != "precision" else (names,):
        wanted = {name} if isinstance(name, str) else set(name)
        here = [entry for entry in entries if entry.name.lower() in wanted and _about_training(entry)]
        if not here:
            continue
        if setting in EVERYWHERE:
            return here
        training = [entry for entry in here if any("train" in key.lower() for key in entry.place[:-1])]
        best = training or here
        least = min(len(entry.place) for entry in best)
        nearest = [entry for entry in best if len(entry.place) == least]
        if len(nearest) > 1:
            places = ", ".join(f"{entry.path} (line {entry.line})" for entry in nearest)
            raise InvalidInputError(
                _("{setting} may be any of {places}: give the others another name", setting=setting, places=places)
            )
        return nearest
    return []


def _about_training(entry: Entry) -> bool:
    return ELSEWHERE.isdisjoint(key.lower() for key in entry.place[:-1])


def check(found: Mapping[str, list[Entry]]) -> None:
    """Refuse numbers that make no sense.

    Raises:
        InvalidInputError: names the entry, its line and its value.
    """
    for setting, entries in found.items():
        for entry in entries:
            problem = _problem(setting, entry.value)
            if problem:
                raise InvalidInputError(
                    _(
                        "line {line}: {path} is {value}: {problem}",
                        line=entry.line,
                        path=entry.path,
                        value=repr(entry.value)[:60],
                        problem=problem,
                    )
                )


def _problem(setting: str, value: Any) -> str:
    if setting in ("batch_size", "accumulate"):
        try:
            checked_count(setting, value)
        except InvalidInputError:
            return _("it must be a whole number of at least 1")
    if setting == "learning_rate" and not (number(value) or -1) > 0:
        return _("it must be a number above 0")
    if setting == "workers" and not (type(value) is int and 0 <= value <= 4096):
        return _("it must be a whole number from 0")
    if setting == "prefetch_factor" and value is not None and (type(value) is not int or not 1 <= value <= 4096):
        return _("it must be a whole number of at least 1")
    if setting in ("pin_memory", "persistent_workers") and not isinstance(value, bool | None):
        return _("it must be true or false")
    if setting == "clip" and value is not None and not isinstance(value, (bool, dict)):
        clip = number(value)
        if clip is None or clip < 0:
            return _("it must be a number from 0")
    return ""


def number(value: Any) -> float | None:
    """A number, also one that stands as text: YAML 1.1 reads 1e-4 so. None: it is none, or not finite."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        read = float(value)
    except ValueError:
        return None
    return read if isfinite(read) else None
