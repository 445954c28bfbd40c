"""Caches of libraries, to which a dry run writes for real: what it downloads, the launch finds there."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

#: Variables that move a cache of Hugging Face's libraries away from HF_HOME.
_MOVED = ("HF_DATASETS_CACHE", "HF_EVALUATE_CACHE", "HF_METRICS_CACHE", "HF_MODULES_CACHE", "HF_HUB_CACHE")


def caches() -> tuple[Path, ...]:
    """The folders of Hugging Face's libraries, and of ``torch.hub``."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    own = (os.environ.get("HF_HOME") or base / "huggingface", os.environ.get("TORCH_HOME") or base / "torch")
    named = (os.environ[name] for name in _MOVED if os.environ.get(name))
    return tuple(Path(folder).expanduser().absolute() for folder in (*own, *named))


def make_caches() -> list[Path]:
    """Make those that are not there, which could be made in a dry run's own memory only; the folders that were made."""
    wanted = {above for folder in caches() for above in (folder, *folder.parents)}
    made = sorted(folder for folder in wanted if not folder.exists())
    for folder in made:
        with contextlib.suppress(OSError):
            folder.mkdir()
    return made


def remove_empty(made: list[Path]) -> None:
    """Remove those of these folders into which nothing was put."""
    for folder in reversed(made):
        with contextlib.suppress(OSError):
            folder.rmdir()
