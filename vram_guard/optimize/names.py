"""Names of a training's settings in people's configs, and checks of their values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import isfinite
from typing import Any, Final

from vram_guard.closed_form.from_config import ELSEWHERE, MIXED, NAMES
from vram_guard.config_file import leaves
from vram_guard.errors import InvalidInputError
from vram_guard.language import _
from vram_guard.optimize.document import Entry

#: Setting -> names of its key, those of the guides, Lightning, Hugging Face's Trainer and OpenMMLab among them.
SETTINGS: Final[Mapping[str, tuple[str, ...]]] = {
    "batch_size": NAMES["batch"],
    "accumulate": NAMES["accumulate"],
    "learning_rate": ("lr", "learning_rate", "base_lr", "initial_lr", "init_lr"),
    "workers": ("num_workers", "dataloader_num_workers", "workers_per_gpu", "n_workers", "workers"),
    "pin_memory": ("pin_memory", "dataloader_pin_memory"),
    "persistent_workers": ("persistent_workers", "dataloader_persistent_workers"),
    "prefetch_factor": ("prefetch_factor", "dataloader_prefetch_factor"),
    "precision": MIXED,
    "compile": ("compile_model", "torch_compile", "use_compile", "compile"),
    "clip": ("grad_clip", "gradient_clip_val", "max_grad_norm", "clip_grad_norm", "grad_clip_norm", "gradient_clip"),
}
#: Settings that may well stand in several places, all of which are meant.
EVERYWHERE: Final = frozenset({"learning_rate", "precision"})
#: Keys of a LightningCLI's config, beside those that a program adds.
LIGHTNING_CLI: Final = frozenset(
    {"seed_everything", "trainer", "model", "data", "optimizer", "lr_scheduler", "ckpt_path", "weights_only"}
)


def find(entries: Iterable[Entry]) -> dict[str, list[Entry]]:
    """Setting -> its entries in the config; several only for :data:`EVERYWHERE`.

    Sections about validation and tests are left aside; of several entries, those in a section about training count,
    then the one nearest to the top of the tree.

    Args:
        entries: of the config.

    Raises:
        InvalidInputError: an entry cannot be told from others, or a number makes no sense.
    """
    known = [entry for entry in entries if ELSEWHERE.isdisjoint(key.lower() for key in entry.place[:-1])]
    found: dict[str, list[Entry]] = {}
    for setting, names in SETTINGS.items():
        for group in [names] if setting == "precision" else [(name,) for name in names]:
            here = [entry for entry in known if entry.name.lower() in group]
            if here:
                found[setting] = here if setting in EVERYWHERE else [_nearest(setting, here)]
                break
    for entry in found.get("learning_rate", ()):
        if not (number(entry.value) or -1) > 0:
            raise InvalidInputError(
                _(
                    "line {line}: {path} is {value}: it must be a number above 0",
                    line=entry.line,
                    path=entry.path,
                    value=repr(entry.value)[:60],
                )
            )
    return found


def _nearest(setting: str, here: list[Entry]) -> Entry:
    training = [entry for entry in here if any("train" in key.lower() for key in entry.place[:-1])]
    least = min(len(entry.place) for entry in training or here)
    nearest = [entry for entry in training or here if len(entry.place) == least]
    if len(nearest) > 1:
        places = ", ".join(f"{entry.path} (line {entry.line})" for entry in nearest)
        raise InvalidInputError(
            _("{setting} may be any of {places}: give the others another name", setting=setting, places=places)
        )
    return nearest[0]


def holds_arguments(config: Mapping[str, Any]) -> bool:
    """True for a config of LightningCLI or Hydra, whose keys are the arguments of classes: others may be refused."""
    if any(path.rpartition(".")[2] in ("class_path", "_target_", "seed_everything") for path, _value in leaves(config)):
        return True
    section = config["fit"] if isinstance(config.get("fit"), Mapping) else config
    return isinstance(section.get("trainer"), Mapping) and section.keys() <= LIGHTNING_CLI


def number(value: Any) -> float | None:
    """A number, also one that stands as text: YAML 1.1 reads 1e-4 so. None: it is none, or not finite."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        read = float(value)
    except ValueError:
        return None
    return read if isfinite(read) else None
