"""Trainings that run under guard, as they tell ``vram-guard monitor``: what was predicted, and growth by epochs.

Each training process keeps one small file in the cache folder while it trains. Process numbers are those of the process
itself: where a container counts others than the driver does, the monitor finds no file and shows no prediction.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from vram_guard.cache import cache_folder
from vram_guard.language import _
from vram_guard.units import format_bytes

#: Epochs in a row at whose end more memory is in live tensors than before, until it counts as growth: the first epochs
#: make what stays (optimizer states, caches of convolution algorithms), and batches of several lengths that are still
#: held may grow a few times by chance.
EPOCHS: Final = 5
#: Growth over these epochs below which nothing is said: the allocator serves tensors up to this size from shared
#: blocks (kSmallSize in c10/core/CachingDeviceAllocator.h); a few logged numbers stay below it.
SMALL: Final = 2**20

#: winnt.h and winbase.h: the right to wait for a process; it has not ended yet.
_SYNCHRONIZE, _WAIT_TIMEOUT = 0x0010_0000, 0x102


@dataclass
class Running:
    """One training process. Bytes are ints."""

    pid: int
    started: str
    """The process's start, as the system counts; it tells a later process of the same number apart."""
    predicted: int
    """Peak that PyTorch reserves."""
    context: int
    """The CUDA context's part, by the estimate of the catalogue, which the driver counts among the process's memory."""
    epochs: list[int] = field(default_factory=list)
    """Bytes in live tensors at the end of each epoch."""
    growth: str = ""
    """Warning about memory that grows from epoch to epoch; "" where it does not."""

    @property
    def expected(self) -> int:
        """Peak of the process's memory as the driver counts it."""
        return self.predicted + self.context

    def write(self) -> None:
        """Tell who watches; a folder that cannot be written costs nothing but that."""
        folder = _folder()
        if folder is None:
            return
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"{self.pid}.json"
            whole = path.with_suffix(".part")
            whole.write_text(json.dumps(asdict(self)), encoding="utf-8")
            whole.replace(path)

    def forget(self) -> None:
        """The training is over."""
        folder = _folder()
        with suppress(OSError):
            if folder is not None:
                (folder / f"{self.pid}.json").unlink(missing_ok=True)
                folder.rmdir()  # the last one leaves nothing behind


class EpochGrowth:
    """Memory in live tensors at the ends of epochs, and what grew where it only ever grows.

    Args:
        inventory: counts the live tensors of the device by what they are, in bytes.
    """

    def __init__(self, inventory: Callable[[], Mapping[str, int]]) -> None:
        self._inventory = inventory
        self._earlier: Mapping[str, int] = {}
        self._in_a_row, self._said = 0, False
        self.ends: list[int] = []

    def epoch_ends(self, allocated: int) -> str:
        """Add an epoch; a warning, once, after :data:`EPOCHS` in a row that grew, "" otherwise."""
        self.ends.append(allocated)
        self._in_a_row = self._in_a_row + 1 if allocated > self.ends[-2:][0] else 0
        if self._in_a_row == EPOCHS - 1:
            self._earlier = self._inventory()
        grown = allocated - self.ends[-1 - EPOCHS :][0]
        if self._said or self._in_a_row < EPOCHS or grown < SMALL:
            return ""
        self._said = True
        now = self._inventory()
        more = Counter({name: size - self._earlier.get(name, 0) for name, size in now.items()})
        names = [f"{name} (+{format_bytes(size)})" for name, size in more.most_common(3) if size > 0]
        return _(
            "memory grows from epoch to epoch: by {growth} over the last {epochs} epochs, to {now} in live tensors; "
            "{what}",
            growth=format_bytes(grown),
            epochs=EPOCHS,
            now=format_bytes(allocated),
            what=_("in the last one: {names}", names=", ".join(names)) if names else _("what grew is not known"),
        )


def live_tensors(device_type: str) -> dict[str, int]:
    """Bytes of the tensors that Python knows on a kind of device, by shape and type; storages are counted once."""
    import torch

    found: Counter[str] = Counter()
    seen = set[int]()
    for one in gc.get_objects():
        # Not isinstance: it asks proxies for their class, and some of them warn or import then.
        if issubclass(type(one), torch.Tensor) and one.device.type == device_type and one.layout == torch.strided:
            storage = one.untyped_storage()
            if storage.device.type != device_type:  # of a FakeTensor, which has no memory
                continue
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                kind = type(one).__name__.lower()
                found[f"{kind} {tuple(one.shape)} {str(one.dtype).removeprefix('torch.')}"] += storage.nbytes()
    return dict(found)


def running_here(predicted: int, context: int) -> Running:
    """This process's training, known to who watches from now on."""
    own = Running(os.getpid(), started(os.getpid()), predicted, context)
    own.write()
    return own


def running() -> dict[int, Running]:
    """The trainings of this user's processes that are alive, by pid; what cannot be read is left out."""
    folder = _folder()
    found: dict[int, Running] = {}
    for path in sorted(folder.glob("*.json")) if folder is not None else ():
        with suppress(OSError, ValueError, TypeError):
            one = _read(json.loads(path.read_text(encoding="utf-8")))
            if one.started == started(one.pid) and str(one.pid) == path.stem:
                found[one.pid] = one
    return found


def _read(facts: Any) -> Running:
    one = Running(**facts)
    counts: list[Any] = [one.pid, one.predicted, one.context, *one.epochs]
    if not all(type(each) is int and each >= 0 for each in counts) or type(one.growth) is not str:
        raise ValueError
    return one


def _folder() -> Path | None:
    cache = cache_folder()
    return None if cache is None else cache / "running"


def started(pid: int) -> str:
    """The start of a process: field 22 of /proc/PID/stat (man 5 proc). Elsewhere "alive", where it is.

    "" where it has ended, whether or not its parent has taken notice of that (states Z and X).
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    except OSError:
        pass
    if sys.platform == "win32":
        return "alive" if _runs_on_windows(pid) else ""
    try:
        os.kill(pid, 0)
    except OSError:
        return ""
    return "alive"


def _runs_on_windows(pid: int) -> bool:
    """On Windows ``os.kill(pid, 0)`` would send Ctrl-C: 0 is ``signal.CTRL_C_EVENT`` there."""
    kernel: Any = getattr(ctypes, "WinDLL")("kernel32")  # noqa: B009 - declared for Windows only
    kernel.OpenProcess.restype = ctypes.c_void_p
    handle = ctypes.c_void_p(kernel.OpenProcess(_SYNCHRONIZE, False, pid))
    if handle.value is None:
        return False
    try:
        return bool(kernel.WaitForSingleObject(handle, 0) == _WAIT_TIMEOUT)
    finally:
        kernel.CloseHandle(handle)
