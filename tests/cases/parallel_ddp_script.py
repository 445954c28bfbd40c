"""Two real processes (gloo, CPU) under DistributedDataParallel, ZeroRedundancyOptimizer and FSDP1.

What the Reducer takes from the allocator, and what is sent, in order.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # optimizers import it: once, for all copies
from forked_ranks import exit_codes
from parallel_cases import Net, batch, loss
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from vram_guard import Parallel
from vram_guard.parallel.data_parallel import divided_states
from vram_guard.parallel.install import install
from vram_guard.parallel.meshes import make_mesh
from vram_guard.tensors import tensors_in

RANKS, SAMPLES = 2, 2
#: Only DistributedDataParallel's own C++ asks for memory by these in the steps below.
OPERATORS = ("aten.empty.memory_format", "aten.cat.default")


class Partly(Net):
    """A parameter that no loss depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Parameter(torch.ones(7))


#: The cases that are no plain DistributedDataParallel, named after their kind.
DIVIDED, FLAT = "zero1", "fsdp1"
#: name -> (model, arguments of DistributedDataParallel)
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "as it comes": (Net, {}),
    "many buckets": (Net, {"bucket_cap_mb": 0.02}),
    "views": (Net, {"bucket_cap_mb": 0.02, "gradient_as_bucket_view": True}),
    "static graph": (Net, {"bucket_cap_mb": 0.02, "static_graph": True}),
    "unused": (Partly, {"bucket_cap_mb": 0.02, "find_unused_parameters": True}),
    DIVIDED: (Net, {}),
    FLAT: (Net, {}),
}


def layout_of(name: str) -> Parallel:
    kind: Any = name if name in (DIVIDED, FLAT) else "ddp"
    return Parallel(RANKS, kind=kind)


class Taken(TorchDispatchMode):
    """Bytes of what the operators above make, and of the larger side of each collective."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.sent: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            sides = ([tensor.nbytes for tensor in tensors_in((value,))] for value in args)
            self.sent.append(max(map(sum, sides)))
        out = func(*args, **(kwargs or {}))
        if str(func) in OPERATORS and out.numel():
            size = out.untyped_storage().nbytes()
            # Order and sizes of buckets are made in host memory, then copied to the device: here both are the CPU.
            if out.is_floating_point() or self.sizes[-1:] != [size]:
                self.sizes.append(size)
        return out


def run(name: str, rank: int, folder: Path) -> None:
    kind, options = CASES[name]
    torch.manual_seed(rank)
    layout = layout_of(name)
    plain, mesh = kind(), make_mesh(layout, "cpu")
    with Taken() as taken:
        model: Any = install(plain, layout, mesh, **options)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
        if name == DIVIDED:
            optimizer = divided_states(optimizer, mesh)
        for number in range(3):
            if number == 2:
                # A trace has two steps; the third one is for torch's own account.
                sizes, sent = list(taken.sizes), list(taken.sent)
            loss(model, batch(SAMPLES)).backward()
            optimizer.step()
            optimizer.zero_grad()
    said = model._get_ddp_logging_data() if name != FLAT else {}
    found = {
        "sizes": sizes,
        "sent": sent,
        "buckets": [int(size) for size in said.get("bucket_sizes", "0").split(", ")],
        "rebuilt": [int(size) for size in said.get("rebuilt_bucket_sizes", "0").split(", ")],
        "states": [
            value.nbytes
            for state in getattr(optimizer, "optim", optimizer).state.values()
            for value in state.values()
            if value.dim()
        ],
        "weights": [float(parameter.sum()) for parameter in model.parameters()],
    }
    (folder / f"{name}.{rank}.json").write_text(json.dumps(found), encoding="utf-8")


def run_all(rank: int, folder: Path) -> None:
    """The cases one after the other, in one rank."""
    import torch.distributed as dist
    import torch.nn.parallel.distributed as ddp

    # The comparison of shapes at the beginning is not followed.
    ddp._verify_param_shape_across_processes = lambda *_args, **_kwargs: None
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    for name in CASES:
        run(name, rank, folder)
    dist.barrier()
    dist.destroy_process_group()


def main(folder: Path) -> int:
    return sum(code != 0 for code in exit_codes(RANKS, lambda rank: run_all(rank, folder)))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
