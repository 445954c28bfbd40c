"""GPUs that this machine does not have: a made-up NVML stands where the real library would."""

# ruff: noqa: N802 (the made-up library answers to NVML's own names)
from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import pynvml

MIB, GIB = 2**20, 2**30
NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND = 3, 4, 6


@dataclass
class Card:
    """One GPU, or MIG slice, of the made-up machine."""

    name: str = "NVIDIA GeForce RTX 4090"
    total: int = 24564 * MIB
    free: int = 20 * GIB
    uuid: str = "GPU-aaaa-1111"
    bus: str = "00000000:01:00.0"
    capability: tuple[int, int] = (8, 9)
    processes: list = field(default_factory=list)
    slices: list | None = None  # None: not a MIG card, a list: MIG is on
    parent: Card | None = None
    memory_error: int | None = None
    multiprocessors: int = 14


class Library:
    """What the tests put in the place of the pynvml module: the functions that are used, no more."""

    NVMLError = pynvml.NVMLError

    def __init__(self, *cards: Card, fails: dict[str, int] | None = None, names: dict[int, str] | None = None):
        self.cards, self.fails, self.names = cards, fails or {}, names or {}
        self.shut_down = False

    def __getattribute__(self, name: str):
        fails = object.__getattribute__(self, "__dict__").get("fails", {})
        if name in fails:
            code = fails[name]

            def failing(*_arguments):
                raise pynvml.NVMLError(code)

            return failing
        return object.__getattribute__(self, name)

    def nvmlInit(self):
        pass

    def nvmlShutdown(self):
        self.shut_down = True

    def nvmlDeviceGetCount(self):
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index):
        return self.cards[index]

    def nvmlDeviceGetHandleByUUID(self, uuid):
        for card in self.cards:
            for piece in [card, *(card.slices or [])]:
                if piece.uuid == uuid:
                    return piece
        raise pynvml.NVMLError(NOT_FOUND)

    def nvmlDeviceGetName(self, card):
        return card.name

    def nvmlDeviceGetUUID(self, card):
        return card.uuid

    def nvmlDeviceGetPciInfo(self, card):
        return SimpleNamespace(busId=card.bus.encode())

    def nvmlDeviceGetMemoryInfo(self, card):
        if card.memory_error is not None:
            raise pynvml.NVMLError(card.memory_error)
        return SimpleNamespace(total=card.total, free=card.free, used=card.total - card.free)

    def nvmlDeviceGetCudaComputeCapability(self, card):
        if card.parent is not None:
            raise pynvml.NVMLError(NOT_SUPPORTED)
        return card.capability

    def nvmlDeviceGetMigMode(self, card):
        if card.slices is None:
            raise pynvml.NVMLError(NOT_SUPPORTED)
        return [1, 1]

    def nvmlDeviceGetMaxMigDeviceCount(self, card):
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, card, index):
        if index >= len(card.slices):
            raise pynvml.NVMLError(NOT_FOUND)
        return card.slices[index]

    def nvmlDeviceIsMigDeviceHandle(self, card):
        return card.parent is not None

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, card):
        return card.parent

    def nvmlDeviceGetAttributes(self, card):
        return SimpleNamespace(multiprocessorCount=card.multiprocessors)

    def nvmlDeviceGetComputeRunningProcesses(self, card):
        return card.processes

    def nvmlDeviceGetGraphicsRunningProcesses(self, card):
        return []

    def nvmlSystemGetProcessName(self, pid):
        if pid not in self.names:
            raise pynvml.NVMLError(NO_PERMISSION)
        return self.names[pid]


class Torch:
    """A torch on which CUDA runs, or not; only what is asked of it."""

    __version__ = "2.99"

    def __init__(self, *, initialized=True, available=True, free=20 * GIB, total=24 * GIB, reserved=0, **more):
        self.version = SimpleNamespace(cuda=more.get("cuda", "13.0"), hip=None)
        properties = SimpleNamespace(
            name=more.get("name", "NVIDIA GeForce RTX 4090"),
            major=8,
            minor=9,
            multi_processor_count=128,
            uuid=more.get("uuid", ""),
        )
        self.cuda = SimpleNamespace(
            is_initialized=lambda: initialized,
            is_available=lambda: available,
            device_count=lambda: more.get("count", 1),
            current_device=lambda: more.get("current", 0),
            mem_get_info=more.get("mem_get_info", lambda _device: (free, total)),
            memory_reserved=lambda _device: reserved,
            get_device_properties=lambda _device: properties,
        )
        if "fraction" in more:
            self.cuda.get_per_process_memory_fraction = lambda _device: more["fraction"]
