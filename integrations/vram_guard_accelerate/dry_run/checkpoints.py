"""The checkpoint that a script loads with ``Accelerator.load_state``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any


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
    project = getattr(accelerator, "project_dir", None)
    if project is None or not accelerator.project_configuration.automatic_checkpoint_naming:
        return None
    found = (path for path in (Path(project) / "checkpoints").glob("checkpoint_*") if path.is_dir())
    return max(found, key=_number, default=None)


def _number(path: Path) -> int:
    return int((re.findall(r"\d+", path.name) or ["-1"])[-1])
