"""Contents of a model's weight files, from their headers alone: nothing is loaded, and nothing is unpickled."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Final

from vram_guard.config_file import read_text
from vram_guard.errors import InvalidInputError, MissingLibraryError
from vram_guard.language import _
from vram_guard.limits import LARGEST_LISTING

#: Endings of files that hold pickles: reading them runs what is in them.
PICKLES: Final = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
#: What diffusers and transformers call a model's weights, in the order in which they look.
STEMS: Final = ("diffusion_pytorch_model", "model", "pytorch_model")


@dataclass(frozen=True)
class Weights:
    """A component's weights as they lie on the disk."""

    numbers: Mapping[str, int] = field(default_factory=dict)
    """dtype -> how many numbers are stored in it."""
    files: tuple[str, ...] = ()
    """Names of the files that were looked at."""
    pickles: tuple[str, ...] = ()
    """Files that hold pickles and were not opened."""

    @property
    def parameters(self) -> int:
        """Floating-point numbers: what a training can change."""
        return sum(count for dtype, count in self.numbers.items() if dtype.startswith(("F", "BF")))

    @property
    def stored_bytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(count * _bits(dtype) for dtype, count in self.numbers.items()) // 8

    @property
    def dtype(self) -> str | None:
        """The type of most floating-point numbers; None where there are none."""
        floats = {dtype: count for dtype, count in self.numbers.items() if dtype.startswith(("F", "BF"))}
        return max(floats, key=lambda dtype: floats[dtype], default=None)


def _bits(dtype: str) -> int:
    """Bits of one number, which the format's names say ("BF16", "F8_E4M3", "C64"); BOOL has a byte."""
    named = re.match(r"[A-Z]+(\d+)", dtype)
    return int(named[1]) if named else 8


def read_weights(folder: Path) -> Weights:
    """Read the headers of one component's weight files.

    Sharded files by their index; else the plainly named file, else a variant ("model.fp16.safetensors"), else every
    safetensors file there is.

    Raises:
        InvalidInputError: an index or a header is damaged, or names files that are not there.
    """
    pickles = tuple(sorted(path.name for path in folder.iterdir() if path.suffix.lower() in PICKLES))
    index = _first(folder, ".safetensors.index.json")
    files = [path.name for path in _plain_files(folder)] if index is None else _shards(index)
    numbers = Counter[str]()
    for name in files:
        for dtype, shape in header(folder / name).values():
            numbers[dtype] += prod(shape)
    return Weights(dict(numbers), tuple(files), pickles)


def header(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Tensor -> (dtype, shape) of a safetensors file.

    Raises:
        InvalidInputError: the file is not there, or is no safetensors file.
        MissingLibraryError: what reads such files is not installed.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise MissingLibraryError(_("reading {path} needs safetensors: pip install safetensors", path=path)) from error
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
            return {name: (one.get_dtype(), tuple(one.get_shape())) for name, one in tensors.items()}
    except OSError as error:
        reason = error.strerror or error
        raise InvalidInputError(_("{path} cannot be read: {reason}", path=path, reason=reason)) from None
    except SafetensorError as error:
        raise InvalidInputError(
            _("{path} is not a valid safetensors file: {reason}", path=path, reason=error)
        ) from None


def _shards(index: Path) -> list[str]:
    """The files that an index names."""
    try:
        names = sorted(set(json.loads(read_text(index, LARGEST_LISTING))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise InvalidInputError(
            _("{path} is not an index of safetensors files: weight_map is missing", path=index)
        ) from None
    for name in names:
        # A name with a folder in it would lead out of here.
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise InvalidInputError(
                _("{path} names a file that does not belong to it: {name}", path=index, name=repr(name)[:60])
            )
    return names


def _first(folder: Path, ending: str) -> Path | None:
    """The index that the libraries would take; that of a variant where there is no other."""
    found = sorted(path for path in folder.iterdir() if path.name.endswith(ending))
    plain = [folder / (stem + ending) for stem in STEMS]
    return next((path for path in plain if path in found), found[0] if found else None)


def _plain_files(folder: Path) -> list[Path]:
    found = sorted(path for path in folder.iterdir() if path.name.endswith(".safetensors"))
    for stem in STEMS:
        variants = [path for path in found if path.name.startswith(f"{stem}.")]
        plain = folder / f"{stem}.safetensors"
        if variants:
            return [plain] if plain in variants else variants[:1]
    return found
