"""Measurements of earlier runs, as a factor on the next prediction. It only ever raises.

One small JSON file per training (GPU, torch version, model structure, precision) in the user's cache folder. A file
each, so that processes that train different things never write the same one; of two that train the same thing and
end their first steps at the same moment, one measurement may be lost, and none is ever broken.

The factor is the largest of the last few ratios, and at least 1: a lucky run never lets a later plan exceed its
budget, and one odd run (another program's memory, say) is forgotten after some ordinary ones.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vram_guard.cache import cache_folder, forget_oldest
from vram_guard.language import _

if TYPE_CHECKING:
    from torch import nn

VERSION = 1
KEPT = 5
"""Ratios that are remembered for one training."""
MOST_FILES = 256
"""Trainings that are remembered; the longest unused go first."""
LARGEST_RATIO = 10.0
"""More than that is not an error of a prediction, but something else on the device."""
LARGEST_FILE = 4096
"""Bytes; a file of ours is far smaller."""


class IgnoredCorrectionWarning(UserWarning):
    """A file in the cache folder is broken or of a newer release; it is left alone and not used."""


@dataclass(frozen=True)
class Subject:
    """Training that a correction is about."""

    gpu: str
    torch: str
    structure: str
    """See :func:`fingerprint`."""

    @property
    def file_name(self) -> str:
        """The name of its file."""
        return hashlib.sha256(f"{self.gpu}\n{self.torch}\n{self.structure}".encode()).hexdigest()[:24] + ".json"


def subject(model: nn.Module, precision: str, gpu: str) -> Subject:
    """Key under which a training is remembered.

    Args:
        model: the model, on any device, before or after it is moved.
        precision: Lightning's word for it.
        gpu: the device's name.
    """
    import torch

    return Subject(gpu, torch.__version__, fingerprint(model, precision))


def fingerprint(model: nn.Module, precision: str) -> str:
    """A stable name of a model's structure: module classes, shapes and dtypes of weights, what is trained, precision.

    Values do not count, nor does the device, nor the order in which Python happens to hash.
    """
    digest = hashlib.sha256(precision.encode())
    for name, module in model.named_modules():
        digest.update(f"\nm {name} {type(module).__qualname__}".encode())
    for name, parameter in model.named_parameters():
        digest.update(f"\np {name} {tuple(parameter.shape)} {parameter.dtype} {parameter.requires_grad}".encode())
    for name, buffer in model.named_buffers():
        digest.update(f"\nb {name} {tuple(buffer.shape)} {buffer.dtype}".encode())
    return digest.hexdigest()


class Corrections:
    """The remembered ratios. Nothing here ever raises or stops a training.

    Args:
        folder: where the files are; None: :func:`vram_guard.cache.cache_folder`.
    """

    def __init__(self, folder: Path | None = None) -> None:
        base = folder or cache_folder()
        self._folder = None if base is None else base / "corrections"

    def factor(self, about: Subject) -> float:
        """Factor for predicted peaks; at least 1."""
        return max([1.0, *self._ratios(about)])

    def remember(self, about: Subject, ratio: float) -> bool:
        """Keep a ratio of measured to predicted; whether it could be written (a read-only home is fine)."""
        if self._folder is None or not _is_ratio(ratio):
            return False
        path = self._folder / about.file_name
        if path.exists() and self._read(path, about) is None:
            return False  # not ours, or of a newer release, which may still need it
        content = {
            "version": VERSION,
            "gpu": about.gpu,
            "torch": about.torch,
            "structure": about.structure,
            "ratios": [*self._ratios(about), ratio][-KEPT:],
        }
        from vram_guard.report.files import NotWrittenWarning, write_atomically

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NotWrittenWarning)
            written = write_atomically(path, json.dumps(content))
        if written:
            forget_oldest(self._folder, MOST_FILES)
        return written

    def _ratios(self, about: Subject) -> list[float]:
        if self._folder is None:
            return []
        return self._read(self._folder / about.file_name, about) or []

    def _read(self, path: Path, about: Subject) -> list[float] | None:
        """The ratios of a file; None where it cannot be used, with a warning unless there simply is none."""
        try:
            with path.open("rb") as file:
                raw = file.read(LARGEST_FILE + 1)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            _ignored(path, str(error))
            return None
        try:
            content = json.loads(raw) if len(raw) <= LARGEST_FILE else None
        except (ValueError, RecursionError):
            content = None
        if not isinstance(content, dict):
            _ignored(path, _("it is not a vram_guard file"))
            return None
        if content.get("version") != VERSION:
            found = repr(content.get("version"))
            _ignored(path, _("it has version {found}, this release reads {known}", found=found, known=VERSION))
            return None
        if [content.get(name) for name in ("gpu", "torch", "structure")] != [about.gpu, about.torch, about.structure]:
            _ignored(path, _("it is about another training"))
            return None
        ratios = content.get("ratios")
        if not isinstance(ratios, list) or not all(_is_ratio(ratio) for ratio in ratios):
            _ignored(path, _("its ratios are not numbers in (0, 10]"))
            return None
        return [float(ratio) for ratio in ratios[-KEPT:]]


def _is_ratio(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= LARGEST_RATIO


def _ignored(path: Path, why: str) -> list[float] | None:
    """Say why a file is not used; None, which is what is known from it."""
    said = _("{path} is not used: {why}; delete it to measure again", path=path, why=why)
    warnings.warn(f"vram_guard: {said}", IgnoredCorrectionWarning, stacklevel=4)
    return None
