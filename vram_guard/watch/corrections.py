"""Measurements of earlier runs, as a factor on the next prediction. It only ever raises.

One small JSON file per training (GPU, torch version, model structure, precision) in the user's cache folder. A file
each, so that processes that train different things never write the same one; of two that train the same thing and
end their first steps at the same moment, one measurement may be lost, and none is ever broken.

The factor is the largest of the last few ratios, and at least 1: a lucky run never lets a later plan exceed its
budget, and one odd run (another program's memory, say) is forgotten after some ordinary ones.
"""

from __future__ import annotations

import contextlib
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vram_guard.cache import cache_folder, forget_oldest
from vram_guard.codec import from_json, to_json
from vram_guard.errors import InvalidInputError
from vram_guard.files import write_atomically
from vram_guard.limits import FILES_KEPT

if TYPE_CHECKING:
    from torch import nn

KEPT = 5
"""Ratios that are remembered for one training."""
LARGEST_RATIO = 10.0
"""More than that is not an error of a prediction, but something else on the device."""


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


@dataclass(frozen=True)
class _Remembered:
    """The content of a file."""

    about: Subject
    ratios: tuple[float, ...]


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

    def remember(self, about: Subject, ratio: float) -> None:
        """Keep a ratio of measured to predicted, where it can be written: a read-only home is fine."""
        if self._folder is None or not 0 < ratio <= LARGEST_RATIO:
            return
        kept = _Remembered(about, (*self._ratios(about), ratio)[-KEPT:])
        with contextlib.suppress(InvalidInputError):
            write_atomically(self._folder / about.file_name, to_json(kept))
            forget_oldest(self._folder, FILES_KEPT)

    def _ratios(self, about: Subject) -> tuple[float, ...]:
        """The ratios that are known; none where there is no file, or one that no release like this has written."""
        if self._folder is None:
            return ()
        try:
            found = from_json(_Remembered, (self._folder / about.file_name).read_text("utf-8"))
        except (OSError, ValueError, RecursionError):
            return ()
        return tuple(ratio for ratio in found.ratios if 0 < ratio <= LARGEST_RATIO)
