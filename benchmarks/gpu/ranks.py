"""One rank of a layout in a real process: its collectives do nothing, everything else that it does is real."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from vram_guard.parallel.data_parallel import divided_states, fullest_rank
from vram_guard.parallel.install import install
from vram_guard.parallel.meshes import make_mesh
from vram_guard.step import TrainingStep


class Rank:
    """This process as the rank that holds most, for its whole life."""

    def __init__(self, step: TrainingStep, device: str) -> None:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        assert step.parallel is not None
        self.layout = step.parallel
        self.device = device
        self.first = "cuda" if self.layout.kind in ("ddp", "zero1") else self.layout.init or "meta"
        self.step = step
        rank = fullest_rank([{"params": self._on_meta()}], self.layout.gpus) if self.layout.kind == "zero1" else 0
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=self.layout.gpus)
        self.mesh = make_mesh(self.layout, device)

    def _on_meta(self) -> list[nn.Parameter]:
        build: Any = self.step.model
        with torch.device("meta"):
            return list(build().parameters())

    def _arrived(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """The sum of a bucket, which nobody computes: pretended groups have none to wait for."""
        done: Any = torch.futures.Future(devices=[] if self.device == "cpu" else [bucket.buffer().device])
        done.set_result(bucket.buffer().div_(self.layout.gpus))
        return done  # type: ignore[no-any-return]

    def model(self) -> nn.Module:
        """The model, divided, its part on the device; weights of a model made on the meta device have no values."""
        build: Any = self.step.model
        with torch.device(self.device if self.first == "cuda" else self.first):
            built: nn.Module = build()
        model: Any = install(built, self.layout, self.mesh, **self.step.ddp_options)
        if self.first == "cuda":
            model.register_comm_hook(None, lambda _, bucket: self._arrived(bucket))
        if self.first == "meta":
            model.to_empty(device="cpu" if self.layout.offload else self.device)
        if not self.layout.offload:
            return model.to(self.device)  # type: ignore[no-any-return]
        for module in model.modules():
            for name, buffer in module._buffers.items():  # noqa: SLF001 - as nn.Module.to moves them
                if buffer is not None:
                    module._buffers[name] = buffer.to(self.device)  # noqa: SLF001
        return model

    def optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The optimizer as the layout divides it."""
        return divided_states(optimizer, self.mesh) if self.layout.kind == "zero1" else optimizer
