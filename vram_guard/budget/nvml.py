"""NVML, NVIDIA's management library, and every way in which it can fail.

NVML reports a GPU's memory without a CUDA context, so that reading it costs nothing and breaks no later fork.
This module is the only one that calls it. Tests replace one thing: :func:`load_library`, which returns the
``pynvml`` module of the nvidia-ml-py package; what they put in its place can have MIG slices, broken drivers
and other machines' GPUs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import PurePath
from typing import Any

from vram_guard.budget._device import DeviceMemory, GpuProcess, no_device
from vram_guard.budget._visible import ORDER, VISIBLE, ordered_by_bus, visible_devices
from vram_guard.budget.host import host_memory
from vram_guard.errors import DeviceQueryError, InvalidInputError
from vram_guard.language import _, marked

# nvmlReturn_t in nvml.h
_INVALID_ARGUMENT, _NOT_SUPPORTED, _NO_PERMISSION, _NOT_FOUND = 2, 3, 4, 6
_DRIVER_NOT_LOADED, _LIBRARY_NOT_FOUND, _FUNCTION_NOT_FOUND = 9, 12, 13
_GPU_IS_LOST, _RESET_REQUIRED, _VERSION_MISMATCH = 15, 16, 18

#: What cannot be read this way on this device, driver or account: worked without.
_UNTOLD = frozenset({_INVALID_ARGUMENT, _NOT_SUPPORTED, _NO_PERMISSION, _NOT_FOUND, _FUNCTION_NOT_FOUND})

_ADVICE = {
    _NO_PERMISSION: marked("this account may not query the driver: join the group that owns /dev/nvidia*"),
    _GPU_IS_LOST: marked("the GPU has fallen off the bus: restart the machine"),
    _RESET_REQUIRED: marked("the GPU needs a reset: ask whoever runs the machine for one, or restart it"),
    _VERSION_MISMATCH: marked(
        "the NVIDIA driver was updated while its old kernel module still runs: restart the machine (or unload and load "
        "the nvidia kernel modules); inside a container, restart the container"
    ),
}
_USUAL_ADVICE = marked("run nvidia-smi, which uses the same library, and read its error")


class NvmlUnavailableError(Exception):
    """There is no NVML to ask: not installed, no driver, no NVIDIA GPU. Callers work without it."""


def load_library() -> Any:
    """The module that speaks NVML (nvidia-ml-py's ``pynvml``): what tests replace.

    Raises:
        ImportError: where the package is not installed.
    """
    return import_module("pynvml")


def read_device(ordinal: int, uuid: str | None = None) -> DeviceMemory:
    """The GPU that CUDA counts as ``ordinal``, or its MIG slice, as NVML describes it now.

    Args:
        ordinal: CUDA's number, after CUDA_VISIBLE_DEVICES.
        uuid: that device's UUID where CUDA itself has reported it; beats every other way to find it.

    Raises:
        NvmlUnavailableError: there is no NVML or no GPU.
        NoDeviceError: CUDA_VISIBLE_DEVICES hides every GPU.
        InvalidInputError: there are not so many visible GPUs.
        DeviceQueryError: the driver is there but does not answer, or which GPU is meant cannot be told.
    """
    with opened() as nvml:
        return nvml.read(ordinal, uuid)


@contextmanager
def opened() -> Iterator[Nvml]:
    """NVML, initialised, for as long as the ``with`` block lasts.

    Raises:
        NvmlUnavailableError: there is no NVML.
        DeviceQueryError: the driver is there but does not answer.
    """
    try:
        nvml = Nvml(load_library())
    except ImportError:
        raise NvmlUnavailableError(_("the package nvidia-ml-py is not installed")) from None
    nvml.ask("nvmlInit")
    try:
        yield nvml
    finally:
        # The answers are there already; a driver that fails now fails the next question.
        with suppress(DeviceQueryError, NvmlUnavailableError):
            nvml.maybe("nvmlShutdown")


class Nvml:
    """One initialised NVML; every call goes through :meth:`ask` or :meth:`maybe`."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def ask(self, function: str, *arguments: Any) -> Any:
        """The answer; an error of NVML's as one of ours."""
        try:
            return getattr(self._library, function)(*arguments)
        except self._library.NVMLError as error:
            raise _explained(error) from None

    def maybe(self, function: str, *arguments: Any, untold: frozenset[int] = _UNTOLD) -> Any:
        """The answer, or None for what this device, driver, account or package does not report."""
        if not hasattr(self._library, function):
            return None
        try:
            return getattr(self._library, function)(*arguments)
        except self._library.NVMLError as error:
            if getattr(error, "value", None) in untold:
                return None
            raise _explained(error) from None

    def read(self, ordinal: int, uuid: str | None) -> DeviceMemory:
        """See :func:`read_device`."""
        handle, notes = self.find(ordinal, uuid)
        memory = self.own_memory(handle, untold=frozenset({_NOT_SUPPORTED}))
        if memory is None:
            host = host_memory()
            total, free = host.total, host.available
            shared = _("the GPU shares the host's RAM ({limit}): these are its bytes", limit=_(host.limited_by))
            notes = (*notes, shared)
        else:
            total, free = int(memory.total), int(memory.free)
        parent = self._parent(handle)
        return DeviceMemory(
            name=text(self.ask("nvmlDeviceGetName", handle)),
            total=total,
            free=free,
            processes=tuple(one for one in self.processes(handle) if one.pid != os.getpid()),
            compute_capability=self._capability(handle if parent is None else parent),
            multiprocessors=None if parent is None else self._slice_multiprocessors(handle),
            unified=memory is None,
            mig=parent is not None,
            notes=notes,
        )

    def own_memory(self, handle: Any, untold: frozenset[int] = _UNTOLD) -> Any | None:
        """NVML's numbers about a GPU's memory; None where it has none of its own (GB10, Jetson).

        "Not supported" and a total of 0 both mean that.
        """
        memory = self.maybe("nvmlDeviceGetMemoryInfo", handle, untold=untold)
        return None if memory is None or memory.total == 0 else memory

    def find(self, ordinal: int, uuid: str | None) -> tuple[Any, tuple[str, ...]]:
        """The handle of the GPU (or slice) that CUDA counts as ``ordinal``, and remarks on it."""
        handles = self._by_bus(self.devices())
        count = len(handles)
        visible = visible_devices()
        chosen_slice = any(str(entry).startswith("MIG-") for entry in visible or ())
        # CUDA's own word for which GPU it runs on, except that it does not name the slice.
        known = self._with_uuid(handles, uuid) if uuid and not chosen_slice else []
        if len(known) == 1:
            return self._slice_of(known[0])
        if visible == []:
            raise no_device(
                _(
                    "{variable}={value} hides every GPU from CUDA",
                    variable=VISIBLE,
                    value=repr(os.environ.get(VISIBLE)),
                )
            )
        names = range(count) if visible is None else visible
        # As in CUDA, a number that no GPU has ends the list.
        usable = _until(names, lambda entry: isinstance(entry, str) or entry < count)
        if ordinal >= len(usable):
            raise InvalidInputError(
                _(
                    "device {ordinal} does not exist: CUDA sees {visible} of this machine's {count} GPUs ({setting})",
                    ordinal=ordinal,
                    visible=len(usable),
                    count=count,
                    setting=f"{VISIBLE}={os.environ.get(VISIBLE)!r}",
                )
            )
        return self._named(usable[ordinal], handles)

    def _named(self, entry: int | str, handles: list[Any]) -> tuple[Any, tuple[str, ...]]:
        if isinstance(entry, int):
            self._check_order(handles)
            return self._slice_of(handles[entry])
        if entry.startswith("MIG-"):
            handle = self.maybe("nvmlDeviceGetHandleByUUID", entry)
            found = [] if handle is None else [handle]
        else:
            found = self._with_uuid(handles, entry)
        if len(found) != 1:
            what = _("several devices' UUIDs start like this") if found else _("no device has this UUID")
            raise _without_this_gpu(
                _(
                    "{variable} names {entry}, and {what}: see `nvidia-smi -L`.",
                    variable=VISIBLE,
                    entry=repr(entry),
                    what=what,
                )
            )
        return (found[0], ()) if entry.startswith("MIG-") else self._slice_of(found[0])

    def _by_bus(self, handles: list[Any]) -> list[Any]:
        """Handles by PCI bus, the order of CUDA_DEVICE_ORDER=PCI_BUS_ID; NVML's own order where untold."""
        buses = [self.maybe("nvmlDeviceGetPciInfo", handle) for handle in handles]
        if any(bus is None for bus in buses):
            return handles
        paired = zip((text(bus.busId).lower() for bus in buses), handles, strict=True)
        return [handle for _, handle in sorted(paired, key=lambda pair: pair[0])]

    def _check_order(self, handles: list[Any]) -> None:
        """Only CUDA knows which of several different GPUs it takes for the fastest."""
        names = {text(self.ask("nvmlDeviceGetName", handle)) for handle in handles}
        if len(names) > 1 and not ordered_by_bus():
            raise _without_this_gpu(
                _(
                    "This machine has different GPUs ({names}), and CUDA numbers them by speed, in an order of its "
                    "own. Set {order}=PCI_BUS_ID, or name the GPU by its UUID in {visible} (`nvidia-smi -L`).",
                    names=", ".join(sorted(names)),
                    order=ORDER,
                    visible=VISIBLE,
                )
            )

    def _with_uuid(self, handles: list[Any], uuid: str) -> list[Any]:
        """The devices whose UUID starts with ``uuid``: CUDA accepts shortened ones."""
        return [handle for handle in handles if text(self.ask("nvmlDeviceGetUUID", handle)).startswith(uuid)]

    def _slice_of(self, handle: Any) -> tuple[Any, tuple[str, ...]]:
        """The device itself; where it is cut into MIG slices, the first, which is the one CUDA takes.

        CUDA programs run on one slice only, by default on the first (NVIDIA MIG user guide).
        """
        if not self._is_cut(handle):
            return handle, ()
        slices = self.slices(handle)
        if not slices:
            raise _without_this_gpu(
                _(
                    "MIG is on but no slice has been made, so CUDA has nothing to run on: make one "
                    "(`nvidia-smi mig -cgi ... -C`) or switch MIG off."
                )
            )
        if len(slices) == 1:
            return slices[0], ()
        note = _(
            "the first of {count} MIG slices; name another by its UUID in {visible}", count=len(slices), visible=VISIBLE
        )
        return slices[0], (note,)

    def devices(self) -> list[Any]:
        """The handles of all GPUs, in NVML's own order, which is nvidia-smi's.

        Raises:
            NvmlUnavailableError: there is none.
        """
        count = int(self.ask("nvmlDeviceGetCount"))
        if count == 0:
            raise NvmlUnavailableError(_("the NVIDIA driver sees no GPU"))
        return [self.ask("nvmlDeviceGetHandleByIndex", index) for index in range(count)]

    def slices(self, handle: Any) -> list[Any]:
        """The MIG slices of a GPU; none where it is not cut into any."""
        if not self._is_cut(handle):
            return []
        most = self.maybe("nvmlDeviceGetMaxMigDeviceCount", handle) or 0
        asked = (self.maybe("nvmlDeviceGetMigDeviceHandleByIndex", handle, index) for index in range(most))
        return [piece for piece in asked if piece is not None]

    def _is_cut(self, handle: Any) -> bool:
        mode = self.maybe("nvmlDeviceGetMigMode", handle)
        return bool(mode) and mode[0] == 1

    def _parent(self, handle: Any) -> Any | None:
        """The GPU that a MIG slice was cut from; None for a whole GPU."""
        if not self.maybe("nvmlDeviceIsMigDeviceHandle", handle):
            return None
        return self.ask("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle)

    def _slice_multiprocessors(self, handle: Any) -> int | None:
        attributes = self.maybe("nvmlDeviceGetAttributes", handle)
        return None if attributes is None else int(attributes.multiprocessorCount)

    def _capability(self, handle: Any) -> tuple[int, int] | None:
        capability = self.maybe("nvmlDeviceGetCudaComputeCapability", handle)
        return None if capability is None else (int(capability[0]), int(capability[1]))

    def processes(self, handle: Any) -> tuple[GpuProcess, ...]:
        """The processes on this device, those that hold most first.

        In a container the driver may count in the host's process numbers.
        """
        found: dict[int, GpuProcess] = {}
        for function in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses"):
            for process in self.maybe(function, handle) or ():
                used = None if process.usedGpuMemory is None else int(process.usedGpuMemory)
                found[process.pid] = GpuProcess(process.pid, self._process_name(process.pid), used)
        return tuple(sorted(found.values(), key=lambda process: (-(process.bytes or 0), process.pid)))

    def _process_name(self, pid: int) -> str:
        """The program of a process, without its folder."""
        name = text(self.maybe("nvmlSystemGetProcessName", pid) or "")
        # NVML gives a path, with arguments behind it on some drivers.
        return PurePath(name.split(" ", 1)[0]).name or _("unknown program")


def _explained(error: Exception) -> Exception:
    """The error to raise for one of NVML's: what is wrong and what to do about it."""
    code = getattr(error, "value", None)
    if code in (_DRIVER_NOT_LOADED, _LIBRARY_NOT_FOUND):
        return NvmlUnavailableError(_("no NVIDIA driver ({error})", error=error))
    advice = _(_ADVICE.get(code or 0, _USUAL_ADVICE))
    return _without_this_gpu(_("The NVIDIA driver does not answer ({error}): {advice}.", error=error, advice=advice))


def _without_this_gpu(problem: str) -> DeviceQueryError:
    """The error for a GPU that cannot be asked, with the way around it."""
    advice = _('Or plan without this GPU: give budget="24GiB" or gpu="RTX 4090".')
    return DeviceQueryError(f"{problem} {advice}")


def _until(entries: Iterable[int | str], valid: Callable[[int | str], bool]) -> list[int | str]:
    kept = []
    for entry in entries:
        if not valid(entry):
            break
        kept.append(entry)
    return kept


def text(value: Any) -> str:
    """An answer of NVML as text."""
    # Old versions of nvidia-ml-py answer in bytes.
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
