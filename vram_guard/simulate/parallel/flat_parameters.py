"""FullyShardedDataParallel (FSDP1) in a trace: the real one, over pretended ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from vram_guard.patching import replaced
from vram_guard.simulate.device.symbolic import address_of

if TYPE_CHECKING:
    from vram_guard.simulate.memory.recorder import Recorder


@contextlib.contextmanager
def flat_parameters_followed(recorder: Recorder) -> Iterator[None]:
    """Inside the block FSDP1 finds addresses where it looks whether parameters are views of its flat ones."""
    from torch.distributed.fsdp import FullyShardedDataParallel, _init_utils
    from torch.distributed.fsdp._flat_param import FlatParamHandle

    as_written: Any = FullyShardedDataParallel.__init__

    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        given = kwargs.get("device_id")
        if isinstance(given, int) or str(given) == "cuda":  # as frameworks give it; torch would look for that GPU
            kwargs["device_id"] = torch.device("cuda", 0)
        as_written(self, *args, **kwargs)

    gather = FlatParamHandle._alloc_padded_unsharded_flat_param

    def gathered(self: Any) -> torch.Tensor:
        made: torch.Tensor = gather(self)  # type: ignore[no-untyped-call]
        recorder.classify([made], "parameters")
        return made

    shown = FlatParamHandle._use_sharded_views

    def sharded_views(self: Any) -> None:
        """Parameters that have nothing in this rank's shard are set to an empty tensor, symbolic as they are."""
        nothing = self.flat_param.new_empty(0)
        with replaced(torch, {"empty": lambda *_size, **_options: nothing}):
            shown(self)

    def storage_address(self: torch.UntypedStorage) -> int:
        address: int = torch._C.StorageBase.data_ptr(self)  # type: ignore[attr-defined]
        return self._cdata if address == 0 and self.nbytes() else address

    with (
        replaced(FullyShardedDataParallel, {"__init__": made}),
        replaced(torch.Tensor, {"data_ptr": address_of}),
        replaced(torch.UntypedStorage, {"data_ptr": storage_address}),
        # torch would look for a GPU by its number.
        replaced(_init_utils, {"_get_compute_device": lambda *_args: torch.device("cuda", 0)}),
        replaced(
            FlatParamHandle, {"_alloc_padded_unsharded_flat_param": gathered, "_use_sharded_views": sharded_views}
        ),
    ):
        yield
