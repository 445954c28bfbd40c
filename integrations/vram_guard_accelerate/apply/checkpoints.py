"""The factor that the learning rates in a checkpoint of ``save_state`` contain, in a file next to it.

A checkpoint of a run with a larger batch brings back rates that were multiplied. The code that loads it has to know the
factor: the guard that grows again, by another factor or by none, and the dry run of a launch that changes nothing else.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from vram_guard.language import _

#: The file in a checkpoint.
STATE = "vram_guard.json"

_KEY = "learning_rates_contain"


class ResumedCheckpoint:
    """The checkpoint that a script loads, as its dry run sees it."""

    def __init__(self) -> None:
        self.factor = 1.0
        """By what its learning rates were multiplied."""
        self.not_followed = ""
        """The reason why the memory that loading takes is not known; "" where it is, or where nothing is loaded."""

    @property
    def notes(self) -> list[str]:
        """Notes for a reader of the plan."""
        found = []
        if self.not_followed:
            found.append(
                _("what resuming takes is not included: load_state was not followed ({why})", why=self.not_followed)
            )
        if self.factor != 1:
            found.append(self._about_rates())
        return found

    def _about_rates(self) -> str:
        return _(
            "the learning rates in the checkpoint that is loaded were multiplied by {factor}, for a larger batch; "
            "the guard multiplies them by what this plan says instead",
            factor=f"{self.factor:g}",
        )

    def look(self, accelerator: Any, folder: Any) -> None:
        """The script calls ``load_state(folder)``. The weights' values do not matter, its learning rates do."""
        found = loaded_folder(accelerator, folder)
        self.factor = 1.0 if found is None else read_factor(found)


def write_factor(folder: Path, factor: float) -> None:
    """Say by what the learning rates in this checkpoint were multiplied."""
    (folder / STATE).write_text(json.dumps({_KEY: factor}), encoding="utf-8")


def read_factor(folder: Path) -> float:
    """By what the learning rates in this checkpoint were multiplied; 1 where it is not recorded."""
    path = folder / STATE
    return float(json.loads(path.read_text(encoding="utf-8"))[_KEY]) if path.is_file() else 1.0


def loaded_folder(accelerator: Any, folder: Any) -> Path | None:
    """The checkpoint that ``load_state(folder)`` loads; None where there is none.

    Args:
        accelerator: the script's.
        folder: as the script names it; None: the newest, where Accelerate names checkpoints itself
            (``checkpoints/checkpoint_0``, ``checkpoint_1``, ...).
    """
    if folder is not None:
        named = Path(folder).expanduser()
        return named if named.is_dir() else None
    named_by_accelerate = own_folder(accelerator)
    found = [] if named_by_accelerate is None else named_by_accelerate.glob("checkpoint_*")
    return max((path for path in found if path.is_dir()), key=_number, default=None)


def own_folder(accelerator: Any) -> Path | None:
    """The folder in which Accelerate names checkpoints itself; None where the script names them."""
    project = getattr(accelerator, "project_dir", None)
    if project is None or not accelerator.project_configuration.automatic_checkpoint_naming:
        return None
    return Path(project) / "checkpoints"


def _number(path: Path) -> int:
    return int((re.findall(r"\d+", path.name) or ["-1"])[-1])
