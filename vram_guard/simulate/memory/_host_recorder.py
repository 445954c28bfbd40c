"""Host memory in a trace: which tensors live there, when they come and go."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator

import torch

from vram_guard.timeline import Affine, HostBlock

#: In place of the number of a block: of a tensor that is not counted.
_NOT_COUNTED = -1


class StorageRef(weakref.ref):  # type: ignore[type-arg]
    """A weak reference to a storage that knows which block it stands for.

    On the storage, not on the tensor: a view keeps the memory of a tensor that is gone.
    """

    __slots__ = ("block", "key")

    block: int
    key: int

    @classmethod
    def of(cls, storage: torch.UntypedStorage, freed: Callable[[StorageRef], None], block: int) -> StorageRef:
        """A reference that calls ``freed`` when the storage dies."""
        ref = cls(storage, freed)
        ref.block, ref.key = block, storage._cdata
        return ref


class HostRecorder:
    """Tensors in host memory: symbolic ones that the step moved there, and real ones that receive them."""

    def __init__(self) -> None:
        self.events: list[int] = []
        self._blocks: list[HostBlock] = []
        self._symbolic: dict[int, StorageRef] = {}
        self._real: dict[int, StorageRef] = {}
        self._closed = False

    def __bool__(self) -> bool:
        """True if any symbolic tensor lives in host memory right now."""
        return bool(self._symbolic)

    def holds(self, tensor: torch.Tensor) -> bool:
        """True if this symbolic tensor lives in host memory."""
        return bool(self._symbolic) and tensor.untyped_storage()._cdata in self._symbolic

    def pinned(self, tensor: torch.Tensor) -> bool:
        """True if this symbolic tensor lives in pinned host memory."""
        ref = self._symbolic.get(tensor.untyped_storage()._cdata)
        return ref is not None and ref.block != _NOT_COUNTED and self._blocks[ref.block].pinned

    def add(self, tensor: torch.Tensor, *, pinned: bool = False) -> None:
        """This symbolic tensor lives in host memory."""
        self._add(self._symbolic, tensor, pinned)

    def add_real(self, tensor: torch.Tensor, *, pinned: bool = False) -> None:
        """This real tensor was made in order to hold what comes from the GPU."""
        if tensor.layout == torch.strided:
            self._add(self._real, tensor, pinned)

    def _add(self, known: dict[int, StorageRef], tensor: torch.Tensor, pinned: bool) -> None:
        storage = tensor.untyped_storage()
        key: int = storage._cdata
        if key in known:
            return
        ref = known[key] = StorageRef.of(storage, self._freed, _NOT_COUNTED if self._closed else len(self._blocks))
        if not self._closed:
            self._blocks.append(HostBlock(Affine(storage.nbytes(), 0), pinned))
            self.events.append(ref.block)

    def _freed(self, ref: StorageRef) -> None:
        for known in (self._symbolic, self._real):
            # The same address may already belong to a younger storage: only the reference that stands there goes.
            if ref.key in known and known[ref.key] is ref:
                del known[ref.key]
        if not self._closed and ref.block != _NOT_COUNTED:
            self.events.append(~ref.block)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Nothing inside the block is counted."""
        before, self._closed = self._closed, True
        try:
            yield
        finally:
            self._closed = before

    def close(self) -> None:
        """Nothing after this is counted."""
        self._closed = True

    def blocks(self) -> tuple[HostBlock, ...]:
        """All blocks, with exact sizes of this batch size."""
        return tuple(self._blocks)
