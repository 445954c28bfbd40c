"""The cuDNN that a trace asks for workspaces, as the setting ``cudnn`` says: none, the installed one, or a file.

"auto" asks the cuDNN of a training that will run here: where torch has a GPU, and the library in NVIDIA's wheel is the
release that torch has loaded. Elsewhere none is asked, because releases disagree on half of the calls, and another
release's answers are no better than none (docs/lab/accuracy.md): for the runs of xMem, which had 9.1, the median error
with the answers of 9.26 is higher than without.

A process holds one cuDNN: its parts are found by their names, so that the first one that is loaded answers for every
file that is named later. The report says the release that answered.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import torch

from vram_guard.errors import InvalidInputError
from vram_guard.language import _
from vram_guard.settings import settings
from vram_guard.simulate.device.capability import Capability
from vram_guard.simulate.operators import cudnn
from vram_guard.simulate.operators.cudnn_library import Library, installed

AUTO: Final = "auto"
OFF: Final = "off"
ASK: Final = "ask"

A = TypeVar("A")
R = TypeVar("R")

_chosen: ContextVar[str | None] = ContextVar("_chosen", default=None)


def checked_choice(value: object) -> str | None:
    """The setting, if it makes sense; None stays None.

    Raises:
        InvalidInputError: it is neither a word that is known nor a file, or no cuDNN is installed that could be asked.

    Example:
        >>> checked_choice("off")
        'off'
    """
    if value is None or value in (AUTO, OFF):
        return value
    if value == ASK:
        if installed() is None:
            raise InvalidInputError(
                _(
                    'cudnn="ask", and no cuDNN is installed here: pip install nvidia-cudnn-cu12 nvidia-cublas-cu12, or '
                    "name the file libcudnn.so.9"
                )
            )
        return ASK
    if isinstance(value, str) and Path(value).is_file():
        return value
    raise InvalidInputError(
        _('cudnn must be "auto", "ask", "off" or the path of a libcudnn.so.9, not {value}', value=repr(value))
    )


def under(choice: str | None, run: Callable[[A], R]) -> Callable[[A], R]:
    """``run``, with the cuDNN asked that this choice means; None: what the settings say."""

    def running(argument: A) -> R:
        token = _chosen.set(choice if choice is not None else _chosen.get())
        try:
            return run(argument)
        finally:
            _chosen.reset(token)

    return running


@contextlib.contextmanager
def asked_as_chosen(capability: Capability) -> Iterator[None]:
    """While the block runs, the chosen cuDNN is asked for the workspaces of convolutions on such a GPU.

    One that the caller asks already (:func:`.cudnn.asking`) goes on to be asked.

    Raises:
        InvalidInputError: as :func:`checked_choice`.
    """
    choice = checked_choice(_chosen.get() or _setting())
    path = _path(choice) if cudnn.asked() is None else None
    if path is None:
        yield
        return
    try:
        library: cudnn.WorkspaceSource = _library(path)
    except OSError as error:
        library = _Broken(str(error))
    with cudnn.asking(library, cudnn.DeviceProperties.of(capability.version)):
        yield


def _setting() -> str:
    found = settings().get("cudnn")
    return AUTO if found is None else str(found.value)


def _path(choice: str | None) -> Path | None:
    if choice == OFF:
        return None
    if choice in (None, AUTO):
        return _of_this_training()
    return installed() if choice == ASK else Path(str(choice))


def _of_this_training() -> Path | None:
    """The cuDNN of torch on this machine's GPU, where it can be asked; None where there is no GPU, or it is another."""
    if torch.version.cuda is None or not torch.cuda.device_count():  # by NVML: a copy of a process must not start CUDA
        return None
    path = installed()
    try:
        same = path is not None and _library(path).version == _loaded_by_torch()
    except OSError:  # too old to be asked, or without cuBLAS beside it: nobody asked for it
        return None
    return path if same else None


def _loaded_by_torch() -> int | None:
    """The release of cuDNN that torch has loaded, as a number.

    ``torch.backends.cudnn.version()`` starts CUDA in newer releases, to see that this machine's GPUs go with it.
    """
    library: Any = getattr(torch._C, "_cudnn", None)
    return None if library is None else int(library.getVersionInt())


@cache
def _library(path: Path) -> Library:
    return Library(path)


class _Broken(NamedTuple):
    """A cuDNN that was asked for and cannot be loaded."""

    why: str
    release: str = ""

    def check(self, _device: Any) -> None:
        raise cudnn.CudnnRefusedError(self.why)

    def workspace(self, _call: Any, _device: Any) -> None:
        return None
